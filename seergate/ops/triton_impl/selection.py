"""`select_blocks` in Triton: exact, without sorting, one program per row and KV head, one launch.

A score becomes an unsigned integer of the same order. The key of the last block to be picked is found bit by bit, from
the
highest: 32 sums over the blocks, whatever their number. Blocks above it are in; of those equal to it the first ones
are. A running count of what is in then gives each its place, so the result ascends by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from seergate.ops.selection import Selection
from seergate.ops.triton_impl.decode_launch import padded, select_warps
from seergate.ops.triton_impl.example import Example, Work, meta

MAX_BLOCKS = 16384


@triton.jit
def _ordered(scores: tl.tensor) -> tl.tensor:
    """uint32 in the order of fp32 ``scores``; NaN lowest, infinities as the extremes, negative zero equal to zero."""
    largest: tl.constexpr = 3.4028234663852886e38
    bounded = tl.where(scores == scores, tl.minimum(tl.maximum(scores, -largest), largest), -largest)  # NaN differs
    bounded = tl.where(bounded == 0, 0.0, bounded)
    bits = bounded.to(tl.int32, bitcast=True)
    return bounded, tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _softmax(scores: tl.tensor, past: tl.tensor) -> tl.tensor:
    """Over the past blocks; zero elsewhere, also where there is none."""
    top = tl.max(tl.where(past, scores, -3.4028234663852886e38), 0)
    weight = tl.where(past, tl.exp(tl.minimum(scores - top, 0.0)), 0.0)
    return weight / tl.maximum(tl.sum(weight, 0), 1.0)


@triton.jit
def select_kernel(
    scores_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    stride_sb: tl.tensor,
    stride_sh: tl.tensor,
    stride_sn: tl.tensor,
    budget: tl.tensor,
    kept: tl.tensor,
    sink_blocks: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    RULE: tl.constexpr,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT_WIDTH: tl.constexpr,
) -> None:
    """The blocks of one row and KV head. Grid: batch, KV heads.

    ``scores [B, Hkv, NB]``, ``lengths [B]``; ``indices [B, Hkv, kept]``, ``counts [B, Hkv]``. ``budget`` in blocks.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    pair = b * tl.num_programs(1) + h
    block = tl.arange(0, WIDTH)
    current = (tl.load(lengths_ptr + b).to(tl.int32) - 1) // BLOCK_SIZE
    past = block < current
    places = scores_ptr + b * stride_sb + h * stride_sh + block * stride_sn
    scores, key = _ordered(tl.load(places, mask=past, other=0.0).to(tl.float32))
    always = (block == current) | (past & (block < sink_blocks))

    if RULE == "threshold":
        picked = past & (_softmax(scores, past) > LIMIT)
    else:
        # The largest key such that the blocks from it upwards suffice.
        last = tl.full([], 0, tl.uint32)
        bit = tl.full([], 1, tl.uint32) << 31
        if RULE == "token_budget":
            candidate = past & ~always
            free = budget - tl.sum(always.to(tl.int32), 0)
            for _ in range(32):
                tried = last | bit
                enough = tl.sum((candidate & (key >= tried)).to(tl.int32), 0) >= free
                last = tl.where(enough, tried, last)
                bit = bit >> 1
            above = candidate & (key > last)
            equal = candidate & (key == last)
            wanted = free - tl.sum(above.to(tl.int32), 0)
            picked = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= wanted))
        else:
            share = _softmax(scores, past).to(tl.float64)  # the order of summation does not matter in fp64
            for _ in range(32):
                tried = last | bit
                enough = tl.sum(tl.where(past & (key >= tried), share, 0.0), 0) >= LIMIT
                last = tl.where(enough, tried, last)
                bit = bit >> 1
            above = past & (key > last)
            equal = past & (key == last)
            mass = tl.sum(tl.where(above, share, 0.0), 0)
            each = tl.max(tl.where(equal, share, 0.0), 0)
            better = tl.cumsum(equal.to(tl.int32), 0) - 1
            picked = above | (equal & (mass + better * each < LIMIT))

    chosen = (picked | always).to(tl.int32)
    count = tl.sum(chosen, 0)
    tl.store(counts_ptr + pair, count)
    tl.store(indices_ptr + pair * kept + tl.cumsum(chosen, 0) - 1, block, mask=chosen > 0)
    slot = tl.arange(0, KEPT_WIDTH)
    tl.store(indices_ptr + pair * kept + slot, -1, mask=(slot >= count) & (slot < kept))


