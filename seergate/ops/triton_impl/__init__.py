"""The ops in Triton, for NVIDIA and AMD GPUs. Compiled ahead of time and run in Triton's interpreter by the tests.

Each op has a file, with its kernels there or in a ``*_kernels`` file. Launch parameters are pure functions of shapes
and of the properties of a `Gpu` (`launch`, `gpus`). Each kernel has an example in `benchmarks/kernels/examples.py`, so
that it can be compiled for every supported GPU on a machine without one.
"""
