"""The index branch of MiniMax Sparse Attention (MSA, arXiv 2606.13392), on a frozen model.

Read in the paper's overview (Figure 1) and in the implementation that transformers has of MiniMax-M3
(``MiniMaxM3VLIndexer``): one index query per GQA group, **one index key per token, shared by all groups**, RMSNorm on
both, RoPE, and the highest of a block's token scores. It is the scores that are pooled, not the keys.

Differences: MiniMax maps the layer's hidden state, this the layer's queries and keys before RoPE, which hooks
on a frozen model give; MiniMax rotates a part of the width, this all of it. The weight and the annealing of MiniMax's
loss could not be confirmed; it compares token by token, over the selected blocks, this block by block.

Shape suffixes: see `seergate.gates.scorer`.
"""

from __future__ import annotations

from torch import Tensor

from seergate.config import GateConfig
from seergate.gates.scorer import GateRMSNorm, HeadwiseLinear, TokenScorer
from seergate.geometry import ModelGeometry
from seergate.ops.gate_math import branch_end, projected_queries


class MSA(TokenScorer):
    """``score_g[t, n] = max over j in n of query_g(t) . key(j) / sqrt(E)``."""

    def __init__(self, config: GateConfig, geometry: ModelGeometry) -> None:
        super().__init__(config, geometry)
        self.q_proj = HeadwiseLinear(self.num_kv_heads, self.group_size, self.head_dim, config.gate_dim)
        if config.qk_norm:
            self.q_norm, self.k_norm = GateRMSNorm(config.gate_dim), GateRMSNorm(config.gate_dim)

    def queries(self, q_BHSD: Tensor, positions: Tensor) -> Tensor:
        """One index query per token and group, ``[B, K, S, E]``."""
        return branch_end(projected_queries(q_BHSD, self.q_proj.weight), positions, *self._end("q_norm"))

    def key_end(self, keys_B1TE: Tensor, positions: Tensor) -> Tensor:
        return branch_end(keys_B1TE, positions, *self._end("k_norm"))

    def token_scores(self, queries_BKSE: Tensor, keys_B1TE: Tensor) -> Tensor:
        return self.products(queries_BKSE, keys_B1TE)
