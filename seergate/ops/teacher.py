"""Distillation targets from the frozen model's own attention (SeerAttention-R, section 2.3)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from seergate.ops.backend import implementation
from seergate.ops.checks import (
    check_block_size,
    check_cu_seqlens,
    check_extras,
    check_groups,
    check_same,
    check_scale,
    check_tensor,
)


def block_targets(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Per row and KV head, the share of each strictly past block in the teacher's attention.

    Attention probabilities of the causal softmax over the row's own segment; their maximum over each block, then over
    the query heads of the group; the row's own block and later ones dropped; the rest normalised to sum 1.
    Materialises the whole result: `gate_kl` is the way to train. No gradient flows to any input.

    Args:
        q: ``[T, H, d]`` packed queries as the attention sees them (after RoPE).
        k: ``[T, Hkv, d]`` packed keys, likewise.
        cu_seqlens: int32 ``[n + 1]``, segment borders. In host memory it costs no device synchronisation.
        block_size: tokens per block; blocks are counted from each segment's start.
        sm_scale: factor on ``q . k``; ``1 / sqrt(d)`` if ``None``.
        sinks: ``[H]`` attention-sink logits (GPT-OSS), which enter the softmax's denominator.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).

    Returns:
        ``[T, Hkv, NBmax]`` with ``NBmax`` the block count of the longest segment; fp32 (float64 for float64 inputs).
        Rows of a segment's first block are all zero.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    found = attention_with_block_targets(q, k, k, cu_seqlens, block_size, sm_scale, sinks=sinks, softcap=softcap)
    log_targets = found.log_targets
    has_past = (log_targets > -torch.inf).any(-1, keepdim=True)
    return torch.where(has_past, log_targets.softmax(-1), 0.0)


class AttentionWithTargets(NamedTuple):
    """Result of `attention_with_block_targets`.

    Attributes:
        output: ``[T, H, dv]`` in v's dtype.
        lse: ``[T, H]``, natural log of the softmax's denominator, sink included; fp32 (float64 for float64 inputs).
        log_targets: ``[T, Hkv, NBmax]``, likewise: log of the highest attention probability in each strictly past
            block, over its tokens and the query heads of the group; ``-inf`` in a row's own block and later ones.
            Their softmax over the last dimension is `block_targets`.
    """

    output: Tensor
    lse: Tensor
    log_targets: Tensor


def attention_with_block_targets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> AttentionWithTargets:
    """Causal attention of packed segments that leaves the gate's ground truth behind, from one pass over the scores.

    No gradient flows to any input. The targets of the whole pack are materialised.

    Args:
        q: ``[T, H, d]`` packed queries after RoPE.
        k: ``[T, Hkv, d]`` packed keys, likewise.
        v: ``[T, Hkv, dv]`` packed values.
        cu_seqlens, block_size, sm_scale, sinks, softcap: as in `block_targets`.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    check_teacher(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_block_size(block_size)
    check_tensor("v", v, (*k.shape[:2], "dv"))
    check_same("v", v, "q", q)
    run = implementation("attention_with_block_targets", q.device)
    scale = 1.0 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
    return run(q, k, v, cu_seqlens, block_size, scale, sinks=sinks, softcap=softcap)


def check_teacher(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    sm_scale: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> None:
    """The checks of the teacher's side, shared with `gate_kl` and `packed_attention`."""
    check_tensor("q", q, ("T", "H", "d"))
    tokens, heads, dim = q.shape
    if dim < 1:
        raise ValueError(f"q has shape {list(q.shape)}; its vectors must not be empty")
    check_tensor("k", k, (tokens, "Hkv", dim))
    check_same("k", k, "q", q)
    check_groups(heads, k.shape[1])
    check_cu_seqlens(cu_seqlens, tokens)
    check_scale("sm_scale", sm_scale)
    check_extras(sinks, softcap, heads, q)
