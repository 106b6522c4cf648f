"""`select_blocks` in Triton: exact, without sorting, one program per row and KV head, one launch.

The key of the last block to be picked is found bit by bit (`kernel_math`). Blocks above it are in; of those equal to
it the first ones are. A running count of what is in then gives each its place, so the result ascends by itself.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from seergate.ops.backend import one_node
from seergate.ops.selection import Selection
from seergate.ops.triton_impl.kernel_math import best, last_needed, ordered
from seergate.ops.triton_impl.launch import padded, select_warps

MAX_BLOCKS = 16384


@triton.jit
def _softmax(scores, free):  # type: ignore[no-untyped-def]
    """Over the blocks to choose among; zero elsewhere, also where there is none."""
    top = tl.max(tl.where(free, scores, -3.4028234663852886e38), 1)[:, None]
    weight = tl.where(free, tl.exp(tl.minimum(scores - top, 0.0)), 0.0)
    return weight / tl.maximum(tl.sum(weight, 1), 1.0)[:, None]


@triton.jit(do_not_specialize=["limit_bits"])
def select_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, lengths_ptr, indices_ptr, counts_ptr,
    stride_sb, stride_sh, stride_sn,
    budget, kept, sink_blocks, limit_bits: tl.int64,
    BLOCK_SIZE: tl.constexpr, RULE: tl.constexpr, WIDTH: tl.constexpr, KEPT_WIDTH: tl.constexpr,
):  # fmt: skip
    """The blocks of one row and KV head. Grid: batch, KV heads.

    ``scores [B, Hkv, NB]``, ``lengths [B]``; ``indices [B, Hkv, kept]``, ``counts [B, Hkv]``. ``budget`` in blocks,
    ``limit_bits`` the threshold or top-p in fp64; as an integer, since older releases of Triton make any float fp32.
    """
    limit = tl.cast(limit_bits, tl.int64).to(tl.float64, bitcast=True)
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    pair = b * tl.num_programs(1) + h
    block = tl.arange(0, WIDTH)[None, :]  # one row: what picks the best works on rows
    current = (tl.load(lengths_ptr + b).to(tl.int32) - 1) // BLOCK_SIZE
    past = block < current
    places = scores_ptr + b * stride_sb + h * stride_sh + block * stride_sn
    scores, keys = ordered(tl.load(places, mask=past, other=0.0).to(tl.float32))
    always = (block == current) | (past & (block < sink_blocks))
    free = past & ~always

    if RULE == "token_budget":
        picked = best(keys, free, budget - tl.sum(always.to(tl.int32), 1))
    elif RULE == "threshold":
        picked = free & (_softmax(scores, free) > tl.cast(limit, tl.float32))
    else:
        share = _softmax(scores, free).to(tl.float64)  # the order of summation does not matter in fp64
        last = last_needed(keys, tl.where(free, share, 0.0), limit)[:, None]
        above = free & (keys > last)
        equal = free & (keys == last)
        mass = tl.sum(tl.where(above, share, 0.0), 1)[:, None]
        each = tl.max(tl.where(equal, share, 0.0), 1)[:, None]
        better = tl.cumsum(equal.to(tl.int32), 1) - 1
        picked = above | (equal & (mass + better * each < limit))

    chosen = (picked | always).to(tl.int32)
    count = tl.sum(chosen, 1)
    tl.store(counts_ptr + pair + tl.arange(0, 1), count)
    tl.store(indices_ptr + pair * kept + tl.cumsum(chosen, 1) - 1, block, mask=chosen > 0)
    slot = tl.arange(0, KEPT_WIDTH)[None, :]
    tl.store(indices_ptr + pair * kept + slot, -1, mask=(slot >= count[:, None]) & (slot < kept))


@torch.no_grad()
def select_blocks(scores: Tensor, **others: Any) -> Selection:
    """The op on checked arguments; more than `MAX_BLOCKS` are left to the torch backend."""
    return Selection(*select(scores=scores, **others)) if scores.shape[2] <= MAX_BLOCKS else NotImplemented


def width_kept(blocks: int, block_size: int, token_budget: int | None) -> int:
    """Width of the index tensor."""
    return blocks if token_budget is None else min(blocks, token_budget // block_size)


def _fake(
    scores: Tensor, lengths: Tensor, block_size: int, token_budget: int | None, *_: float | None
) -> tuple[Tensor, Tensor]:
    pairs, kept = scores.shape[:2], width_kept(scores.shape[2], block_size, token_budget)
    return scores.new_empty(*pairs, kept, dtype=torch.int32), scores.new_empty(*pairs, dtype=torch.int32)


@one_node(
    "select_blocks(Tensor scores, Tensor lengths, int block_size, int? token_budget, float? threshold, float? top_p, "
    "int sink_blocks) -> (Tensor, Tensor)",
    _fake,
)
def select(
    scores: Tensor,
    lengths: Tensor,
    block_size: int,
    token_budget: int | None,
    threshold: float | None,
    top_p: float | None,
    sink_blocks: int,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; returns indices and counts without waiting for the device."""
    batch, kv_heads, blocks = scores.shape
    kept = width_kept(blocks, block_size, token_budget)
    indices = torch.empty(batch, kv_heads, kept, dtype=torch.int32, device=scores.device)
    counts = torch.empty(batch, kv_heads, dtype=torch.int32, device=scores.device)
    if counts.numel():
        rule = "token_budget" if token_budget is not None else "threshold" if threshold is not None else "top_p"
        width = padded(blocks)
        (limit_bits,) = struct.unpack("q", struct.pack("d", threshold or top_p or 0.0))
        select_kernel[(batch, kv_heads)](
            scores, lengths.contiguous(), indices, counts, *scores.stride(), kept, kept, sink_blocks, limit_bits,
            BLOCK_SIZE=block_size, RULE=rule, WIDTH=width, KEPT_WIDTH=padded(kept), num_warps=select_warps(width),
        )  # fmt: skip
    return indices, counts
