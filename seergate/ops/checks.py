"""Argument checks that several ops share. Each raises a ValueError: argument, what it is, what it must be.

Shapes, dtypes and devices are always checked: that is free. Values of ``cu_seqlens``, ``lengths`` and the like are
checked only where they lie in host memory, because reading them from a device would stall it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int32, torch.int64)


def check_tensor(name: str, x: Tensor, shape: Sequence[int | str]) -> None:
    """A floating-point tensor of this shape; a string stands for any size (and names it in the message)."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; it must be a tensor [{', '.join(map(str, shape))}]")
    check_shape(name, x, shape)
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}; it must be a floating-point tensor")


def check_shape(name: str, x: Tensor, shape: Sequence[int | str]) -> None:
    """A tensor of this shape; a string stands for any size."""
    if x.ndim != len(shape) or any(
        isinstance(want, int) and got != want for got, want in zip(x.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be [{', '.join(map(str, shape))}]")


def check_integers(name: str, x: Tensor, shape: Sequence[int | str]) -> None:
    """An int32 or int64 tensor of this shape."""
    if not isinstance(x, Tensor) or x.dtype not in INDEX_DTYPES:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} is {got}; it must be an int32 tensor [{', '.join(map(str, shape))}]")
    check_shape(name, x, shape)


def check_same(name: str, x: Tensor, other_name: str, other: Tensor, *, dtype: bool = True) -> None:
    """Same device, and same dtype if asked."""
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device}; it must be on {other_name}'s device, {other.device}")
    if dtype and x.dtype != other.dtype:
        raise ValueError(f"{name} has dtype {x.dtype}; it must have {other_name}'s, {other.dtype}")


def check_groups(heads: int, kv_heads: int) -> None:
    """The query heads must divide into the KV heads."""
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads; it must have a positive multiple of k's {kv_heads}")


def check_decode_tensors(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, block_size: int = 1) -> int:
    """``q [B, H, d]`` against a cache ``k [B, Hkv, S, d]``, ``v [B, Hkv, S, dv]``; returns ``S``.

    With a page table ``[B, P]``, ``k`` and ``v`` are pages ``[pages, Hkv, page, d]``; then ``S`` is ``P * page``.
    """
    check_tensor("q", q, ("B", "H", "d"))
    batch, heads, dim = q.shape
    check_tensor("k", k, (batch if page_table is None else "pages", "Hkv", "S", dim))
    rows, kv_heads, capacity = k.shape[:3]
    check_tensor("v", v, (rows, kv_heads, capacity, "dv"))
    check_groups(heads, kv_heads)
    check_same("k", k, "q", q)
    check_same("v", v, "q", q)
    if page_table is None:
        return capacity
    check_page_table(page_table, batch, rows, capacity, block_size)
    check_same("page_table", page_table, "q", q, dtype=False)
    return page_table.shape[1] * capacity


def check_page_table(page_table: Tensor, batch: int, pages: int, page_size: int, block_size: int) -> None:
    """Integers ``[B, P]``, each in ``0..pages - 1`` (values only in host memory); pages hold whole blocks."""
    check_integers("page_table", page_table, (batch, "P"))
    if page_size % block_size:
        raise ValueError(f"k has pages of {page_size} tokens; it must have a multiple of block_size, {block_size}")
    if readable(page_table) and page_table.numel():
        low, high = (int(x) for x in page_table.aminmax())
        if low < 0 or high >= pages:
            raise ValueError(f"page_table has pages {low} to {high}; each must be in 0..{pages - 1}")


def check_block_size(block_size: int) -> None:
    """A positive integer."""
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise ValueError(f"block_size is {block_size!r}; it must be an integer of at least 1")


def check_scale(name: str, value: float | None) -> None:
    """``None`` or a finite number."""
    if value is not None and not (_is_number(value) and math.isfinite(value)):
        raise ValueError(f"{name} is {value!r}; it must be a finite number or None")


def check_extras(sinks: Tensor | None, softcap: float | None, heads: int, q: Tensor) -> None:
    """``sinks [H]`` on q's device; ``softcap`` positive."""
    if sinks is not None:
        check_tensor("sinks", sinks, (heads,))
        check_same("sinks", sinks, "q", q, dtype=False)
    if softcap is not None and not (_is_number(softcap) and math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap!r}; it must be a positive number or None")


def check_branch_end(weight: Tensor, norm_weight: Tensor | None, inv_freq: Tensor | None) -> None:
    """What follows a gate's linear map ``weight [..., E]``: ``norm_weight [E]``, ``inv_freq [E / 2]``, or ``None``."""
    width = weight.shape[-1]
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (width,))
        check_same("norm_weight", norm_weight, "weight", weight)
    if inv_freq is not None:
        if width % 2:
            raise ValueError(f"weight has {width} columns; with inv_freq it must have an even number")
        check_tensor("inv_freq", inv_freq, (width // 2,))
        check_same("inv_freq", inv_freq, "weight", weight, dtype=False)


def check_fraction(name: str, value: object) -> None:
    """A number strictly between 0 and 1."""
    if not (_is_number(value) and 0 < value < 1):  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}; it must be strictly between 0 and 1")


def readable(x: Tensor) -> bool:
    """True if the values of ``x`` can be looked at: without waiting for a device, and not while a graph is traced."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """int32 or int64 ``[n + 1]``, from 0 to ``tokens``, never falling (values only in host memory)."""
    check_integers("cu_seqlens", cu_seqlens, ("n + 1",))
    if len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [n + 1] for n >= 1 segments")
    if not readable(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or any(b < a for a, b in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"cu_seqlens is {brief(ends)}; it must start at 0, never fall, and end at T = {tokens}")


def check_lengths(lengths: Tensor, batch: int, limit: int, limit_name: str, *, least: int = 1) -> None:
    """int32 or int64 ``[B]`` in ``least..limit`` (values only in host memory)."""
    check_integers("lengths", lengths, (batch,))
    if readable(lengths) and batch:
        low, high = (int(x) for x in lengths.aminmax())
        if low < least or high > limit:
            raise ValueError(f"lengths is {brief(lengths.tolist())}; each must be in {least}..{limit} ({limit_name})")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def brief(values: list[int]) -> str:
    """A list for a message, long ones cut."""
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
