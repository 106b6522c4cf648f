"""What seergate knows of the architectures of transformers: where q and k can be tapped, and their RoPE."""
