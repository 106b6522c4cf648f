"""AttnGate: SeerAttention-R's scorer, one compressed key per block and KV head (section 2.2, equations 1a-1c).

Shape suffixes: see `seergate.gates.scorer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seergate import ops
from seergate.config import GateConfig
from seergate.gates.geometry import ModelGeometry
from seergate.gates.scorer import HeadwiseLinear, Scorer
from seergate.ops.gate_math import block_scores, branch_end, compressed_keys, projected_queries
from seergate.ops.rows import RowLengths

POOLING_SHARES = {"max": 0.25, "min": 0.25, "avg": 0.5}
"""Weights of the poolings in `AttnGate.begin_as_model`: half for the mean of a block's keys, half for the midpoint of
their maximum and minimum."""


class AttnGate(Scorer):
    """``score[t, n] = queries(t) . keys(n) / sqrt(E)``; with ``q_pooling="none"``, the maximum over a group's queries.

    With ``q_pooling="avg"``, E must equal D, else a ValueError is raised.
    """

    def __init__(self, config: GateConfig, geometry: ModelGeometry) -> None:
        super().__init__(config, geometry)
        self.fused = config.q_pooling != "none"
        width, kv_heads, head_dim = config.gate_dim, self.num_kv_heads, self.head_dim
        if config.q_pooling == "avg" and width != head_dim:
            raise ValueError(
                f'gate_dim is {width}; with q_pooling="avg" it must equal the head dimension ({head_dim})'
            )
        self.entry_tokens, self.key_heads = config.block_size, kv_heads
        if config.q_pooling in ("proj", "none"):
            self.q_proj = HeadwiseLinear(kv_heads, self.group_size, head_dim, width)
        elif config.q_pooling == "avgproj":
            self.q_proj = HeadwiseLinear(kv_heads, head_dim, width)
        self.k_proj = HeadwiseLinear(kv_heads, len(config.k_pooling) * head_dim, width)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(width, dtype=torch.float32)
            self.k_norm = nn.RMSNorm(width, dtype=torch.float32)

    @torch.no_grad()
    def begin_as_model(self, scale: float = 1.0, order: Tensor | None = None) -> None:
        """Add weights that score with the model's own product: the mean of a group's queries, or each query, times
        the block's poolings weighted by `POOLING_SHARES`. The random initial weights remain as noise. E must equal D.
        ``scale`` is the model's factor on ``q . k`` times the root of D; ``order [D]`` puts the channels that its RoPE
        rotates together where a gate's RoPE has them.
        """
        width = self.config.gate_dim
        if width != self.head_dim:
            raise ValueError(f"gate_dim is {width}; with init 'model' it must be the head dimension ({self.head_dim})")
        one = torch.eye(width, device=self.k_proj.weight.device)
        one = one if order is None else one[:, order.to(one.device)]
        if self.config.q_pooling != "avg":
            self.q_proj.weight.add_(one / (self.group_size if self.config.q_pooling == "proj" else 1))
        shares = torch.tensor([POOLING_SHARES[kind] for kind in self.config.k_pooling], device=one.device)
        self.k_proj.weight.add_(torch.cat([share * one for share in scale * shares / shares.sum()]))

    def queries(self, q_BHSD: Tensor, positions: Tensor) -> Tensor:
        """The query branch (equation 1a): one vector per token and KV head, ``[B, K, S, E]``, or per query head."""
        if self.config.q_pooling == "proj":
            qg_BKSE = projected_queries(q_BHSD, self.q_proj.weight)
        elif self.config.q_pooling == "none":
            weight_HDE = self.q_proj.weight.flatten(0, 1)
            qg_BKSE = q_BHSD.to(weight_HDE.dtype) @ weight_HDE
        else:
            q_BKGSD = q_BHSD.to(self.k_proj.weight.dtype).unflatten(1, (self.num_kv_heads, self.group_size))
            qg_BKSE = q_BKGSD.mean(2)
            if self.config.q_pooling == "avgproj":
                qg_BKSE = qg_BKSE @ self.q_proj.weight
        return branch_end(qg_BKSE, positions, *self._norm_and_rope("q_norm"))

    def pool(self, k_BKSD: Tensor) -> Tensor:
        """The pooled keys of each block, ``[B, K, N, P * D]``, in the order of ``config.k_pooling``."""
        return ops.pool_keys(k_BKSD, self.config.block_size, self.config.k_pooling)

    def keys(self, pooled_BKNP: Tensor, positions: Tensor) -> Tensor:
        """The key branch (equation 1b): one vector per block and KV head, ``[B, K, N, E]``."""
        return compressed_keys(pooled_BKNP, self.branch("k"), positions)

    def scores(self, qg_BKSE: Tensor, kg_BKNE: Tensor) -> Tensor:
        """The logits of equation 1c, ``[B, K, S, N]``, in fp32 or wider."""
        each = qg_BKSE.shape[1] // self.num_kv_heads  # queries per KV head
        grouped = qg_BKSE.unflatten(1, (-1, each)).flatten(2, 3)
        return block_scores(grouped, kg_BKNE).unflatten(2, (each, -1)).amax(2)

    def step_scores(self, q_BHD: Tensor, rows: RowLengths | Tensor, kg_BKNE: Tensor) -> Tensor:
        if self.config.q_pooling not in ("proj", "none"):
            return super().step_scores(q_BHD, rows, kg_BKNE)
        size, branch = self.config.block_size, self.branch("q")._asdict()
        if self.config.q_pooling == "none":  # a gate query per query head
            branch["weight"] = branch["weight"].flatten(0, 1)[:, None]
        return ops.score_blocks(q_BHD, rows, kg_BKNE, block_size=size, **branch)

    def remember(
        self, k_BKD: Tensor, rows: RowLengths | Tensor, recent: Tensor, entries: Tensor, **placing: Any
    ) -> None:
        """Store each row's newest key, and the compressed key of each block that it completes."""
        size, kinds, branch = self.config.block_size, self.config.k_pooling, self.branch("k")._asdict()
        ops.update_compressed_keys(k_BKD, rows, recent, entries, block_size=size, kinds=kinds, **branch, **placing)
