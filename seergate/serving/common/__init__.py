"""Code shared by the servers' plugins: options, block scores, and the inverse of RoPE."""
