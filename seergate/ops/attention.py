"""Attention of packed segments: plain, with the gate's distillation targets, and with scores that decay with age."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seergate.checks import check_count
from seergate.ops.arguments import check_cu_seqlens, check_groups, check_softmax, check_tensor
from seergate.ops.backend import run


class Pack(NamedTuple):
    """Checked arguments of `packed_attention`: queries and keys of packed segments, and options of their softmax."""

    q: Tensor
    k: Tensor
    cu_seqlens: Tensor
    sm_scale: float
    sinks: Tensor | None = None
    softcap: float | None = None


def check_pack(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, sm_scale: float | None, sinks: Tensor | None, softcap: float | None
) -> Pack:
    """Check the arguments that all ops on packs share, and fill in the default of ``sm_scale``."""
    check_tensor("q", q, ("T", "H", "d"))
    tokens, heads, dim = q.shape
    if dim < 1:
        raise ValueError(f"q has shape {list(q.shape)}; its vectors must not be empty")
    check_tensor("k", k, (tokens, "Hkv", dim), like=("q", q))
    check_groups(heads, k.shape[1])
    check_cu_seqlens(cu_seqlens, tokens)
    return Pack(q, k, cu_seqlens, check_softmax(q, sm_scale, sinks, softcap), sinks, softcap)


class PackedAttention(NamedTuple):
    """Result of `packed_attention`.

    Attributes:
        output: ``[T, H, dv]`` in v's dtype.
        lse: ``[T, H]``, natural log of the softmax's denominator with its sink; fp32 (float64 for float64 inputs).
    """

    output: Tensor
    lse: Tensor


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sm_scale: float | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> PackedAttention:
    """Causal attention of packed segments in memory linear in their length. No gradient flows to any input.

    `gate_kl` takes the returned ``lse`` and then computes its targets without an exponential.

    Args:
        q: ``[T, H, d]`` packed queries after RoPE.
        k: ``[T, Hkv, d]`` packed keys after RoPE.
        v: ``[T, Hkv, dv]`` packed values.
        cu_seqlens: int32 ``[n + 1]``, segment borders. In host memory it costs no device synchronisation.
        sm_scale: factor on ``q . k``; ``1 / sqrt(d)`` if ``None``.
        window: maximum number of tokens that a row attends to, including its own; ``None`` for no limit.
        sinks: ``[H]`` attention-sink logits (GPT-OSS), which enter the softmax's denominator.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
    """
    pack = check_pack(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_tensor("v", v, (*k.shape[:2], "dv"), like=("q", q))
    if window is not None:
        check_count("window", window, 1)
    return run("packed_attention", q.device, pack=pack, v=v, window=window)


class AttentionWithTargets(NamedTuple):
    """Result of `attention_with_block_targets`.

    Attributes:
        output, lse: as in `PackedAttention`.
        log_targets: ``[T, Hkv, NBmax]`` in the dtype of ``lse``: log of the highest attention probability in each
            strictly past block, over its tokens and the query heads of the group; ``-inf`` for a row's own block and
            later blocks. `block_targets` is their softmax over the last dimension.
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
    """`packed_attention` and the gate's distillation targets, from one pass over the scores.

    No gradient flows to any input. The targets of the whole pack are materialised.

    Args:
        q, k, v, cu_seqlens, sm_scale, sinks, softcap: as in `packed_attention`.
        block_size: tokens per block; blocks are counted from each segment's start.
    """
    pack = check_pack(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_count("block_size", block_size, 1)
    check_tensor("v", v, (*k.shape[:2], "dv"), like=("q", q))
    return run("attention_with_block_targets", q.device, pack=pack, v=v, block_size=block_size)


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
    """The share of each strictly past block in the teacher's attention (SeerAttention-R, section 2.3).

    The target of a block is the maximum of the causal softmax's probabilities over its tokens and the query heads of
    the group, normalised to sum 1 over the strictly past blocks. The whole result is materialised; to train, use
    `gate_kl`. No gradient flows to any input.

    Args:
        q, k, cu_seqlens, sm_scale, sinks, softcap: as in `packed_attention`.
        block_size: tokens per block; blocks are counted from each segment's start.

    Returns:
        ``[T, Hkv, NBmax]`` with ``NBmax`` the block count of the longest segment; fp32 (float64 for float64 inputs).
        Rows of a segment's first block are all zero.
    """
    result = attention_with_block_targets(q, k, k, cu_seqlens, block_size, sm_scale, sinks=sinks, softcap=softcap)
    log_targets = result.log_targets
    has_past = (log_targets > -torch.inf).any(-1, keepdim=True)
    return torch.where(has_past, log_targets.softmax(-1), 0.0)


class RetainedAttention(NamedTuple):
    """Result of `retained_attention`.

    Attributes:
        output: ``[T, H, dv]`` in v's dtype.
        held: ``[T, Hkv]``, sum of the retention weights of the tokens that a row attends to,
            ``sum over s of beta(s) ** (t - s)``; fp32 (float64 for float64 inputs).
    """

    output: Tensor
    held: Tensor


def retained_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    cu_seqlens: Tensor,
    sm_scale: float | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> RetainedAttention:
    """Causal attention of packed segments with scores that decay with a token's age (TRIM-KV, arXiv 2512.03324).

    The score of row t for token s is ``beta(s) ** (t - s) * sm_scale * q(t) . k(s)``. The weight multiplies the logit,
    so a forgotten token has logit 0. The paper does not say how this combines with a softcap or sinks: here the cap is
    applied before the weight, and sinks do not decay. Gradients flow to ``q``, ``k``, ``v`` and ``log_beta``; the
    backward recomputes chunks of rows. There is no fused kernel.

    Args:
        q, k, v, cu_seqlens, sm_scale, window, sinks, softcap: as in `packed_attention`.
        log_beta: ``[T, Hkv]``, log of each token's ``beta``, at most 0; zeros give ordinary attention.
    """
    pack = check_pack(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_tensor("v", v, (*k.shape[:2], "dv"), like=("q", q))
    check_tensor("log_beta", log_beta, k.shape[:2], on=("q", q))
    if window is not None:
        check_count("window", window, 1)
    return run("retained_attention", q.device, pack=pack, v=v, log_beta=log_beta, window=window)
