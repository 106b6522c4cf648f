"""`score_blocks` and `select_blocks` in Triton, one launch each: scores of complete blocks, and an exact selection.

Selection does not sort: a program per row and KV head finds the key of the lowest selected block bit by bit
(`kernel_math`). It selects all blocks with a higher key, and the first ones with an equal key. A running count of the
selected blocks gives each its place in the result, which therefore ascends.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from seergate.inference_mode import without_gradients
from seergate.ops.custom_op import custom_op
from seergate.ops.gate_math import NORM_EPS, Branch
from seergate.ops.rows import RowLengths
from seergate.ops.selection import Selection
from seergate.ops.triton_impl.compression import THREADS
from seergate.ops.triton_impl.gpus import gpu_of
from seergate.ops.triton_impl.kernel_math import add_product, best, branch_end, last_needed, ordered
from seergate.ops.triton_impl.launch import DTYPES, decode_splits, padded, select_warps

MAX_BLOCKS = 16384
SCORE_CHUNK = 128
"""Query elements, and blocks, per iteration of the loops; half as many if the gate is wider than 128."""


@triton.jit
def score_kernel(  # type: ignore[no-untyped-def]
    q_ptr, lengths_ptr, compressed_ptr, weight_ptr, norm_ptr, freq_ptr, scores_ptr,
    stride_qb, stride_qh, stride_qd, stride_cb, stride_ch, stride_cn, stride_ce,
    stride_wi, stride_wg, stride_wd, stride_we,
    blocks, span, scaling, scale,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, CHUNK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """``span`` blocks of one row and KV head, for which there are ``QUERIES``. Grid: spans, KV heads, batch.

    Each program projects the queries anew: what others have read of the weights lies in the second-level cache, and a
    launch of its own for the queries would add to every layer of a step. Rows shorter than the capacity cost programs
    that read nothing. For a further query, the program reads its keys again, and its own scores.

    ``q [B, H, d]``, ``lengths [B]``, ``compressed [B, Hkv, blocks, E]``, ``weight [Hkv * QUERIES, HEADS, d, E]``,
    ``norm [E]`` or None, ``freq [E / 2]`` or None; ``scores [B, Hkv, blocks]``, 0 for blocks that are not complete.
    """
    first = tl.program_id(0) * span
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    complete = tl.minimum(length // BLOCK_SIZE, blocks)
    scores_ptr += (b * tl.num_programs(1) + h) * blocks
    low = tl.arange(0, PADDED_HALF)
    high = low + HALF
    position = (length - 1).to(tl.float32)
    compressed_ptr += b * stride_cb + h * stride_ch
    q_ptr += b * stride_qb + h * QUERIES * HEADS * stride_qh
    weight_ptr += h * QUERIES * stride_wi
    for query in range(QUERIES):
        if query > 0:
            tl.debug_barrier()  # the scores were written by other threads than will read them
        x_low = tl.zeros([PADDED_HALF], tl.float32)
        x_high = tl.zeros([PADDED_HALF], tl.float32)
        if first < complete:
            for begin in range(0, HEADS * DIM, CHUNK):
                index = begin + tl.arange(0, CHUNK)
                held = index < HEADS * DIM
                head, dim = index // DIM, index % DIM
                part = tl.load(q_ptr + head * stride_qh + dim * stride_qd, mask=held, other=0.0)
                lines = weight_ptr + (head * stride_wg + dim * stride_wd)[:, None]
                x_low, x_high = add_product(x_low, x_high, part, lines, held, stride_we, HALF, WIDTH)
            x_low, x_high = branch_end(
                x_low, x_high, compressed_ptr, norm_ptr, freq_ptr, position, scaling, HALF, WIDTH, EPS
            )
            x_low, x_high = x_low * scale, x_high * scale
        for begin in range(first, tl.minimum(first + span, blocks), CHUNK):
            block = begin + tl.arange(0, CHUNK)
            known = block < complete
            keys = compressed_ptr + block[:, None] * stride_cn
            k_low = tl.load(keys + low * stride_ce, mask=known[:, None] & (low < HALF), other=0.0).to(tl.float32)
            k_high = tl.load(keys + high * stride_ce, mask=known[:, None] & (high < WIDTH), other=0.0).to(tl.float32)
            score = tl.sum(k_low * x_low, 1) + tl.sum(k_high * x_high, 1)
            if query > 0:
                score = tl.maximum(score, tl.load(scores_ptr + block, mask=known, other=0.0))
            tl.store(scores_ptr + block, tl.where(known, score, 0.0), mask=block < blocks)
        q_ptr += HEADS * stride_qh
        weight_ptr += stride_wi


@without_gradients
def score_blocks(q: Tensor, rows: RowLengths, compressed: Tensor, branch: Branch, block_size: int) -> Tensor:
    """The op on checked arguments; float64 runs in the torch backend."""
    if not {q.dtype, branch.weight.dtype} <= set(DTYPES):
        return NotImplemented
    return score(q, rows.tensor, compressed, branch.weight, block_size, *branch[1:])


@custom_op(
    "score_blocks(Tensor q, Tensor lengths, Tensor compressed, Tensor weight, int block_size, Tensor? norm_weight, "
    "Tensor? inv_freq, float attention_scaling) -> Tensor",
    lambda q, lengths, compressed, *_: compressed.new_empty(compressed.shape[:3], dtype=torch.float32),
)
def score(
    q: Tensor,
    lengths: Tensor,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    norm_weight: Tensor | None,
    inv_freq: Tensor | None,
    attention_scaling: float,
) -> Tensor:
    """Launch the kernel. Nothing waits for the device, and the launch does not depend on values there."""
    batch, kv_heads, blocks, width = compressed.shape
    queries, heads, dim = weight.shape[:3]
    scores = torch.empty(batch, kv_heads, blocks, dtype=torch.float32, device=q.device)
    if not scores.numel():
        return scores
    gpu, half, tiles = gpu_of(q.device), -(-width // 2), -(-blocks // SCORE_CHUNK)
    span = SCORE_CHUNK * -(-tiles // decode_splits(batch * kv_heads, tiles, gpu.processors))
    norm_weight, inv_freq = (None if x is None else x.contiguous() for x in (norm_weight, inv_freq))
    score_kernel[(-(-blocks // span), kv_heads, batch)](
        q, lengths.contiguous(), compressed, weight, norm_weight, inv_freq, scores,
        *q.stride(), *compressed.stride(), *weight.stride(), blocks, span, attention_scaling, width**-0.5,
        BLOCK_SIZE=block_size, QUERIES=queries // kv_heads, HEADS=heads, DIM=dim, WIDTH=width, HALF=half,
        PADDED_HALF=padded(half), CHUNK=SCORE_CHUNK // 2 if width > 128 else SCORE_CHUNK, EPS=NORM_EPS,
        num_warps=THREADS // gpu.warp_size,
    )  # fmt: skip
    return scores


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


@without_gradients
def select_blocks(
    scores: Tensor,
    rows: RowLengths,
    *,
    budget_share: float | None,
    budget_min: int | None,
    budget_max: int | None,
    **others: Any,
) -> Selection:
    """The op on checked arguments; more than `MAX_BLOCKS` blocks, and ``budget_share``, run in the torch backend."""
    if scores.shape[2] > MAX_BLOCKS or budget_share is not None:
        return NotImplemented
    return Selection(*select(scores, rows.tensor, **others))


def width_kept(blocks: int, block_size: int, token_budget: int | None) -> int:
    """Last dimension of the index tensor."""
    return blocks if token_budget is None else min(blocks, token_budget // block_size)


def _fake(
    scores: Tensor, lengths: Tensor, block_size: int, token_budget: int | None, *_: float | None
) -> tuple[Tensor, Tensor]:
    pairs, kept = scores.shape[:2], width_kept(scores.shape[2], block_size, token_budget)
    return scores.new_empty(*pairs, kept, dtype=torch.int32), scores.new_empty(*pairs, dtype=torch.int32)


@custom_op(
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
