"""What the choice of launch parameters and the roofline need to know of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    """Facts about a GPU, from its vendor's data sheet.

    Attributes:
        name: for tables.
        backend: Triton's name of its compiler, ``"cuda"`` or ``"hip"``.
        arch: compute capability times ten, or AMD's name of the architecture.
        processors: streaming multiprocessors, or compute units.
        shared_memory: bytes that one program may have.
        warp_size: threads.
        bandwidth: of device memory, bytes per second.
        flops: dense 16-bit matrix products, per second.
        clock: of the processors under load, in Hz.
    """

    name: str
    backend: str
    arch: int | str
    processors: int
    shared_memory: int
    warp_size: int
    bandwidth: float
    flops: float
    clock: float

    @property
    def issued(self) -> float:
        """Instructions of a whole warp that a processor issues per cycle: four on NVIDIA; AMD's take four cycles."""
        return 4.0 if self.backend == "cuda" else 1.0

    @property
    def flops_fp32(self) -> float:
        """Of products of fp32 numbers: three tf32 products, each at half the 16-bit rate; on AMD one, at an eighth."""
        return self.flops / (6.0 if self.backend == "cuda" else 8.0)

    @property
    def target(self) -> str:
        """As in ``"sm_90"`` and ``"gfx942"``."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


A100 = Gpu("A100", "cuda", 80, 108, 163 << 10, 32, 2.0e12, 312e12, 1.41e9)
H200 = Gpu("H200", "cuda", 90, 132, 227 << 10, 32, 4.8e12, 989e12, 1.83e9)
B200 = Gpu("B200", "cuda", 100, 148, 227 << 10, 32, 8.0e12, 2250e12, 1.85e9)
MI300X = Gpu("MI300X", "hip", "gfx942", 304, 64 << 10, 64, 5.3e12, 1307e12, 2.1e9)

GPUS = (A100, H200, B200, MI300X)
"""Those that kernels are compiled for ahead of time, one per architecture."""

_ASSUMED: ContextVar[Gpu] = ContextVar("assumed_gpu", default=H200)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a device; for one that is none (the interpreter, meta tensors), the assumed one."""
    return _present(device.index) if device.type == "cuda" else _ASSUMED.get()


@contextmanager
def assuming(gpu: Gpu) -> Iterator[None]:
    """Choose launch parameters as for this GPU where there is none."""
    token = _ASSUMED.set(gpu)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


@cache
def _present(index: int | None) -> Gpu:
    """What a launch depends on is asked of the device; the roofline's numbers are those of the nearest known GPU."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    hip = torch.version.hip is not None
    capability = 10 * found.major + found.minor
    near = MI300X if hip else A100 if capability < 90 else H200 if capability < 100 else B200
    return Gpu(
        found.name,
        near.backend,
        found.gcnArchName.split(":")[0] if hip else capability,
        found.multi_processor_count,
        near.shared_memory if hip else found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        found.warp_size,
        near.bandwidth,
        near.flops,
        near.clock,
    )
