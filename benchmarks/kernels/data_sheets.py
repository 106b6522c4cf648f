"""GPUs that kernels are compiled for ahead of time, one per architecture."""

from __future__ import annotations

from dataclasses import dataclass

from seergate.ops.triton_impl.gpus import Gpu


@dataclass(frozen=True)
class KnownGpu(Gpu):
    """A `Gpu` that need not be present, with its name for tables."""

    name: str

    @property
    def target(self) -> str:
        """Name of the architecture, such as ``"sm_90"`` or ``"gfx942"``."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


A100 = KnownGpu("cuda", 80, 108, 163 << 10, 32, "A100")
H200 = KnownGpu("cuda", 90, 132, 227 << 10, 32, "H200")
B200 = KnownGpu("cuda", 100, 148, 227 << 10, 32, "B200")
MI300X = KnownGpu("hip", "gfx942", 304, 64 << 10, 64, "MI300X")

GPUS = (A100, H200, B200, MI300X)
