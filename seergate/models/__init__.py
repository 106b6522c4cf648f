"""Model families of transformers: where q and k are hooked, and their RoPE."""
