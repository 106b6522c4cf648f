"""`dense_decode`: one query token per row attends to its whole cache, the query group folded into the query axis."""

from __future__ import annotations

import math

from torch import Tensor

from seergate.ops.backend import implementation
from seergate.ops.checks import check_decode_tensors, check_extras, check_lengths, check_same, check_scale


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    """Dense attention of the newest token of each row.

    With the G query heads of a KV head side by side as rows of one small matrix, keys and values are read once per KV
    head instead of once per query head.

    Args:
        q: ``[B, H, d]``.
        k: ``[B, Hkv, S, d]``.
        v: ``[B, Hkv, S, dv]``.
        lengths: int ``[B]``, 1..S, how many tokens of each row count; all S of them if ``None``. What lies beyond may
            be anything.
        sm_scale: factor on ``q . k``; ``1 / sqrt(d)`` if ``None``.
        sinks: ``[H]`` attention-sink logits, which enter the softmax's denominator (GPT-OSS).
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        page_table: int ``[B, P]``, as in `sparse_decode`; pages may have any length. Triton reads them in place. The
            torch backend gathers one row's pages at a time on a CPU, and all of them elsewhere.

    Returns:
        ``[B, H, dv]`` in the dtype of ``q``.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    capacity = check_decode_tensors(q, k, v, page_table)
    batch, heads, dim = q.shape
    if lengths is not None:
        check_lengths(lengths, batch, capacity, "S")
        check_same("lengths", lengths, "q", q, dtype=False)
    check_scale("sm_scale", sm_scale)
    check_extras(sinks, softcap, heads, q)
    scale = 1.0 / math.sqrt(dim) if sm_scale is None else sm_scale
    run = implementation("dense_decode", q.device)
    return run(q, k, v, lengths, scale, sinks=sinks, softcap=softcap, page_table=page_table)
