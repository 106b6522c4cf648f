"""KV cache: lengths of rows, and storages that hold keys and values."""
