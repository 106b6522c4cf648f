"""A decode step over a paged KV cache in Triton, in three launches before attention: compress the keys of blocks that
close, score blocks, and write the selection as a block table in which each KV head is a sequence of its own.

Keys and queries are after RoPE, which is inverted in registers with the layer's table of angles. Nothing waits for the
device and no shape depends on values there, so all of it can be captured in a CUDA graph. The slow equivalent is
`seergate.serving.vllm.attention` with the torch backend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from seergate.ops.gate_math import NORM_EPS, Branch
from seergate.ops.triton_impl.compression import CHUNK, THREADS
from seergate.ops.triton_impl.gpus import gpu_of
from seergate.ops.triton_impl.kernel_math import add_product, best, branch_end, ordered
from seergate.ops.triton_impl.launch import decode_splits, padded, select_warps
from seergate.ops.triton_impl.selection import MAX_BLOCKS, SCORE_CHUNK


@triton.jit
def before_rope(  # type: ignore[no-untyped-def]
    ptr, dim, position, angles_ptr, mask,
    ROTARY: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Dimensions ``dim`` of vectors at ``ptr``, in fp32, as they were before RoPE at ``position``."""
    x = tl.load(ptr + dim, mask=mask, other=0.0).to(tl.float32)
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        if NEOX:
            is_first = dim < half
            pair = tl.where(is_first, dim, dim - half)
            partner = tl.where(is_first, dim + half, dim - half)
        else:
            is_first = dim % 2 == 0
            pair = dim // 2
            partner = tl.where(is_first, dim + 1, dim - 1)
        turned = mask & (dim < ROTARY)
        y = tl.load(ptr + partner, mask=turned, other=0.0).to(tl.float32)
        line = angles_ptr + position * ROTARY + pair
        cos = tl.load(line, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(line + half, mask=turned, other=0.0).to(tl.float32)
        x = (x * cos + tl.where(is_first, y, -y) * sin) / (cos * cos + sin * sin)
    return x


@triton.jit
def close_kernel(  # type: ignore[no-untyped-def]
    cache_ptr, table_ptr, lengths_ptr, angles_ptr, summary_ptr, weight_ptr, norm_ptr, freq_ptr,
    stride_cp, stride_ch, stride_cs, stride_tb, stride_sp, stride_sh, stride_wh, stride_wp, stride_we,
    scaling,
    MAX_AT: tl.constexpr, MIN_AT: tl.constexpr, AVG_AT: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The compressed key of one row and KV head, if its newest token completes a block. Grid: KV heads, rows.

    ``cache [pages, Hkv, PAGE, >= d]``, ``table [R, P]``, ``lengths [R]``, ``angles [positions, ROTARY]`` or None,
    ``summary [pages, Hkv, E]``, ``weight [Hkv, kinds * d, E]``, ``norm [E]`` or None, ``freq [E / 2]`` or None. A
    kind's place is -1 if it is not wanted.
    """
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    if (length > 0) & (length % BLOCK_SIZE == 0):
        row = tl.arange(0, ROWS)[:, None]
        in_block = row < BLOCK_SIZE
        position = length - BLOCK_SIZE + row
        table_ptr += b * stride_tb
        page = tl.load(table_ptr + position // PAGE, mask=in_block, other=0).to(tl.int64)
        keys_ptr = cache_ptr + page * stride_cp + h * stride_ch + position % PAGE * stride_cs
        weight_ptr += h * stride_wh
        low = tl.arange(0, PADDED_HALF)
        high = low + HALF
        x_low = tl.zeros([PADDED_HALF], tl.float32)
        x_high = tl.zeros([PADDED_HALF], tl.float32)
        for begin in range(0, DIM, CHUNK):
            dims = begin + tl.arange(0, CHUNK)
            held = dims < DIM
            known = in_block & held[None, :]
            keys = before_rope(keys_ptr, dims[None, :], position, angles_ptr, known, ROTARY, NEOX)
            line = weight_ptr + dims[:, None] * stride_wp
            if MAX_AT >= 0:
                pooled = tl.max(tl.where(in_block, keys, -float("inf")), 0)
                x_low, x_high = add_product(
                    x_low, x_high, pooled, line + MAX_AT * DIM * stride_wp, held, stride_we, HALF, WIDTH
                )
            if MIN_AT >= 0:
                pooled = tl.min(tl.where(in_block, keys, float("inf")), 0)
                x_low, x_high = add_product(
                    x_low, x_high, pooled, line + MIN_AT * DIM * stride_wp, held, stride_we, HALF, WIDTH
                )
            if AVG_AT >= 0:
                pooled = tl.sum(keys, 0) / BLOCK_SIZE
                x_low, x_high = add_product(
                    x_low, x_high, pooled, line + AVG_AT * DIM * stride_wp, held, stride_we, HALF, WIDTH
                )
        first = (length - BLOCK_SIZE).to(tl.float32)
        x_low, x_high = branch_end(x_low, x_high, summary_ptr, norm_ptr, freq_ptr, first, scaling, HALF, WIDTH, EPS)
        last = tl.load(table_ptr + (length - 1) // PAGE).to(tl.int64)
        out = summary_ptr + last * stride_sp + h * stride_sh
        kind = summary_ptr.dtype.element_ty
        tl.store(out + low, x_low.to(kind), mask=low < HALF)
        tl.store(out + high, x_high.to(kind), mask=high < WIDTH)


@triton.jit
def paged_score_kernel(  # type: ignore[no-untyped-def]
    q_ptr, lengths_ptr, table_ptr, angles_ptr, summary_ptr, weight_ptr, norm_ptr, freq_ptr, scores_ptr, packed_ptr,
    stride_qb, stride_qh, stride_tb, stride_sp, stride_sh, stride_wh, stride_wg, stride_wd, stride_we,
    blocks, span, scaling, scale,
    BLOCK_SIZE: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, CHUNK: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """``span`` blocks of one row and KV head. Grid: spans, KV heads, rows; see `scoring.score_kernel`.

    ``q [R, Hkv * GROUP, d]`` after RoPE, ``table [R, P]`` with ``RUN`` pages a block, the last of which has its
    ``summary [pages, Hkv, E]``, ``scores [R, Hkv, blocks]``, 0 for blocks that are not complete. The first span copies
    the query to ``packed [R, Hkv * GROUP, d]``, where attention finds it without gaps.
    """
    first = tl.program_id(0) * span
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    complete = tl.minimum(length // BLOCK_SIZE, blocks)
    pair = b * tl.num_programs(1) + h
    q_ptr += b * stride_qb + h * GROUP * stride_qh
    low = tl.arange(0, PADDED_HALF)
    high = low + HALF
    x_low = tl.zeros([PADDED_HALF], tl.float32)
    x_high = tl.zeros([PADDED_HALF], tl.float32)
    position = tl.maximum(length - 1, 0)
    for begin in range(0, GROUP * DIM, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        held = index < GROUP * DIM
        head, dim = index // DIM, index % DIM
        if first == 0:
            given = tl.load(q_ptr + head * stride_qh + dim, mask=held, other=0.0)
            tl.store(packed_ptr + pair * GROUP * DIM + index, given, mask=held)
        if first < complete:
            query = before_rope(q_ptr + head * stride_qh, dim, position, angles_ptr, held, ROTARY, NEOX)
            lines = weight_ptr + h * stride_wh + (head * stride_wg + dim * stride_wd)[:, None]
            x_low, x_high = add_product(x_low, x_high, query, lines, held, stride_we, HALF, WIDTH)
    x_low, x_high = branch_end(
        x_low, x_high, summary_ptr, norm_ptr, freq_ptr, position.to(tl.float32), scaling, HALF, WIDTH, EPS
    )
    x_low, x_high = x_low * scale, x_high * scale
    for begin in range(first, tl.minimum(first + span, blocks), CHUNK):
        block = begin + tl.arange(0, CHUNK)
        known = block < complete
        page = tl.load(table_ptr + b * stride_tb + block * RUN + RUN - 1, mask=known, other=0).to(tl.int64)
        keys = summary_ptr + (page * stride_sp + h * stride_sh)[:, None]
        k_low = tl.load(keys + low, mask=known[:, None] & (low < HALF), other=0.0).to(tl.float32)
        k_high = tl.load(keys + high, mask=known[:, None] & (high < WIDTH), other=0.0).to(tl.float32)
        score = tl.sum(k_low * x_low, 1) + tl.sum(k_high * x_high, 1)
        tl.store(scores_ptr + pair * blocks + block, tl.where(known, score, 0.0), mask=block < blocks)


@triton.jit
def place_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, lengths_ptr, table_ptr, places_ptr, tokens_ptr,
    stride_tb, blocks, columns, budget, kept, sink_blocks, page_step, head_step,
    BLOCK_SIZE: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr, KEPT_WIDTH: tl.constexpr,
):  # fmt: skip
    """The blocks that a budget picks for one row and KV head, as places of pages. Grid: rows, KV heads.

    ``scores [R, Hkv, blocks]``, ``lengths [R]``, ``table [R, columns]``; ``places [R, Hkv, kept * RUN]`` of ascending
    blocks, and ``tokens [R, Hkv]`` in them. Page ``p`` of head ``h`` is at place ``p * page_step + h * head_step``. A
    row without tokens, a graph's padding, reads the first token of page 0.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    pair = b * tl.num_programs(1) + h
    block = tl.arange(0, WIDTH)[None, :]
    last = tl.maximum(tl.load(lengths_ptr + b).to(tl.int32) - 1, 0)
    current = last // BLOCK_SIZE
    past = block < current
    _, keys = ordered(tl.load(scores_ptr + pair * blocks + block, mask=past, other=0.0))
    always = (block == current) | (past & (block < sink_blocks))
    picked = best(keys, past & ~always, budget - tl.sum(always.to(tl.int32), 1))
    chosen = (picked | always).to(tl.int32)
    count = tl.sum(chosen, 1)
    tl.store(tokens_ptr + pair + tl.arange(0, 1), (count - 1) * BLOCK_SIZE + last % BLOCK_SIZE + 1)
    places_ptr += pair * kept * RUN
    slot = tl.cumsum(chosen, 1) - 1
    beyond = tl.arange(0, KEPT_WIDTH)[None, :]
    unused = (beyond >= count[:, None]) & (beyond < kept)
    for page_of_run in tl.static_range(RUN):
        column = tl.minimum(block * RUN + page_of_run, columns - 1)  # the open block may have fewer pages yet
        page = tl.load(table_ptr + b * stride_tb + column, mask=chosen > 0, other=0).to(tl.int64)
        place = (page * page_step + h * head_step).to(tl.int32)
        tl.store(places_ptr + slot * RUN + page_of_run, place, mask=chosen > 0)
        tl.store(places_ptr + beyond * RUN + page_of_run, 0, mask=unused)


def close_blocks(
    cache: Tensor,
    summary: Tensor,
    table: Tensor,
    lengths: Tensor,
    angles: Tensor | None,
    neox: bool,
    branch: Branch,
    block_size: int,
    kinds: tuple[str, ...],
) -> None:
    """Write the compressed key of each row's newest block, if its newest token completes that block.

    Args:
        cache: ``[pages, Hkv, S, D']``, keys after RoPE in the first D channels; ``S`` divides ``block_size``.
        summary: ``[pages, Hkv, E]``, compressed keys, changed in place at the last page of a completed block.
        table: int32 ``[R, P]``, pages of the rows.
        lengths: int ``[R]``; 0 for rows that are padding.
        angles: the layer's RoPE, ``[positions, rotated dimensions]``, cosines and then sines; ``None`` without RoPE.
        neox: whether dimensions are paired in the rotate-half form; else each one with its neighbour.
        branch: the key branch, with weight ``[Hkv, len(kinds) * D, E]`` in the dtype of ``summary``.
        block_size: tokens per block.
        kinds: see `seergate.ops.pool_keys`.
    """
    weight, norm_weight, inv_freq, attention_scaling = branch
    kv_heads, width = weight.shape[0], weight.shape[2]
    dim, half = weight.shape[1] // len(kinds), -(-width // 2)
    at = [kinds.index(kind) if kind in kinds else -1 for kind in ("max", "min", "avg")]
    close_kernel[(kv_heads, len(lengths))](
        cache, table, lengths, angles, summary, weight, norm_weight, inv_freq,
        *cache.stride()[:3], table.stride(0), *summary.stride()[:2], *weight.stride(), attention_scaling, *at,
        BLOCK_SIZE=block_size, ROWS=padded(block_size), PAGE=cache.shape[2], DIM=dim,
        CHUNK=min(CHUNK, padded(dim)), WIDTH=width, HALF=half, PADDED_HALF=padded(half),
        ROTARY=0 if angles is None else angles.shape[1], NEOX=neox, EPS=NORM_EPS,
        num_warps=THREADS // gpu_of(cache.device).warp_size,
    )  # fmt: skip


def score_pages(
    q: Tensor,
    summary: Tensor,
    table: Tensor,
    lengths: Tensor,
    angles: Tensor | None,
    neox: bool,
    branch: Branch,
    block_size: int,
    page: int,
) -> tuple[Tensor, Tensor]:
    """Scores of each row's blocks, and the queries as a contiguous tensor.

    Args:
        q: ``[R, H, D]`` after RoPE, contiguous in the last dimension.
        branch: the query branch, with weight ``[Hkv, G, D, E]``.
        page: tokens per page.
        summary, table, lengths, angles, neox, block_size: see `close_blocks`.

    Returns:
        fp32 ``[R, Hkv, N]`` for N the capacity of the table in blocks, and ``q`` as ``[R * Hkv, G, D]``.
    """
    weight, norm_weight, inv_freq, attention_scaling = branch
    rows, (kv_heads, group, dim, width) = len(q), weight.shape
    blocks = -(-table.shape[1] * page // block_size)
    scores = torch.empty(rows, kv_heads, blocks, dtype=torch.float32, device=q.device)
    packed = torch.empty(rows * kv_heads, group, dim, dtype=q.dtype, device=q.device)
    gpu, half, tiles = gpu_of(q.device), -(-width // 2), -(-blocks // SCORE_CHUNK)
    span = SCORE_CHUNK * -(-tiles // decode_splits(rows * kv_heads, tiles, gpu.processors))
    paged_score_kernel[(-(-blocks // span), kv_heads, rows)](
        q, lengths, table, angles, summary, weight, norm_weight, inv_freq, scores, packed,
        *q.stride()[:2], table.stride(0), *summary.stride()[:2], *weight.stride(), blocks, span, attention_scaling,
        width**-0.5, BLOCK_SIZE=block_size, RUN=block_size // page, GROUP=group, DIM=dim, WIDTH=width, HALF=half,
        PADDED_HALF=padded(half), CHUNK=SCORE_CHUNK // 2 if width > 128 else SCORE_CHUNK,
        ROTARY=0 if angles is None else angles.shape[1], NEOX=neox, EPS=NORM_EPS,
        num_warps=THREADS // gpu.warp_size,
    )  # fmt: skip
    return scores, packed


def selected_block_table(
    scores: Tensor,
    table: Tensor,
    lengths: Tensor,
    block_size: int,
    page: int,
    token_budget: int,
    sink_blocks: int,
    page_step: int,
    head_step: int,
) -> tuple[Tensor, Tensor]:
    """Select blocks; returns the block table of a decode step in which each KV head is a sequence.

    Args:
        scores: from `score_pages`, of at most `MAX_BLOCKS` blocks.
        token_budget, sink_blocks: see `seergate.ops.select_blocks`.
        page_step, head_step: page ``p`` of KV head ``h`` is at place ``p * page_step + h * head_step``.
        table, lengths, block_size, page: see `close_blocks` and `score_pages`.

    Returns:
        The block table, int32 ``[R * Hkv, X]``, and the number of tokens in each row of it, int32 ``[R * Hkv]``.
    """
    rows, kv_heads, blocks = scores.shape
    kept, run, width = min(blocks, token_budget // block_size), block_size // page, padded(blocks)
    assert blocks <= MAX_BLOCKS
    places = torch.empty(rows * kv_heads, kept * run, dtype=torch.int32, device=scores.device)
    tokens = torch.empty(rows * kv_heads, dtype=torch.int32, device=scores.device)
    place_kernel[(rows, kv_heads)](
        scores, lengths, table, places, tokens, table.stride(0), blocks, table.shape[1], kept, kept, sink_blocks,
        page_step, head_step, BLOCK_SIZE=block_size, RUN=run, WIDTH=width, KEPT_WIDTH=padded(kept),
        num_warps=select_warps(width),
    )  # fmt: skip
    return places, tokens
