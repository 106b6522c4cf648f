"""Attention of one query token per row to its KV cache: to the selected blocks, or to all tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seergate.checks import check_count
from seergate.ops.arguments import (
    brief,
    check_groups,
    check_integers,
    check_lengths,
    check_softmax,
    check_tensor,
    readable,
)
from seergate.ops.backend import run
from seergate.ops.rows import RowLengths


class DecodeInputs(NamedTuple):
    """Checked arguments shared by `sparse_decode` and `dense_decode`: queries, KV cache, options of the softmax."""

    q: Tensor
    k: Tensor
    v: Tensor
    sm_scale: float
    sinks: Tensor | None
    softcap: float | None
    page_table: Tensor | None


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    lengths: Tensor | RowLengths,
    block_size: int,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Attention of one token per row to the selected blocks; all query heads of a group read the same blocks.

    For decoding only: no gradient flows to any input.

    Args:
        q: ``[B, H, d]``.
        k: ``[B, Hkv, S, d]``; ``S`` may be a capacity. Blocks that are not selected and tokens at or beyond a row's
            length never affect the output, whatever they hold (NaN included).
        v: ``[B, Hkv, S, dv]``.
        indices: int32 or int64 ``[B, Hkv, K]``, block indices, ascending, padded with -1 on the right, as returned by
            `select_blocks`. The order is checked only in host memory; on a device a wrong order gives wrong results.
            A block that starts at or beyond the row's length is skipped like padding.
        lengths: int ``[B]``, 1..S, tokens of each row; or `RowLengths`, with arguments that need no checks.
        block_size: tokens per block.
        sm_scale: factor on ``q . k``; ``1 / sqrt(d)`` if ``None``.
        sinks: ``[H]`` attention-sink logits, which enter the softmax's denominator (GPT-OSS).
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        page_table: int ``[B, P]``, for k and v in pages ``[pages, Hkv, page, d]``: token ``i`` of row ``b`` is in
            page ``page_table[b, i // page]``, so ``S = P * page``; ``page`` is a multiple of ``block_size``. Only the
            selected blocks are read, in place.
        counts: int32 ``[B, Hkv]`` from `select_blocks`, number of blocks in ``indices``; the last of them must be the
            row's current block. Saves the Triton backend a pass over the indices.

    Returns:
        ``[B, H, dv]`` in the dtype of ``q``; zero for a row and KV head without any block.
    """
    if isinstance(lengths, RowLengths):
        inputs = DecodeInputs(
            q, k, v, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale, sinks, softcap, page_table
        )
    else:
        check_count("block_size", block_size, 1)
        inputs, capacity = _checked(q, k, v, sm_scale, sinks, softcap, page_table, block_size)
        check_integers("indices", indices, (len(q), k.shape[1], "K"), on=("q", q))
        check_lengths(lengths, len(q), capacity, "S", on=("q", q))
        _check_ascending(indices)
        if counts is not None:
            _check_counts(counts, indices, lengths, block_size)
    return run(
        "sparse_decode", q.device, inputs=inputs, indices=indices, counts=counts, rows=RowLengths.of(lengths),
        block_size=block_size,
    )  # fmt: skip


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | RowLengths | None = None,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    """Attention of one token per row to its whole cache.

    The G query heads of a KV head are the rows of one small matrix, so keys and values are read once per KV head.

    Args:
        q, v, sm_scale, sinks, softcap: as in `sparse_decode`.
        k: ``[B, Hkv, S, d]``.
        lengths: int ``[B]``, 1..S, tokens of each row; ``None`` for all S. Later tokens may hold anything.
        page_table: as in `sparse_decode`; pages may have any length. Triton reads them in place. The torch backend
            gathers the pages: of one row at a time on a CPU, of all rows elsewhere.

    Returns:
        ``[B, H, dv]`` in the dtype of ``q``.
    """
    inputs, capacity = _checked(q, k, v, sm_scale, sinks, softcap, page_table)
    if lengths is not None and not isinstance(lengths, RowLengths):
        check_lengths(lengths, len(q), capacity, "S", on=("q", q))
    return run("dense_decode", q.device, inputs=inputs, rows=None if lengths is None else RowLengths.of(lengths))


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float | None,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
    block_size: int = 1,
) -> tuple[DecodeInputs, int]:
    """Check the arguments; returns them, and the capacity ``S`` of a row."""
    check_tensor("q", q, ("B", "H", "d"))
    batch, heads, dim = q.shape
    check_tensor("k", k, (batch if page_table is None else "pages", "Hkv", "S", dim), like=("q", q))
    rows, kv_heads, capacity = k.shape[:3]
    check_tensor("v", v, (rows, kv_heads, capacity, "dv"), like=("q", q))
    check_groups(heads, kv_heads)
    if page_table is not None:
        check_integers("page_table", page_table, (batch, "P"), on=("q", q))
        _check_pages(page_table, rows, capacity, block_size)
        capacity *= page_table.shape[1]
    return DecodeInputs(q, k, v, check_softmax(q, sm_scale, sinks, softcap), sinks, softcap, page_table), capacity


def _check_pages(page_table: Tensor, pages: int, page_size: int, block_size: int) -> None:
    """Check that a page holds whole blocks and, in host memory, that page numbers are in ``0..pages - 1``."""
    if page_size % block_size:
        raise ValueError(f"k has pages of {page_size} tokens; it must have a multiple of block_size, {block_size}")
    if readable(page_table) and page_table.numel():
        low, high = (int(x) for x in page_table.aminmax())
        if low < 0 or high >= pages:
            raise ValueError(f"page_table has pages {low} to {high}; each must be in 0..{pages - 1}")


def _check_ascending(indices: Tensor) -> None:
    """Check in host memory that the blocks of each row and KV head ascend, and that padding comes last."""
    if not readable(indices):
        return
    order = indices.masked_fill(indices < 0, torch.iinfo(indices.dtype).max)
    wrong = (order[..., 1:] <= order[..., :-1]) & (indices[..., 1:] >= 0)
    if wrong.any():
        row, head = (int(i) for i in wrong.any(-1).nonzero()[0])
        raise ValueError(
            f"indices of row {row} and KV head {head} are {brief(indices[row, head].tolist())}; they must ascend, "
            "each block once, and be padded with -1 on the right"
        )


def _check_counts(counts: Tensor, indices: Tensor, lengths: Tensor, block_size: int) -> None:
    """Check for integers ``[B, Hkv]``; in host memory also the counts, and that the last block is the current one."""
    check_integers("counts", counts, indices.shape[:2], on=("indices", indices))
    if not readable(indices):
        return
    current = torch.div(lengths - 1, block_size, rounding_mode="floor")[:, None]
    right = (counts == (indices >= 0).sum(-1)) & ((counts == 0) | (indices.amax(-1) == current))
    if not right.all():
        row, head = (int(i) for i in (~right).nonzero()[0])
        raise ValueError(
            f"counts of row {row} and KV head {head} is {int(counts[row, head])}; it must be how many of indices, "
            f"{brief(indices[row, head].tolist())}, are blocks, and the last one the current, {int(current[row])}"
        )
