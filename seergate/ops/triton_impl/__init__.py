"""The ops in Triton, for NVIDIA and AMD GPUs. Compiled ahead of time and run in Triton's interpreter by the tests.

One file per op, kernels beside or in a file of their own. What a launch depends on besides its arguments is a `Gpu`
(`gpus`); what launches with which parameters is chosen by pure functions of shapes and a `Gpu` (`launch`). A kernel
gets an example in `benchmarks/kernels/examples.py`, so that it is compiled for each GPU without owning one.
"""
