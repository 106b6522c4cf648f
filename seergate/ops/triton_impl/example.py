"""`Example`: a call that launches kernels as they ship."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Work(NamedTuple):
    """What a kernel has to do at least in one call of the op, in all its launches together.

    Attributes:
        bytes: of device memory.
        flops: of matrix products.
        turns: of the main loop, per program.
        fp32: the products are of fp32 numbers, which is slower.
    """

    bytes: float
    flops: float = 0.0
    turns: float = 1.0
    fp32: bool = False


@dataclass(frozen=True)
class Example:
    """A call of an op on meta tensors, so that nothing runs, and only what it launches is of interest.

    Attributes:
        name: unique, such as ``"sparse_decode bfloat16 d128 b64 g8"``.
        call: runs the op.
        work: kernel name -> what it has to do in this call, for the expected time.
        products: names of its kernels that must use tensor cores (matrix products of 16-bit numbers).
        wide: names of its kernels that must load 16 bytes per thread at a time.
    """

    name: str
    call: Callable[[], Any]
    work: dict[str, Work] = field(default_factory=dict)
    products: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
