"""`pool_keys` in Triton: every key is read once for all poolings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from seergate.ops.backend import one_node
from seergate.ops.triton_impl.launch import padded

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TURN = 1024
"""Numbers per turn of the loop, for the 32 threads of a program: each keeps 32 maxima, minima and sums. With one warp,
nothing has to be exchanged between warps, which is what would cost most."""


@triton.jit
def pool_kernel(  # type: ignore[no-untyped-def]
    k_ptr, lengths_ptr, out_ptr,
    stride_kb, stride_kh, stride_ks, stride_kd,
    capacity,
    MAX_AT: tl.constexpr, MIN_AT: tl.constexpr, AVG_AT: tl.constexpr, KINDS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """One block of one row and KV head. Grid: blocks, KV heads, batch.

    ``k [B, Hkv, S, d]``, ``lengths [B]`` or None for ``capacity``, ``out [B, Hkv, NB, KINDS * d]``. A kind's place is
    -1 if it is not wanted. The order of summation depends on ``BLOCK_SIZE`` alone, so that a block's mean is the same
    to the last bit wherever it stands.
    """
    block = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    length = capacity
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + b).to(tl.int32)
    filled = tl.minimum(tl.maximum(length - block * BLOCK_SIZE, 0), BLOCK_SIZE).to(tl.int32)
    row = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, PADDED_DIM)
    first = k_ptr + b * stride_kb + h * stride_kh + block * BLOCK_SIZE * stride_ks

    highest = tl.full([ROWS, PADDED_DIM], -float("inf"), tl.float32)
    lowest = tl.full([ROWS, PADDED_DIM], float("inf"), tl.float32)
    total = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for low in range(0, filled, ROWS):
        held = low + row < filled
        keys = tl.load(
            first + ((low + row) * stride_ks + dim[None, :] * stride_kd), mask=held & (dim < DIM)[None, :], other=0.0
        ).to(tl.float32)
        highest = tl.where(held, tl.maximum(highest, keys), highest)
        lowest = tl.where(held, tl.minimum(lowest, keys), lowest)
        total += keys

    place = (b * tl.num_programs(1) + h) * tl.num_programs(0) + block
    out = out_ptr + place * KINDS * DIM + dim
    kind = out_ptr.dtype.element_ty
    if MAX_AT >= 0:
        tl.store(out + MAX_AT * DIM, tl.where(filled > 0, tl.max(highest, 0), 0.0).to(kind), mask=dim < DIM)
    if MIN_AT >= 0:
        tl.store(out + MIN_AT * DIM, tl.where(filled > 0, tl.min(lowest, 0), 0.0).to(kind), mask=dim < DIM)
    if AVG_AT >= 0:
        mean = tl.sum(total, 0) / tl.maximum(filled, 1).to(tl.float32)
        tl.store(out + AVG_AT * DIM, mean.to(kind), mask=dim < DIM)


def turn_rows(block_size: int, dim: int) -> int:
    """Keys per turn of the loop, a power of two."""
    return max(1, min(TURN // padded(dim), padded(block_size, 1)))


def pool_keys(k: Tensor, block_size: int, kinds: tuple[str, ...], lengths: Tensor | None) -> Tensor:
    """The op on checked arguments; float64, and gradients, are left to the torch backend."""
    if k.dtype not in DTYPES or (torch.is_grad_enabled() and k.requires_grad):
        return NotImplemented
    return pool(k, block_size, list(kinds), lengths)


@one_node(
    "pool_keys(Tensor k, int block_size, str[] kinds, Tensor? lengths) -> Tensor",
    lambda k, block_size, kinds, lengths: k.new_empty(
        *k.shape[:2], -(-k.shape[2] // block_size), len(kinds) * k.shape[3]
    ),
)
def pool(k: Tensor, block_size: int, kinds: Sequence[str], lengths: Tensor | None) -> Tensor:
    """Launch the kernel; returns the pooled keys."""
    batch, kv_heads, capacity, dim = k.shape
    blocks = -(-capacity // block_size)
    pooled = k.new_empty(batch, kv_heads, blocks, len(kinds) * dim)
    if pooled.numel():
        at = [kinds.index(kind) if kind in kinds else -1 for kind in ("max", "min", "avg")]
        pool_kernel[(blocks, kv_heads, batch)](
            k, None if lengths is None else lengths.contiguous(), pooled, *k.stride(), capacity, *at,
            KINDS=len(kinds), BLOCK_SIZE=block_size, ROWS=turn_rows(block_size, dim), DIM=dim,
            PADDED_DIM=padded(dim), num_warps=1,
        )  # fmt: skip
    return pooled
