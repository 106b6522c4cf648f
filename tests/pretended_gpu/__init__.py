"""Training, decoding and evaluation on a pretended GPU: tensors that say they are on cuda:0 and lie in host memory.

Code for a GPU runs on them without one: what mixes devices is refused as CUDA refuses it, and what makes the host wait
for the device is counted with the function that does it. Kernels, streams and NCCL cannot be tested so.

``python -m tests.pretended_gpu [options of pytest]`` runs these tests; `tests/test_pretended_gpu.py` does so, too.
"""
