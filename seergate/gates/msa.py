"""The index branch of MiniMax Sparse Attention (MSA, arXiv 2606.13392), on a frozen model.

Follows the paper's overview (Figure 1) and the implementation of MiniMax-M3 in transformers (``MiniMaxM3VLIndexer``):
one index query per GQA group, **one index key per token, shared by all groups**, RMSNorm and RoPE on both. A block's
score is the maximum of its tokens' scores: scores are pooled, not keys.

Differences from MiniMax: there, the inputs are the layer's hidden state; here, its queries and keys before RoPE, which
hooks on a frozen model give. There, part of the width is rotated; here, all of it. There, the loss compares tokens of
the selected blocks; here, blocks. The weight and the annealing of MiniMax's loss could not be confirmed.

Shape suffixes: see `seergate.gates.scorer`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seergate.config import GateConfig
from seergate.gates.geometry import ModelGeometry
from seergate.gates.scorer import HeadwiseLinear, TokenScorer
from seergate.ops.gate_math import branch_end, projected_queries


class MSA(TokenScorer):
    """``score_g[t, n] = max over j in n of query_g(t) . key(j) / sqrt(E)``."""

    def __init__(self, config: GateConfig, geometry: ModelGeometry) -> None:
        super().__init__(config, geometry)
        self.q_proj = HeadwiseLinear(self.num_kv_heads, self.group_size, self.head_dim, config.gate_dim)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.gate_dim, dtype=torch.float32)
            self.k_norm = nn.RMSNorm(config.gate_dim, dtype=torch.float32)

    def queries(self, q_BHSD: Tensor, positions: Tensor) -> Tensor:
        """One index query per token and group, ``[B, K, S, E]``."""
        return branch_end(projected_queries(q_BHSD, self.q_proj.weight), positions, *self._norm_and_rope("q_norm"))

    def token_scores(self, queries_BKSE: Tensor, keys_B1TE: Tensor) -> Tensor:
        return self.products(queries_BKSE, keys_B1TE)
