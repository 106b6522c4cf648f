"""KV cache: rows, and the kinds of memory that hold their keys and values."""
