"""Kernels of `sparse_decode` and `dense_decode`: split-KV flash decoding over a row's *virtual sequence*.

The virtual sequence of a row and KV head is the concatenation of its selected blocks, or simply its cache. Blocks
ascend and only the last one read can be partly filled, so the sequence has no holes: it has a number of tokens, which
are cut into tiles, and the tiles into splits. Every tile but the last needs no mask, and no tile needs a branch, which
would stop the compiler from loading the next tiles while it computes this one.

Scores are in base 2: ``exp2`` is what the hardware has. ``scale`` holds the factor, but where a cap comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seergate.ops.triton_impl.kernel_math import capped


@triton.jit
def _tile_rows(  # type: ignore[no-untyped-def]
    start, tokens, indices_ptr, pages_ptr,
    stride_ix,
    BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Where the tile at ``start`` of the virtual sequence lies: row or page of the cache, and token in it, int64.

    ``ALIGNED``: the tile lies in one block and one page; scalars, of its first token. Otherwise one of each per token.
    Places at or beyond ``tokens`` are anywhere in the cache.
    """
    if ALIGNED:
        place = start
    else:
        place = start + tl.arange(0, TILE)
    held = place < tokens
    token = place.to(tl.int64)
    if indices_ptr is not None:
        block = tl.load(indices_ptr + place // BLOCK_SIZE * stride_ix, mask=held, other=0)
        token = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
    page = token * 0
    if pages_ptr is not None:
        page = tl.load(pages_ptr + token // PAGE_SIZE, mask=held, other=0).to(tl.int64)
        token = token % PAGE_SIZE
    return page, token


@triton.jit
def _load_tile(  # type: ignore[no-untyped-def]
    ptr, page, token,
    stride_b, stride_s, stride_d,
    held,
    DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values of a tile, ``[TILE, PADDED]``; zero where the tile is not ``held`` and beyond ``DIM``."""
    dims = tl.arange(0, PADDED)
    first = ptr + page * stride_b + token * stride_s
    if ALIGNED:
        places = first + (tl.arange(0, TILE)[:, None] * stride_s + dims[None, :] * stride_d)
    else:
        places = first[:, None] + dims[None, :] * stride_d
    if MASKED:
        return tl.load(places, mask=held[:, None] & (dims < DIM)[None, :], other=0.0)
    if DIM != PADDED:
        return tl.load(places, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    q, acc, top, total, page, token, start, tokens, k_ptr, v_ptr,
    stride_kb, stride_ks, stride_kd, stride_vb, stride_vs, stride_vd,
    scale, cap,
    HAS_CAP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: weighted values, running maximum and running total of each row of ``q``."""
    held = start + tl.arange(0, TILE) < tokens
    k = _load_tile(k_ptr, page, token, stride_kb, stride_ks, stride_kd, held, DIM, PADDED_DIM, TILE, ALIGNED, MASKED)
    v = _load_tile(
        v_ptr, page, token, stride_vb, stride_vs, stride_vd, held, VALUE_DIM, PADDED_VALUE_DIM, TILE, ALIGNED, MASKED
    )
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_CAP:
        scores = capped(scores, cap) * 1.4426950408889634
    if MASKED:
        scores = tl.where(held[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, indices_ptr, counts_ptr, lengths_ptr, pages_ptr, sinks_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ib, stride_ih, stride_ix, stride_pb,
    selected, capacity, splits, scale, cap,
    HAS_CAP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr, ALONE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one row and KV head. Grid: batch, KV heads, splits.

    ``q [B, H, d]``; ``k``, ``v [B, Hkv, S, d]``, or ``[pages, Hkv, page, d]`` with ``pages [B, P]``;
    ``indices [B, Hkv, X]`` or None for all tokens, with ``counts [B, Hkv]`` or None; ``lengths [B]`` or None for
    ``capacity``. If it is ``ALONE``, the only split, ``out [B, H, dv]`` is the result. If not, it is each split's own
    mean of the values, ``[B, H, splits, dv]`` in fp32, and ``lse [B, H, splits]`` its log total (base 2; -inf for a
    split without tokens).
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    row_in_group = tl.arange(0, ROWS)
    head = h * GROUP + row_in_group
    in_group = row_in_group < GROUP

    length = capacity
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + b).to(tl.int32)
    tokens = length
    if indices_ptr is not None:
        indices_ptr += b * stride_ib + h * stride_ih
        if counts_ptr is not None:  # the last block is the row's own: nothing has to be read and summed first
            count = tl.load(counts_ptr + b * kv_heads + h)
            tokens = tl.where(count > 0, (count - 1) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE + 1, 0)
        else:
            tokens = 0
            for low in range(0, selected, CHUNK):
                slots = low + tl.arange(0, CHUNK)
                blocks = tl.load(indices_ptr + slots * stride_ix, mask=slots < selected, other=-1).to(tl.int32)
                filled = tl.minimum(tl.maximum(length - blocks * BLOCK_SIZE, 0), BLOCK_SIZE)
                tokens += tl.sum(tl.where(blocks >= 0, filled, 0))
    k_ptr += h * stride_kh
    v_ptr += h * stride_vh
    if pages_ptr is not None:
        pages_ptr += b * stride_pb
    else:
        k_ptr += b * stride_kb
        v_ptr += b * stride_vb

    per_split = tl.cdiv(tl.cdiv(tokens, TILE), splits) * TILE
    first = split * per_split
    end = tl.maximum(tl.minimum(first + per_split, tokens), first)
    whole = first + (end - first) // TILE * TILE

    dims = tl.arange(0, PADDED_DIM)
    q = tl.load(
        q_ptr + b * stride_qb + head[:, None] * stride_qh + dims[None, :] * stride_qd,
        mask=in_group[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    acc = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # Where a tile lies is found out one turn before it is loaded. In the same turn, the compiler would treat the index
    # as one more load to prefetch, and halve the keys and values that are on their way.
    page, token = _tile_rows(first, tokens, indices_ptr, pages_ptr, stride_ix, BLOCK_SIZE, PAGE_SIZE, TILE, ALIGNED)
    for start in range(first, whole, TILE):
        acc, top, total = _attend_tile(
            q, acc, top, total, page, token, start, tokens, k_ptr, v_ptr,
            stride_kb, stride_ks, stride_kd, stride_vb, stride_vs, stride_vd, scale, cap,
            HAS_CAP, DIM, PADDED_DIM, VALUE_DIM, PADDED_VALUE_DIM, TILE, ALIGNED, False, PRECISION,
        )  # fmt: skip
        page, token = _tile_rows(
            start + TILE, tokens, indices_ptr, pages_ptr, stride_ix, BLOCK_SIZE, PAGE_SIZE, TILE, ALIGNED
        )
    if whole < end:
        acc, top, total = _attend_tile(
            q, acc, top, total, page, token, whole, tokens, k_ptr, v_ptr,
            stride_kb, stride_ks, stride_kd, stride_vb, stride_vs, stride_vd, scale, cap,
            HAS_CAP, DIM, PADDED_DIM, VALUE_DIM, PADDED_VALUE_DIM, TILE, ALIGNED, True, PRECISION,
        )  # fmt: skip

    any_token = total > 0
    total = tl.where(any_token, total, 1.0)
    acc = acc / total[:, None]
    lse = tl.where(any_token, top + tl.log2(total), -float("inf"))
    value_dims = tl.arange(0, PADDED_VALUE_DIM)
    written = in_group[:, None] & (value_dims < VALUE_DIM)[None, :]
    place = (b * kv_heads * GROUP + head) * splits + split
    if ALONE:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=in_group, other=0.0).to(tl.float32) * 1.4426950408889634
            acc = acc / (1.0 + tl.exp2(sink - lse))[:, None]
    else:
        tl.store(lse_ptr + place, lse, mask=in_group)
    out = out_ptr + place[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=written)


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, sinks_ptr, out_ptr, heads, splits,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """The result of one row and query head from its splits. Grid: batch x query heads.

    ``partial [B, H, splits, dv]`` and ``lse [B, H, splits]`` as `decode_kernel` leaves them, ``out [B, H, dv]``.
    """
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_VALUE_DIM)
    lse = tl.load(lse_ptr + place * splits + split, mask=split < splits, other=-float("inf"))
    used = lse > -float("inf")
    read = used[:, None] & (dims < VALUE_DIM)[None, :]
    source = partial_ptr + (place * splits + split)[:, None] * VALUE_DIM + dims[None, :]
    partial = tl.load(source, mask=read, other=0.0)
    top = tl.max(lse, 0)
    top = tl.where(top > -float("inf"), top, 0.0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + place % heads).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    weights = tl.where(used, tl.exp2(lse - top), 0.0)
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - top)
    out = tl.sum(weights[:, None] * partial, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + place * VALUE_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
