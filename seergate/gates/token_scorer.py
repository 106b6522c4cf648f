"""Scorers that keep one small key per token: a block's score is the highest of its tokens' scores.

Shape suffixes: see `seergate.gates.scorer`; T tokens that have keys.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.config import GateConfig
from seergate.gates.scorer import HeadwiseLinear, Scorer
from seergate.ops.gate_math import block_scores


class TokenScorer(Scorer):
    """One index key per token, a linear map of the keys of all KV heads; shared by all queries."""

    def __init__(self, config: GateConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.entry_tokens = self.key_heads = 1
        self.k_proj = HeadwiseLinear(1, self.num_kv_heads * self.head_dim, config.gate_dim)

    def pool(self, k_BKSD: Tensor) -> Tensor:
        """The keys of all KV heads side by side, ``[B, 1, S, K * D]``."""
        return k_BKSD.transpose(1, 2).flatten(2)[:, None]

    def keys(self, pooled_B1TP: Tensor, positions: Tensor) -> Tensor:
        """The index keys, ``[B, 1, T, E]``; ``positions [B, T]`` or ``[T]``."""
        weight = self.k_proj.weight
        return self.key_end(pooled_B1TP.to(weight.dtype) @ weight, positions)

    @abstractmethod
    def key_end(self, keys_B1TE: Tensor, positions: Tensor) -> Tensor:
        """Index keys of the linear map's: normalised if ``config.qk_norm``, then rotated if ``config.rope``."""

    @abstractmethod
    def token_scores(self, queries_BISE: Tensor, keys_B1TE: Tensor) -> Tensor:
        """Scores of tokens, in fp32 or wider: ``[B, K, S, T]``."""

    def products(self, queries_BISE: Tensor, keys_B1TE: Tensor) -> Tensor:
        """``query . key / sqrt(E)``, ``[B, I, S, T]``: one product, which reads the keys once for all heads."""
        heads = queries_BISE.shape[1:3]
        return block_scores(queries_BISE.flatten(1, 2)[:, None], keys_B1TE)[:, 0].unflatten(1, heads)

    def scores(self, queries_BISE: Tensor, keys_B1TE: Tensor) -> Tensor:
        """The highest score of each block's tokens, ``[B, K, S, N]``, in fp32 or wider."""
        tokens, size = keys_B1TE.shape[2], self.config.block_size
        padded = F.pad(self.token_scores(queries_BISE, keys_B1TE), (0, -tokens % size), value=-torch.inf)
        return padded.unflatten(-1, (-1, size)).amax(-1)

    def remember(
        self,
        k_BKD: Tensor,
        lengths: Tensor,
        recent: Tensor,
        entries: Tensor,
        position_offset: int,
        host_lengths: Sequence[int] | None,
    ) -> None:
        """Add the index key of each row's newest token."""
        at = lengths - 1
        rows = torch.arange(len(lengths), device=at.device)
        with torch.autocast(k_BKD.device.type, enabled=False):
            entries[rows, :, at] = self.keys(self.pool(k_BKD[:, :, None]), at[:, None])[:, :, 0]
