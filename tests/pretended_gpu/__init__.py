"""GPU code on tensors that claim to be on cuda:0 and lie in host memory: mixed devices are refused, waits counted.

Kernels, streams and NCCL are not covered. Run by ``python -m tests.pretended_gpu`` and `tests/test_pretended_gpu.py`.
"""
