"""GPUs that kernels are compiled for ahead of time, one per architecture, with what a roofline needs of them."""

from __future__ import annotations

from dataclasses import dataclass

from seergate.ops.triton_impl.gpus import Gpu


@dataclass(frozen=True)
class KnownGpu(Gpu):
    """A `Gpu` as its vendor's data sheet has it.

    Attributes:
        name: for tables.
        bandwidth: of device memory, bytes per second.
        flops: dense 16-bit matrix products, per second.
        clock: of the processors under load, in Hz.
    """

    name: str
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


A100 = KnownGpu("cuda", 80, 108, 163 << 10, 32, "A100", 2.0e12, 312e12, 1.41e9)
H200 = KnownGpu("cuda", 90, 132, 227 << 10, 32, "H200", 4.8e12, 989e12, 1.83e9)
B200 = KnownGpu("cuda", 100, 148, 227 << 10, 32, "B200", 8.0e12, 2250e12, 1.85e9)
MI300X = KnownGpu("hip", "gfx942", 304, 64 << 10, 64, "MI300X", 5.3e12, 1307e12, 2.1e9)

GPUS = (A100, H200, B200, MI300X)
