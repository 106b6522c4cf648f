"""Properties of GPUs that determine launch parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU.

    Attributes:
        backend: Triton backend, ``"cuda"`` or ``"hip"``.
        arch: compute capability times ten, or AMD's architecture name.
        processors: number of streaming multiprocessors or compute units.
        shared_memory: maximum bytes of one program.
        warp_size: threads of a warp.
    """

    backend: str
    arch: int | str
    processors: int
    shared_memory: int
    warp_size: int


H100 = Gpu("cuda", 90, 132, 227 << 10, 32)
_ASSUMED: ContextVar[Gpu] = ContextVar("assumed_gpu", default=H100)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a CUDA device; else (interpreter, meta tensors) the one set by `assuming`, by default an H100."""
    if device.type != "cuda":
        return _ASSUMED.get()
    return _present(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def assuming(gpu: Gpu) -> Iterator[None]:
    """Choose launch parameters for this GPU on a machine without a GPU."""
    token = _ASSUMED.set(gpu)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


@cache
def _present(index: int) -> Gpu:
    """Ask Triton's driver: PyTorch reports a program's shared memory only from 2.7 on, and not on AMD."""
    from triton.runtime import driver

    with torch.cuda.device(index):
        target = driver.active.get_current_target()
    facts = driver.active.utils.get_device_properties(index)
    return Gpu(target.backend, target.arch, facts["multiprocessor_count"], facts["max_shared_mem"], target.warp_size)
