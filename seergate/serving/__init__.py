"""The common part of the servers' plugins: their options, the scores of blocks, and the undoing of RoPE."""
