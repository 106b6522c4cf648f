"""Compiles every shipped configuration of the Triton kernels without a GPU, and analyses the machine code."""
