"""Kernels of the gate's side of `gate_kl`: loss and gradients of rows, gradients of columns, recall.

Names are those of the equations in `seergate.ops.torch_impl.gate_kl`.

Buffers hold a chunk of rows, ``[rows, kv_heads, width]``; cells of blocks that are not strictly past were never
written and are never read. Tiles: see `packs`. Rows of a tile are ``STEP`` tokens apart; positions and blocks are
counted from the start of the tile's candidate blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seergate.ops.triton_impl.kernel_math import best, ordered
from seergate.ops.triton_impl.teacher_kernels import TILE_FIELDS, apart

MASKED = tl.constexpr(-1e30)
"""Log of nothing; finite, so that differences are no NaN."""


@triton.jit
def logit_tile(  # type: ignore[no-untyped-def]
    qg_tile, kg_base, column, candidates,
    stride_kg,
    gate_scale,
    COLUMNS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gate's logits ``[ROWS, COLUMNS]`` and its keys ``[COLUMNS, PADDED_DIM]`` from block ``column`` on."""
    blocks = column + tl.arange(0, COLUMNS)
    dims = tl.arange(0, PADDED_DIM)
    inside = (blocks < candidates)[:, None] & (dims < DIM)[None, :]
    kg = tl.load(kg_base + blocks[:, None] * stride_kg + dims[None, :], mask=inside, other=0.0).to(COMPUTE)
    return tl.dot(qg_tile, tl.trans(kg), input_precision=PRECISION) * gate_scale, kg


