"""Argument checks shared by the ops. Each raises a ValueError that names the argument, its value and its rule.

Shapes, dtypes and devices are always checked, at no cost. Values of index tensors such as ``cu_seqlens`` and
``lengths`` are checked only in host memory, because reading them from a device would stall it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from seergate.checks import check, is_number

INDEX_DTYPES = (torch.int32, torch.int64)

Named = tuple[str, Tensor]
"""Name of an argument, and its tensor."""


def check_tensor(
    name: str, x: Tensor, shape: Sequence[int | str], on: Named | None = None, like: Named | None = None
) -> None:
    """Check for a floating-point tensor of this shape, on the device of ``on``, or with the device and dtype of
    ``like``. In ``shape``, a string allows any size and names it in the message.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; it must be a tensor [{', '.join(map(str, shape))}]")
    check_shape(name, x, shape)
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}; it must be a floating-point tensor")
    check_device(name, x, on or like)
    if like is not None and x.dtype != like[1].dtype:
        raise ValueError(f"{name} has dtype {x.dtype}; it must have {like[0]}'s, {like[1].dtype}")


def check_shape(name: str, x: Tensor, shape: Sequence[int | str]) -> None:
    """Check a tensor's shape; a string allows any size."""
    if x.ndim != len(shape) or any(
        isinstance(want, int) and got != want for got, want in zip(x.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be [{', '.join(map(str, shape))}]")


def check_integers(name: str, x: Tensor, shape: Sequence[int | str], on: Named | None = None) -> None:
    """Check for an int32 or int64 tensor of this shape, on the device of ``on`` if given."""
    if not isinstance(x, Tensor) or x.dtype not in INDEX_DTYPES:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} is {got}; it must be an int32 tensor [{', '.join(map(str, shape))}]")
    check_shape(name, x, shape)
    check_device(name, x, on)


def check_device(name: str, x: Tensor, on: Named | None) -> None:
    """Check that a tensor is on the device of ``on``, if given."""
    if on is not None and x.device != on[1].device:
        raise ValueError(f"{name} is on {x.device}; it must be on {on[0]}'s device, {on[1].device}")


def check_groups(heads: int, kv_heads: int) -> None:
    """Check that the number of query heads is a positive multiple of the number of KV heads."""
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads; it must have a positive multiple of k's {kv_heads}")


def check_scale(name: str, value: float | None, dim: int) -> float:
    """Check for a finite number or ``None``; returns the number, or ``1 / sqrt(dim)`` for ``None``."""
    if value is None:
        return 1.0 / math.sqrt(dim)
    check(name, value, is_number(value) and math.isfinite(value), "a finite number or None")
    return value


def check_softmax(q: Tensor, sm_scale: float | None, sinks: Tensor | None, softcap: float | None) -> float:
    """Check ``sinks [H]``, ``softcap`` and the scale of ``q [..., H, d] . k``; returns the scale."""
    for name, value in (("sm_scale", sm_scale), ("softcap", softcap)):
        right = value is None or (is_number(value) and math.isfinite(value) and value > 0)
        check(name, value, right, "a positive number or None")
    if sinks is not None:
        check_tensor("sinks", sinks, (q.shape[-2],), on=("q", q))
    return check_scale("sm_scale", sm_scale, q.shape[-1])


def readable(x: Tensor) -> bool:
    """True if the host can read values of ``x`` without waiting: ``x`` is on the CPU and not being traced."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """Check for int32 or int64 ``[n + 1]`` that ascends from 0 to ``tokens`` (values only in host memory)."""
    check_integers("cu_seqlens", cu_seqlens, ("n + 1",))
    if len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [n + 1] for n >= 1 segments")
    if not readable(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or any(b < a for a, b in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"cu_seqlens is {brief(ends)}; it must start at 0, never fall, and end at T = {tokens}")


def check_lengths(
    lengths: Tensor, batch: int, limit: int, limit_name: str, *, least: int = 1, on: Named | None = None
) -> None:
    """Check for int32 or int64 ``[B]`` on the device of ``on``, if given; in host memory, for ``least..limit``."""
    check_integers("lengths", lengths, (batch,), on)
    if readable(lengths) and batch:
        low, high = (int(x) for x in lengths.aminmax())
        if low < least or high > limit:
            raise ValueError(f"lengths is {brief(lengths.tolist())}; each must be in {least}..{limit} ({limit_name})")


def brief(values: list[int]) -> str:
    """A list as text for a message; long lists are shortened."""
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
