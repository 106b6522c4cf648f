"""Kernels of the teacher: attention with block targets in one pass, and block targets from a known log-sum-exp.

A tile holds ``ROWS`` tokens times ``PACK`` query heads of one KV head, token-major, so keys are read once for all of
them. A group that ``PACK`` does not cover takes several launches, each with its ``turn``, the first head; they follow
each other on the stream and the later ones raise the targets of the earlier. The key tile ``KEYS`` is what suits the
matrix units and has nothing to do with ``BLOCK_SIZE``: it holds several blocks, or a block takes several key tiles.

Scores are kept times log2(e), so that exp2 serves; what leaves a kernel is in natural logarithms. Row numbers are
64-bit: a 128k-token pack has more than 2^31 scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seergate.ops.triton_impl import packs
from seergate.ops.triton_impl.kernel_math import capped

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Below any score; finite, so that a tile of which a row sees nothing adds nothing."""

TILE_FIELDS = tl.constexpr(packs.FIELDS)


@triton.jit
def apart(rows, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows as numbers of tokens after the first one, to be multiplied by strides.

    64-bit where there are tokens between: a tile may then reach over a whole pack.
    """
    if STEP == 1:
        return rows
    else:
        return rows.to(tl.int64) * STEP


@triton.jit
def load_matrix(  # type: ignore[no-untyped-def]
    pointers, row_mask, column_mask,
    ROWS_MASKED: tl.constexpr, COLUMNS_MASKED: tl.constexpr,
):  # fmt: skip
    """A matrix of which some rows or columns may not exist; they read as zero. No mask where none is needed."""
    if ROWS_MASKED and COLUMNS_MASKED:
        return tl.load(pointers, mask=row_mask & column_mask, other=0.0)
    elif ROWS_MASKED:
        return tl.load(pointers, mask=row_mask, other=0.0)
    elif COLUMNS_MASKED:
        return tl.load(pointers, mask=column_mask, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def raw_scores(  # type: ignore[no-untyped-def]
    q, k_base, key, limit,
    stride_kt,
    KEYS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``q . k`` of ``KEYS`` keys from ``key`` on; keys from ``limit`` on count as zero vectors if ``CHECK``."""
    keys = tl.arange(0, KEYS)[None, :]
    dims = tl.arange(0, PADDED_DIM)[:, None]
    pointers = k_base + tl.cast(key, tl.int64) * stride_kt + keys * stride_kt + dims
    k = load_matrix(pointers, key + keys < limit, dims < DIM, CHECK, DIM != PADDED_DIM)
    return tl.dot(q, k, input_precision=PRECISION)


@triton.jit
def block_maxima(  # type: ignore[no-untyped-def]
    scores, running, key,
    M: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Maxima over the blocks of a key tile, ``[M, max(1, KEYS / BLOCK_SIZE)]``.

    If a block takes several tiles, the maximum over those seen so far; ``running [M]`` carries it from tile to tile.
    """
    if BLOCK_SIZE <= KEYS:
        maxima = tl.max(tl.reshape(scores, (M, KEYS // BLOCK_SIZE, BLOCK_SIZE)), 2)
    else:
        here = tl.max(scores, 1)
        running = tl.where(key % BLOCK_SIZE == 0, here, tl.maximum(running, here))
        maxima = running[:, None]
    return maxima, running


@triton.jit
def attention_step(  # type: ignore[no-untyped-def]
    q, k_base, v_base, scratch, acc, total, top, running, key, limit, positions, candidates,
    stride_kt, stride_vt,
    scale, softcap,
    M: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    V_DIM: tl.constexpr, PADDED_V_DIM: tl.constexpr, HAS_CAP: tl.constexpr, OUTPUT: tl.constexpr,
    TARGETS: tl.constexpr, DIAGONAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile of the online softmax. ``DIAGONAL`` if not every row sees every key of it."""
    scores = raw_scores(q, k_base, key, limit, stride_kt, KEYS, DIM, PADDED_DIM, DIAGONAL, PRECISION)
    if HAS_CAP:
        scores = capped(scores * scale, softcap)
        scale = 1.0
    scale = scale * LOG2E
    if DIAGONAL:
        columns = (key + tl.arange(0, KEYS))[None, :]
        seen = columns <= positions[:, None]
        if WINDOW:
            seen &= columns > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, -float("inf"))
    if TARGETS:
        maxima, running = block_maxima(scores, running, key, M, KEYS, BLOCK_SIZE)
        blocks = key // BLOCK_SIZE + tl.arange(0, (KEYS + BLOCK_SIZE - 1) // BLOCK_SIZE)
        where = scratch + blocks[None, :] * M + tl.arange(0, M)[:, None]
        tl.store(where, maxima * scale, mask=(blocks < candidates)[None, :])
        highest = tl.max(maxima, 1)
    else:
        highest = tl.max(scores, 1)
    new_top = tl.maximum(top, highest * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    if OUTPUT:
        keys = tl.arange(0, KEYS)[:, None]
        dims = tl.arange(0, PADDED_V_DIM)[None, :]
        pointers = v_base + tl.cast(key, tl.int64) * stride_vt + keys * stride_vt + dims
        v = load_matrix(pointers, key + keys < limit, dims < V_DIM, DIAGONAL, V_DIM != PADDED_V_DIM)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new_top, running


@triton.jit(do_not_specialize=["tile_count", "turn"])
def attention_kernel(  # type: ignore[no-untyped-def]
    q, k, v, sinks, tiles, out, lse, log_targets, scratch, tile_count, kv_heads, scratch_width,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh, stride_ut, stride_uh,
    scale, softcap, turn,
    LATER_TURN: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PADDED_V_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, TWO_LOOPS: tl.constexpr,
    OUTPUT: tl.constexpr, TARGETS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Causal attention over packed segments; with ``TARGETS`` also the block targets, with ``OUTPUT`` the output.

    FlashAttention-2's forward. The highest score of each block goes to the program's own part of ``scratch``,
    ``[scratch_width, M]``; once a row's log-sum-exp is final, a second, short loop turns the maxima into targets.
    (Persistent programs would need less scratch, but the compiler then runs out of registers.)

    ``q [T, H, DIM]``, ``k [T, kv_heads, DIM]``, ``v [T, kv_heads, V_DIM]``, ``sinks [H]``, ``lse [T, H]``,
    ``log_targets [rows, kv_heads, .]`` by buffer row; only cells of strictly past blocks are written.
    ``scale`` must be positive (the sign is moved into q by the caller). ``TWO_LOOPS``: one without masks, then one for
    the diagonal; with one loop for both, fewer registers. ``WINDOW``: tokens that a row sees, in one loop;
    0 for all.
    """
    M: tl.constexpr = ROWS * PACK
    x = tl.arange(0, M)
    scratch += tl.program_id(0).to(tl.int64) * scratch_width * M
    head = tl.program_id(0) // tile_count
    tile = tiles + (tl.program_id(0) % tile_count) * TILE_FIELDS
    first, stop, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    buffer_row = tl.load(tile + 4)
    begin = (first - start).to(tl.int32)  # positions count from the start of the segment
    limit = tl.minimum(begin + ROWS, (stop - start).to(tl.int32))  # keys that the last row sees
    positions = begin + x // PACK
    seen_by_all = (begin + 1) // KEYS * KEYS if TWO_LOOPS else 0
    masked_from = tl.maximum(begin + 1 - WINDOW, 0) // KEYS * KEYS if WINDOW else seen_by_all
    candidates = (limit - 1) // BLOCK_SIZE
    k_base = k + start * stride_kt + head.to(tl.int64) * stride_kh
    v_base = v + start * stride_vt + head.to(tl.int64) * stride_vh
    member = turn + x % PACK
    exists = (positions < limit) & (member < GROUP)
    q_head = head * GROUP + member
    dims = tl.arange(0, PADDED_DIM)[None, :]
    q_rows = q + first * stride_qt + head.to(tl.int64) * GROUP * stride_qh
    q_rows += (x // PACK * stride_qt + member * stride_qh)[:, None] + dims
    q_tile = load_matrix(q_rows, exists[:, None], dims < DIM, True, DIM != PADDED_DIM)
    acc = tl.zeros((M, PADDED_V_DIM), tl.float32)
    running = tl.full((M,), -float("inf"), tl.float32)
    if HAS_SINKS:  # a key without a value: it only takes its share
        top = tl.maximum(tl.load(sinks + q_head, mask=exists, other=0.0).to(tl.float32) * LOG2E, LOWEST)
        total = tl.full((M,), 1.0, tl.float32)
    else:
        top = tl.full((M,), LOWEST, tl.float32)
        total = tl.zeros((M,), tl.float32)
    for key in range(0, seen_by_all, KEYS):
        acc, total, top, running = attention_step(
            q_tile, k_base, v_base, scratch, acc, total, top, running, key, limit, positions, candidates,
            stride_kt, stride_vt, scale, softcap, M, KEYS, BLOCK_SIZE, DIM, PADDED_DIM, V_DIM, PADDED_V_DIM,
            HAS_CAP, OUTPUT, TARGETS, False, WINDOW, PRECISION,
        )  # fmt: skip
    for key in range(masked_from, limit, KEYS):
        acc, total, top, running = attention_step(
            q_tile, k_base, v_base, scratch, acc, total, top, running, key, limit, positions, candidates,
            stride_kt, stride_vt, scale, softcap, M, KEYS, BLOCK_SIZE, DIM, PADDED_DIM, V_DIM, PADDED_V_DIM,
            HAS_CAP, OUTPUT, TARGETS, True, WINDOW, PRECISION,
        )  # fmt: skip
    lse2 = top + tl.log2(total)
    heads = kv_heads * GROUP
    tl.store(lse + first * heads + x // PACK * heads + q_head, lse2 * LN2, mask=exists)
    if OUTPUT:
        v_dims = tl.arange(0, PADDED_V_DIM)[None, :]
        out_rows = out + first * stride_ot + (x // PACK * stride_ot + q_head * stride_oh)[:, None] + v_dims
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out_rows, result, mask=exists[:, None] & (v_dims < V_DIM))
    if TARGETS:
        tl.debug_barrier()  # the maxima were written by other threads than will read them
        rows = tl.arange(0, ROWS)
        past = tl.where(begin + rows < limit, (begin + rows) // BLOCK_SIZE, 0)
        u_base = log_targets + buffer_row * stride_ut + head.to(tl.int64) * stride_uh
        for column in range(0, candidates, COLUMNS):
            blocks = column + tl.arange(0, COLUMNS)
            maxima = tl.load(
                scratch + blocks[:, None] * M + x[None, :], mask=(blocks < candidates)[:, None], other=0.0
            )
            u = tl.where((member < GROUP)[None, :], maxima - lse2[None, :], -float("inf")) * LN2
            u = tl.max(tl.reshape(u, (COLUMNS, ROWS, PACK)), 2)
            where = u_base + rows[None, :] * stride_ut + blocks[:, None]
            mask = blocks[:, None] < past[None, :]
            if LATER_TURN:
                u = tl.maximum(u, tl.load(where, mask=mask, other=-float("inf")))
            tl.store(where, u, mask=mask)


@triton.jit(do_not_specialize=["tile_count", "turn"])
def maxima_kernel(  # type: ignore[no-untyped-def]
    q, k, lse, tiles, log_targets, tile_count, kv_heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_ut, stride_uh,
    scale, softcap, turn,
    LATER_TURN: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Block targets of rows whose ``lse [T, H]`` is known. No exponential per score: a product and a maximum.

    Scale, cap and the log-sum-exp are monotonic and per row, so they are applied to the maxima. Blocks strictly in
    the past lie before the row as a whole, so there is no causal mask either. Rows are ``STEP`` tokens apart. Other
    arguments as in `attention_kernel`.
    """
    M: tl.constexpr = ROWS * PACK
    PER_TILE: tl.constexpr = (KEYS + BLOCK_SIZE - 1) // BLOCK_SIZE
    x = tl.arange(0, M)
    head = tl.program_id(0) // tile_count
    tile = tiles + (tl.program_id(0) % tile_count) * TILE_FIELDS
    first, stop, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    buffer_row = tl.load(tile + 4)
    begin = (first - start).to(tl.int32)
    end = tl.minimum(begin + (ROWS - 1) * STEP + 1, (stop - start).to(tl.int32))
    limit = (end - 1) // BLOCK_SIZE * BLOCK_SIZE  # keys in candidate blocks
    rows = tl.arange(0, ROWS)
    positions = begin + rows * STEP
    past = tl.where(positions < end, positions // BLOCK_SIZE, 0)
    k_base = k + start * stride_kt + head.to(tl.int64) * stride_kh
    u_base = log_targets + buffer_row * stride_ut + head.to(tl.int64) * stride_uh
    member = turn + x % PACK
    exists = (begin + x // PACK * STEP < end) & (member < GROUP)
    tokens_on = apart(x // PACK, STEP)
    q_head = head * GROUP + member
    dims = tl.arange(0, PADDED_DIM)[None, :]
    q_rows = q + first * stride_qt + head.to(tl.int64) * GROUP * stride_qh
    q_rows += (tokens_on * stride_qt + member * stride_qh)[:, None] + dims
    q_tile = load_matrix(q_rows, exists[:, None], dims < DIM, True, DIM != PADDED_DIM)
    heads = kv_heads * GROUP
    normaliser = tl.load(lse + first * heads + tokens_on * heads + q_head, mask=exists, other=float("inf"))
    running = tl.full((M,), -float("inf"), tl.float32)
    for key in range(0, limit, KEYS):
        scores = raw_scores(q_tile, k_base, key, limit, stride_kt, KEYS, DIM, PADDED_DIM, True, PRECISION)
        maxima, running = block_maxima(scores, running, key, M, KEYS, BLOCK_SIZE)
        maxima *= scale
        if HAS_CAP:
            maxima = capped(maxima, softcap)
        u = tl.max(tl.reshape(maxima - normaliser[:, None], (ROWS, PACK, PER_TILE)), 1)
        blocks = key // BLOCK_SIZE + tl.arange(0, PER_TILE)
        where = u_base + rows[:, None] * stride_ut + blocks[None, :]
        mask = blocks[None, :] < past[:, None]
        if LATER_TURN:
            u = tl.maximum(u, tl.load(where, mask=mask, other=-float("inf")))
        tl.store(where, u, mask=mask)
