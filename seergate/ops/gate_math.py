"""Arithmetic of the gate's branches, for training, prefill and decode (SeerAttention-R, equations 1a to 1c).

Shape suffixes: B batch, S tokens, N blocks, K KV heads, D head dimension of the model, E gate dimension, P poolings.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NORM_EPS = 1e-6


class Branch(NamedTuple):
    """A branch of the gate: a linear map ``[Hkv, ..., E]``, then optional RMSNorm and RoPE."""

    weight: Tensor
    norm_weight: Tensor | None
    inv_freq: Tensor | None
    attention_scaling: float


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of ``x [..., E]`` with one ``weight [E]`` for all heads; statistics in fp32 or wider."""
    wide = x.to(wide_dtype(x.dtype))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
    return wide.to(x.dtype) * weight


def rotation(
    positions: Tensor, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of RoPE for `turned`.

    Args:
        positions: ``[B, S]`` or ``[S]``, integer token positions.
        inv_freq: ``[E / 2]``, radians per position.
        attention_scaling: factor on cosine and sine; 1 unless the base model's RoPE scaling has one, as in YaRN.
        dtype: of what is rotated; the angles are computed in fp32, or in float64 for float64.

    Returns:
        Two tensors ``[B, 1, S, E]`` or ``[S, E]``; the first half of the sines is negative.
    """
    wide = wide_dtype(dtype)
    angles = positions.to(wide)[..., None] * inv_freq.to(wide)
    cos, sin = angles.cos() * attention_scaling, angles.sin() * attention_scaling
    if positions.ndim == 2:
        cos, sin = cos[:, None], sin[:, None]
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, attention_scaling: float) -> Tensor:
    """RoPE of ``x [B, K, S, E]`` at ``positions``; the arguments are those of `rotation`."""
    return turned(x, *rotation(positions, inv_freq, attention_scaling, x.dtype))


def turned(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """RoPE of ``x [B, K, S, E]`` in the rotate-half (NeoX) form, by angles of `rotation`; computed in their dtype."""
    wide = x.to(cos.dtype)
    return (wide * cos + wide.roll(wide.shape[-1] // 2, -1) * signed_sin).to(x.dtype)


def branch_end(
    x_BKSE: Tensor, positions: Tensor, norm_weight: Tensor | None, inv_freq: Tensor | None, attention_scaling: float
) -> Tensor:
    """Apply RMSNorm and RoPE, each if the gate has it, to the output of a branch's linear map."""
    if norm_weight is not None:
        x_BKSE = rms_norm(x_BKSE, norm_weight)
    if inv_freq is None:
        return x_BKSE
    return rotate(x_BKSE, positions, inv_freq, attention_scaling)


def projected_queries(q_BHSD: Tensor, weight_KGDE: Tensor) -> Tensor:
    """The linear map of the query branch (equation 1a): one vector per token and KV head, ``[B, K, S, E]``.

    Args:
        q_BHSD: queries before RoPE; query head h belongs to KV head ``h // G``.
        weight_KGDE: the linear map; computation and result have its dtype.
    """
    kv_heads, group, dim, _ = weight_KGDE.shape
    q_BKGSD = q_BHSD.to(weight_KGDE.dtype).unflatten(1, (kv_heads, group))
    q_KTP = q_BKGSD.permute(1, 0, 3, 2, 4).reshape(kv_heads, -1, group * dim)
    qg_KTE = q_KTP @ weight_KGDE.flatten(1, 2)
    return qg_KTE.unflatten(1, (len(q_BHSD), q_BHSD.shape[2])).transpose(0, 1)


def block_scores(qg_BKSE: Tensor, kg_BKNE: Tensor) -> Tensor:
    """The logits of equation 1c, ``[B, K, S, N]``, in fp32 or wider; B and K may be one axis."""
    wide = wide_dtype(qg_BKSE.dtype)
    scaled, kg_BKEN = qg_BKSE.to(wide) * (1.0 / math.sqrt(qg_BKSE.shape[-1])), kg_BKNE.to(wide).transpose(-1, -2)
    return torch.bmm(scaled, kg_BKEN) if scaled.ndim == 3 else scaled @ kg_BKEN


def compressed_keys(pooled_BKNP: Tensor, branch: Branch, positions: Tensor) -> Tensor:
    """The key branch (equation 1b): one vector per block and KV head, ``[B, K, N, E]``.

    Args:
        pooled_BKNP: ``[B, K, N, P * D]``, see `seergate.ops.pool_keys`.
        branch: weight ``[K, P * D, E]``; computation and result have its dtype.
        positions: ``[B, N]`` or ``[N]``, the position of each block.
    """
    weight_KPE, batch, blocks = branch.weight, len(pooled_BKNP), pooled_BKNP.shape[2]
    pooled_KTP = pooled_BKNP.to(weight_KPE.dtype).transpose(0, 1).flatten(1, 2)
    kg_KTE = pooled_KTP @ weight_KPE  # one product per KV head: rows share its weight without a copy
    return branch_end(kg_KTE.unflatten(1, (batch, blocks)).transpose(0, 1), positions, *branch[1:])