@torch.no_grad()
def select_blocks(
    scores: Tensor,
    lengths: Tensor,
    *,
    block_size: int,
    token_budget: int | None,
    threshold: float | None,
    top_p: float | None,
    sink_blocks: int,
) -> Selection:
    """See `seergate.ops.select_blocks`."""
    if scores.shape[2] > MAX_BLOCKS:
        from seergate.ops.torch_impl.selection import select_blocks as in_torch

        return in_torch(
            scores,
            lengths,
            block_size=block_size,
            token_budget=token_budget,
            threshold=threshold,
            top_p=top_p,
            sink_blocks=sink_blocks,
        )
    run = _select if torch.compiler.is_compiling() else select  # as one node, which takes 10 us longer
    return Selection(*run(scores, lengths, block_size, token_budget, threshold, top_p, sink_blocks))


def select(
    scores: Tensor,
    lengths: Tensor,
    block_size: int,
    token_budget: int | None,
    threshold: float | None,
    top_p: float | None,
    sink_blocks: int,
) -> tuple[Tensor, Tensor]:
    """Indices and counts. Nothing waits for the device."""
    batch, kv_heads, blocks = scores.shape
    kept = width_kept(blocks, block_size, token_budget)
    indices = torch.empty(batch, kv_heads, kept, dtype=torch.int32, device=scores.device)
    counts = torch.empty(batch, kv_heads, dtype=torch.int32, device=scores.device)
    if counts.numel():
        if token_budget is not None:
            rule, limit = "token_budget", None
        else:
            rule, limit = ("threshold", threshold) if threshold is not None else ("top_p", top_p)
        width = padded(blocks)
        select_kernel[(batch, kv_heads)](
            scores, lengths.contiguous(), indices, counts, *scores.stride(), kept, kept, sink_blocks,
            BLOCK_SIZE=block_size, RULE=rule, LIMIT=limit, WIDTH=width, KEPT_WIDTH=padded(kept),
            num_warps=select_warps(width),
        )  # fmt: skip
    return indices, counts


def width_kept(blocks: int, block_size: int, token_budget: int | None) -> int:
    """How many indices there is room for."""
    return blocks if token_budget is None else min(blocks, token_budget // block_size)


def _fake(
    scores: Tensor, lengths: Tensor, block_size: int, token_budget: int | None, *_: float | None
) -> tuple[Tensor, Tensor]:
    pairs, kept = scores.shape[:2], width_kept(scores.shape[2], block_size, token_budget)
    return scores.new_empty(*pairs, kept, dtype=torch.int32), scores.new_empty(*pairs, dtype=torch.int32)


_select = torch.library.custom_op(
    "seergate::select_blocks",
    select,
    mutates_args=(),
    schema=(
        "(Tensor scores, Tensor lengths, int block_size, int? token_budget, float? threshold, float? top_p, "
        "int sink_blocks) -> (Tensor, Tensor)"
    ),
)
_select.register_fake(_fake)


def examples() -> Iterator[Example]:
    """The three rules, from 8k tokens in blocks of 64 to 128k in blocks of 16."""
    for blocks in (128, 512, 2048, 8192):
        for rule in ({"token_budget": 4096}, {"threshold": 4e-3}, {"top_p": 0.95}):
            yield select_example(torch.float32, blocks, rule)
    for dtype in (torch.float16, torch.bfloat16):
        yield select_example(dtype, 512, {"token_budget": 4096})
    for blocks in (128, 512, 2048):  # as decoding does by default
        yield select_example(torch.float32, blocks, {"token_budget": 4096}, sink_blocks=0)


def select_example(dtype: torch.dtype, blocks: int, rule: dict[str, Any], sink_blocks: int = 1) -> Example:
    """8 rows, 8 KV heads, blocks of 64 tokens."""
    scores, lengths = meta(8, 8, blocks, dtype=dtype), meta(8, dtype=torch.int64)
    return Example(
        f"select_blocks {next(iter(rule))} of {blocks} {str(dtype).removeprefix('torch.')}"
        + " without sinks" * (sink_blocks == 0),
        lambda: select(
            scores, lengths, 64, rule.get("token_budget"), rule.get("threshold"), rule.get("top_p"), sink_blocks
        ),
        {select_kernel.__name__: Work(float(scores.numel() * scores.element_size()), turns=32)},
    )
