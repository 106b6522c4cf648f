"""The lightning indexer of DeepSeek Sparse Attention (DSA; DeepSeek-V3.2, equation 1), on a frozen GQA model.

Equation 1 is ``I[t, s] = sum over heads i of w_i(t) * ReLU(q_i(t) . k(s))``. As in DeepSeek's code, but not in the
equation: the factors ``E^-1/2`` and ``I^-1/2``; LayerNorm on the index key, no norm on the queries; RoPE on both; half
as many index heads as query heads. Left out: FP8 and the Hadamard rotation before it, which does not change products.

Differences from DeepSeek: there, index queries are computed from MLA's latent query, index keys and weights from the
hidden state; here, all are computed from the layer's queries and keys before RoPE, which hooks on a frozen model give.
There, half of the width is rotated; here, all of it. Two more follow from grouped-query attention and from blocks;
without them an indexer learned worse on the tiny reasoner:

* Every KV head has its own index heads. MLA has a single KV head.
* The weights are made positive by softplus. A block's score is the maximum over its tokens: if all weights of a query
  were negative, it would be 0 for nearly every block, without a gradient. DeepSeek selects single tokens.

Shape suffixes: see `seergate.gates.scorer`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seergate.config import GateConfig
from seergate.gates.geometry import ModelGeometry
from seergate.gates.scorer import HeadwiseLinear, TokenScorer
from seergate.ops.gate_math import NORM_EPS, branch_end


class Indexer(TokenScorer):
    """``score_g[t, n] = max over j in n of sum over i in g of w_i(t) ReLU(query_i(t) . key(j) / sqrt(E)) / sqrt(I)``,
    with I index heads per KV head g.
    """

    def __init__(self, config: GateConfig, geometry: ModelGeometry) -> None:
        super().__init__(config, geometry)
        self.index_heads = max(1, self.group_size // 2)
        inputs, heads = self.num_heads * self.head_dim, self.num_kv_heads * self.index_heads
        self.q_proj = HeadwiseLinear(1, inputs, heads * config.gate_dim)
        self.head_weights = HeadwiseLinear(1, inputs, heads)
        if config.qk_norm:
            self.k_norm = nn.LayerNorm(config.gate_dim, NORM_EPS, dtype=torch.float32)

    def queries(self, q_BHSD: Tensor, positions: Tensor) -> Tensor:
        """The index queries of each token, with the weight of the head as last element: ``[B, K * I, S, E + 1]``."""
        q_BSP = q_BHSD.to(self.k_proj.weight.dtype).transpose(1, 2).flatten(2)
        queries_BISE = (q_BSP @ self.q_proj.weight[0]).unflatten(2, (-1, self.config.gate_dim)).transpose(1, 2)
        weights_BIS = F.softplus(q_BSP @ self.head_weights.weight[0]).transpose(1, 2) / math.sqrt(self.index_heads)
        queries_BISE = branch_end(queries_BISE, positions, *self._norm_and_rope())
        return torch.cat((queries_BISE, weights_BIS[..., None]), -1)

    def key_end(self, keys_B1TE: Tensor, positions: Tensor) -> Tensor:
        normed = self.k_norm(keys_B1TE) if self.config.qk_norm else keys_B1TE
        return branch_end(normed, positions, *self._norm_and_rope())

    def token_scores(self, queries_BISE: Tensor, keys_B1TE: Tensor) -> Tensor:
        queries_BISE, weights_BIS1 = queries_BISE.split((self.config.gate_dim, 1), -1)
        products_BIST = self.products(queries_BISE, keys_B1TE)
        return (products_BIST.relu() * weights_BIS1).unflatten(1, (self.num_kv_heads, -1)).sum(2)
