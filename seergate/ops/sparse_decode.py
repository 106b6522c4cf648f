"""`sparse_decode`: one query token per row attends to the selected blocks of its cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seergate.ops.backend import implementation
from seergate.ops.checks import (
    brief,
    check_block_size,
    check_decode_tensors,
    check_extras,
    check_integers,
    check_lengths,
    check_same,
    check_scale,
    readable,
)


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    lengths: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Attention of one token per row over the selected blocks; all query heads of a group read the same blocks.

    For decoding only: no gradient flows to any input.

    Args:
        q: ``[B, H, d]``.
        k: ``[B, Hkv, S, d]``; ``S`` may be a capacity. Neither blocks that are not selected nor tokens at or beyond a
            row's length ever reach the output, whatever they hold (NaN included).
        v: ``[B, Hkv, S, dv]``.
        indices: int32 or int64 ``[B, Hkv, K]``, blocks, ascending, padded with -1 on the right, as `select_blocks`
            gives them (checked in host memory only; elsewhere another order gives wrong results). A block that
            starts at or beyond the row's length is passed over like padding.
        lengths: int ``[B]``, 1..S, tokens of each row.
        block_size: tokens per block.
        sm_scale: factor on ``q . k``; ``1 / sqrt(d)`` if ``None``.
        sinks: ``[H]`` attention-sink logits, which enter the softmax's denominator (GPT-OSS).
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        page_table: int ``[B, P]``: k and v are pages ``[pages, Hkv, page, d]``, and page ``i // page`` of row ``b``
            holds its token ``i``, so that ``S = P * page``; ``page`` is a multiple of ``block_size``. Only the
            selected blocks are read, in place.
        counts: int32 ``[B, Hkv]``, what `select_blocks` gives beside the indices: how many of them are blocks, the
            last of which is the row's current one. It saves the Triton backend a pass over the indices.

    Returns:
        ``[B, H, dv]`` in the dtype of ``q``; zero where a row and head have no block at all.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    check_block_size(block_size)
    capacity = check_decode_tensors(q, k, v, page_table, block_size)
    (batch, heads, dim), kv_heads = q.shape, k.shape[1]
    check_integers("indices", indices, (batch, kv_heads, "K"))
    check_same("indices", indices, "q", q, dtype=False)
    check_lengths(lengths, batch, capacity, "S")
    check_same("lengths", lengths, "q", q, dtype=False)
    _check_ascending(indices)
    if counts is not None:
        _check_counts(counts, indices, lengths, block_size)
    check_scale("sm_scale", sm_scale)
    check_extras(sinks, softcap, heads, q)
    scale = 1.0 / math.sqrt(dim) if sm_scale is None else sm_scale
    run = implementation("sparse_decode", q.device)
    return run(
        q,
        k,
        v,
        indices,
        lengths,
        block_size,
        scale,
        sinks=sinks,
        softcap=softcap,
        page_table=page_table,
        counts=counts,
    )


def _check_ascending(indices: Tensor) -> None:
    """Blocks of each pair rise, and padding comes last: the open block, which is cut at the row's length, must too."""
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
    """Integers ``[B, Hkv]``; in host memory also that they count the blocks and the last one is the current one."""
    check_integers("counts", counts, indices.shape[:2])
    check_same("counts", counts, "indices", indices, dtype=False)
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
