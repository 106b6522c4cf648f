"""The Triton kernels without a GPU: every configuration that ships, compiled, and its machine code read."""
