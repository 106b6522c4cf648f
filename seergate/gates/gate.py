"""AttnGate: the small learned scorer of one attention layer (SeerAttention-R, section 2.2, equations 1a-1c).

Shape suffixes: B batch, S tokens, N blocks, H query heads, K KV heads, G query heads per KV head (H = G * K),
D head dimension of the model, E gate dimension, P number of poolings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seergate.config import GateConfig
from seergate.ops.gate_math import block_scores, branch_end, compressed_keys, projected_queries
from seergate.ops.scoring import score_blocks

INIT_STD = 0.02


class GateRMSNorm(nn.Module):
    """The weight of `seergate.ops.gate_math.rms_norm`: one vector for all heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))


class HeadwiseLinear(nn.Module):
    """A bias-free linear map per head: ``weight`` has the head axes first and ``[in, out]`` last."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        nn.init.normal_(self.weight, std=INIT_STD)


class AttnGate(nn.Module):
    """Scores every key block for every query token, once per KV head.

    ``score[t, n] = queries(t) . keys(n) / sqrt(E)``. Both branches take the model's **pre-RoPE** vectors, after its
    q/k norm where it has one, and compute in the dtype of the gate's own weights.

    Args:
        config: the architecture.
        num_heads: H, query heads of the model's layer.
        num_kv_heads: K, KV heads; divides H.
        head_dim: D.
        inv_freq: ``[E / 2]`` RoPE frequencies of the base model in gate width; required when ``config.rope``.
        attention_scaling: the base model's RoPE attention factor.

    Raises:
        ValueError: if the head counts do not divide, or ``q_pooling="avg"`` with E different from D, or the number of
            frequencies is not E / 2.
    """

    inv_freq: Tensor | None

    def __init__(
        self,
        config: GateConfig,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        inv_freq: Tensor | None = None,
        attention_scaling: float = 1.0,
    ) -> None:
        super().__init__()
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads is {num_heads}; it must be a positive multiple of num_kv_heads ({num_kv_heads})"
            )
        if config.q_pooling == "avg" and config.gate_dim != head_dim:
            raise ValueError(
                f'gate_dim is {config.gate_dim}; with q_pooling="avg" it must equal the head dimension ({head_dim})'
            )
        if config.rope and (inv_freq is None or inv_freq.shape != (config.gate_dim // 2,)):
            got = None if inv_freq is None else tuple(inv_freq.shape)
            raise ValueError(f"inv_freq has shape {got}; with rope on it must be ({config.gate_dim // 2},)")
        self.config = config
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group_size = num_heads // num_kv_heads
        self.attention_scaling = attention_scaling
        self.register_buffer("inv_freq", inv_freq.float() if config.rope and inv_freq is not None else None, False)

        width = config.gate_dim
        if config.q_pooling == "proj":
            self.q_proj = HeadwiseLinear(num_kv_heads, self.group_size, head_dim, width)
        elif config.q_pooling == "avgproj":
            self.q_proj = HeadwiseLinear(num_kv_heads, head_dim, width)
        self.k_proj = HeadwiseLinear(num_kv_heads, len(config.k_pooling) * head_dim, width)
        if config.qk_norm:
            self.q_norm, self.k_norm = GateRMSNorm(width), GateRMSNorm(width)

    def _apply(self, fn: Any, recurse: bool = True) -> AttnGate:
        # Frequencies follow the gate to its device but never to a narrower dtype: bf16 ones would turn far positions.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if exact is not None and self.inv_freq is not None:
            self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def queries(self, q_BHSD: Tensor, positions: Tensor) -> Tensor:
        """The query branch (equation 1a): one vector per token and KV head.

        Args:
            q_BHSD: the model's queries before RoPE, ``[B, H, S, D]``; query head h belongs to KV head ``h // G``.
            positions: ``[B, S]`` or ``[S]``, each token's position.

        Returns:
            ``[B, K, S, E]``.
        """
        if self.config.q_pooling == "proj":
            qg_BKSE = projected_queries(q_BHSD, self.q_proj.weight)
        else:
            q_BKGSD = q_BHSD.to(self.k_proj.weight.dtype).unflatten(1, (self.num_kv_heads, self.group_size))
            qg_BKSE = q_BKGSD.mean(2)
            if self.config.q_pooling == "avgproj":
                qg_BKSE = qg_BKSE @ self.q_proj.weight
        norm_weight = self.q_norm.weight if self.config.qk_norm else None
        return branch_end(qg_BKSE, norm_weight, positions, self.inv_freq, self.attention_scaling)

    def keys(self, pooled_BKNP: Tensor, positions: Tensor) -> Tensor:
        """The key branch (equation 1b): one vector per block and KV head.

        Args:
            pooled_BKNP: ``[B, K, N, P * D]``, pre-RoPE keys pooled by `ops.pool_keys` in the order of
                ``config.k_pooling``.
            positions: ``[B, N]`` or ``[N]``, the position of each block's first token.

        Returns:
            ``[B, K, N, E]``.
        """
        norm_weight = self.k_norm.weight if self.config.qk_norm else None
        return compressed_keys(
            pooled_BKNP, self.k_proj.weight, norm_weight, positions, self.inv_freq, self.attention_scaling
        )

    def scores(self, qg_BKSE: Tensor, kg_BKNE: Tensor) -> Tensor:
        """The logits of equation 1c, ``[B, K, S, N]``, in fp32 or wider."""
        return block_scores(qg_BKSE, kg_BKNE)

    def step_scores(self, q_BHD: Tensor, lengths: Tensor, kg_BKNE: Tensor) -> Tensor:
        """A decode step's logits ``[B, K, N]`` for blocks that are complete; those of others mean nothing.

        Args:
            q_BHD: each row's newest query before RoPE.
            lengths: ``[B]``, tokens of each row, this one included.
            kg_BKNE: its blocks' compressed keys.
        """
        if self.config.q_pooling != "proj":
            return self.scores(self.queries(q_BHD[:, :, None], (lengths - 1)[:, None]), kg_BKNE)[:, :, 0]
        return score_blocks(
            q_BHD,
            lengths,
            kg_BKNE,
            self.q_proj.weight,
            self.config.block_size,
            norm_weight=self.q_norm.weight if self.config.qk_norm else None,
            inv_freq=self.inv_freq,
            attention_scaling=self.attention_scaling,
        )