@triton.jit(do_not_specialize=["tile_count", "tokens"], do_not_specialize_on_alignment=["weights"])
def rows_kernel(  # type: ignore[no-untyped-def]
    log_targets, qg, kg, tiles, weights, kl, dqg, delta, logits, tile_count, tokens,
    stride_ut, stride_uh, stride_qt, stride_qh, stride_kt, stride_kh, stride_dt, stride_dh,
    gate_scale,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    COMPUTE: tl.constexpr, WANT_DQG: tl.constexpr, WANT_DELTA: tl.constexpr, WANT_LOGITS: tl.constexpr,
    PRECISION: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """KL of a tile of rows and one KV head; the gradient of ``qg``; ``pi - p`` for `columns_kernel`.

    Two sweeps over the past blocks: the normalisers, then everything that needs them. Logits are computed in both,
    which costs less than to keep them. The difference of logs is taken after each is normalised, so a small KL does
    not drown in the rounding of large logits.

    ``log_targets``, ``delta`` and ``logits`` share their strides; ``qg``, ``kg``, ``dqg`` are ``[., kv_heads, DIM]``,
    ``kl [kv_heads, tokens]``.
    """
    head = tl.program_id(0) // tile_count
    tile_id = tl.program_id(0) % tile_count
    tile = tiles + tile_id * TILE_FIELDS
    first, stop, start, block = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    buffer_row = tl.load(tile + 4)
    begin = (first - start).to(tl.int32)
    end = tl.minimum(begin + (ROWS - 1) * STEP + 1, (stop - start).to(tl.int32))
    candidates = (end - 1) // BLOCK_SIZE
    rows = tl.arange(0, ROWS)
    exists = begin + rows * STEP < end
    past = tl.where(exists, (begin + rows * STEP) // BLOCK_SIZE, 0)
    tokens_on = apart(rows, STEP)
    wide_head = head.to(tl.int64)
    cells = buffer_row * stride_ut + wide_head * stride_uh
    dims = tl.arange(0, PADDED_DIM)
    row_mask = exists[:, None] & (dims < DIM)[None, :]
    qg_rows = qg + first * stride_qt + wide_head * stride_qh + tokens_on[:, None] * stride_qt + dims[None, :]
    qg_tile = tl.load(qg_rows, mask=row_mask, other=0.0).to(COMPUTE)
    kg_base = kg + block * stride_kt + wide_head * stride_kh

    u_top = tl.full((ROWS,), MASKED, tl.float32)
    a_top = tl.full((ROWS,), MASKED, tl.float32)
    u_total = tl.zeros((ROWS,), tl.float32)
    a_total = tl.zeros((ROWS,), tl.float32)
    for column in range(0, candidates, COLUMNS):
        blocks = column + tl.arange(0, COLUMNS)
        seen = blocks[None, :] < past[:, None]
        u = tl.load(log_targets + cells + rows[:, None] * stride_ut + blocks[None, :], mask=seen, other=MASKED)
        a, _ = logit_tile(
            qg_tile, kg_base, column, candidates, stride_kt, gate_scale, COLUMNS, DIM, PADDED_DIM, COMPUTE, PRECISION
        )
        a = tl.where(seen, a, MASKED)
        new_u_top = tl.maximum(u_top, tl.max(u, 1))
        new_a_top = tl.maximum(a_top, tl.max(a, 1))
        u_total = u_total * tl.exp(u_top - new_u_top) + tl.sum(tl.exp(u - new_u_top[:, None]), 1)
        a_total = a_total * tl.exp(a_top - new_a_top) + tl.sum(tl.exp(a - new_a_top[:, None]), 1)
        u_top, a_top = new_u_top, new_a_top
    u_log, a_log = tl.log(u_total), tl.log(a_total)
    # A row that does not exist has seen nothing but MASKED; with this its probabilities are 0 as well.
    u_top, a_top = tl.where(exists, u_top, 0.0), tl.where(exists, a_top, 0.0)

    row_kl = tl.zeros((ROWS,), tl.float32)
    grad = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    for column in range(0, candidates, COLUMNS):
        blocks = column + tl.arange(0, COLUMNS)
        seen = blocks[None, :] < past[:, None]
        where = cells + rows[:, None] * stride_ut + blocks[None, :]
        u = tl.load(log_targets + where, mask=seen, other=MASKED)
        a, keys = logit_tile(
            qg_tile, kg_base, column, candidates, stride_kt, gate_scale, COLUMNS, DIM, PADDED_DIM, COMPUTE, PRECISION
        )
        if WANT_LOGITS:
            tl.store(logits + where, a, mask=seen)
        a = tl.where(seen, a, MASKED)
        log_p = (u - u_top[:, None]) - u_log[:, None]
        log_pi = (a - a_top[:, None]) - a_log[:, None]
        p = tl.exp(log_p)
        row_kl += tl.sum(p * (log_p - log_pi), 1)
        difference = (tl.exp(log_pi) - p).to(COMPUTE)
        if WANT_DELTA:
            tl.store(delta + where, difference, mask=seen)
        if WANT_DQG:
            grad = tl.dot(difference, keys, grad, input_precision=PRECISION)
    tl.store(kl + wide_head * tokens + first + tokens_on, row_kl, mask=exists)
    if WANT_DQG:
        grad *= gate_scale * tl.load(weights + tile_id)
        dqg_rows = dqg + first * stride_dt + wide_head * stride_dh + tokens_on[:, None] * stride_dt + dims[None, :]
        tl.store(dqg_rows, grad.to(dqg.dtype.element_ty), mask=row_mask)


@triton.jit(do_not_specialize=["tile_count"], do_not_specialize_on_alignment=["weights"])
def columns_kernel(  # type: ignore[no-untyped-def]
    delta, qg, tiles, weights, dkg, tile_count,
    stride_ut, stride_uh, stride_qt, stride_qh, stride_kt, stride_kh,
    gate_scale,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add a chunk's part to the gradient of some of the gate's keys, ``dkg [., kv_heads, DIM]`` in fp32.

    No two programs of a launch have a key in common, and launches follow each other: no atomics, always the same sum.
    """
    head = (tl.program_id(0) // tile_count).to(tl.int64)
    tile_id = tl.program_id(0) % tile_count
    tile = tiles + tile_id * TILE_FIELDS
    first, stop, start, block = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    buffer_row, column = tl.load(tile + 4), tl.load(tile + 5).to(tl.int32)
    begin = (first - start).to(tl.int32)
    end = (stop - start).to(tl.int32)
    blocks = column + tl.arange(0, COLUMNS)
    dims = tl.arange(0, PADDED_DIM)
    delta += buffer_row * stride_ut + head * stride_uh
    qg += first * stride_qt + head * stride_qh
    acc = tl.zeros((COLUMNS, PADDED_DIM), tl.float32)
    # Rows before (column + 1) * BLOCK_SIZE have none of these blocks in their past.
    unseeing = (tl.maximum((column + 1) * BLOCK_SIZE - begin, 0) + STEP - 1) // STEP
    for row in range(unseeing, (end - begin + STEP - 1) // STEP, ROWS):
        places = row + tl.arange(0, ROWS)
        positions = begin + places * STEP
        offsets = places.to(tl.int64)
        past = tl.where(positions < end, positions // BLOCK_SIZE, 0)
        seen = blocks[:, None] < past[None, :]
        part = tl.load(delta + offsets[None, :] * stride_ut + blocks[:, None], mask=seen, other=0.0)
        row_mask = (positions < end)[:, None] & (dims < DIM)[None, :]
        rows = tl.load(qg + offsets[:, None] * STEP * stride_qt + dims[None, :], mask=row_mask, other=0.0)
        acc = tl.dot(part.to(COMPUTE), rows.to(COMPUTE), acc, input_precision=PRECISION)
    acc *= gate_scale * tl.load(weights + tile_id)
    inside = (blocks < (end - 1) // BLOCK_SIZE)[:, None] & (dims < DIM)[None, :]
    where = dkg + (block + blocks[:, None]) * stride_kt + head * stride_kh + dims[None, :]
    tl.store(where, tl.load(where, mask=inside, other=0.0) + acc, mask=inside)


@triton.jit(do_not_specialize=["tile_count", "tokens", "wanted"], do_not_specialize_on_alignment=["recall"])
def recall_kernel(  # type: ignore[no-untyped-def]
    log_targets, logits, tiles, recall, tile_count, tokens,
    stride_ut, stride_uh,
    wanted,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Teacher's share in the gate's ``wanted`` best past blocks, ``recall [kv_heads, tokens]``, of ``TURN`` rows.

    Of blocks with equal logits the earlier are the better.
    """
    TURNS: tl.constexpr = ROWS // TURN
    head = (tl.program_id(0) // (tile_count * TURNS)).to(tl.int64)
    tile = tiles + tl.program_id(0) % (tile_count * TURNS) // TURNS * TILE_FIELDS
    rows = tl.program_id(0) % TURNS * TURN + tl.arange(0, TURN)
    first, stop, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    buffer_row = tl.load(tile + 4)
    tokens_on = apart(rows, STEP)
    exists = first + tokens_on < stop
    past = tl.where(exists, (first + tokens_on - start).to(tl.int32) // BLOCK_SIZE, 0)
    blocks = tl.arange(0, WIDTH)
    seen = blocks[None, :] < past[:, None]
    where = (buffer_row + rows)[:, None] * stride_ut + head * stride_uh + blocks[None, :]
    # Whole words of 16 numbers, which the buffer has (see `packs.WIDTH_MULTIPLE`); what was never written is dropped.
    held = blocks[None, :] < ((past + 15) // 16 * 16)[:, None]
    _, keys = ordered(tl.load(logits + where, mask=held, other=0.0))
    taken = best(keys, seen, tl.minimum(wanted, past))

    u = tl.where(seen, tl.load(log_targets + where, mask=held, other=0.0), MASKED)
    p = tl.exp(u - tl.max(u, 1)[:, None])
    share = tl.sum(tl.where(taken, p, 0.0), 1) / tl.sum(p, 1)
    tl.store(recall + head * tokens + first + tokens_on, share, mask=exists)
