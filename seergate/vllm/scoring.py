"""What each method keeps per block of the cache, and how it scores blocks with it.

Shape suffixes: R rows (decoding requests), N blocks, H query heads, K KV heads, G query heads per KV head, S tokens of
a block, D head dimension, W width of a block's summary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.gates.scorer import Scorer
from seergate.vllm.rope import Unrotation

Keys = Callable[[], Tensor]
"""Reads the cached keys of all blocks of all rows, ``[R, K, N * S, D]``: what a method needs that has no summaries."""


class Scores(ABC):
    """A method's part in one layer.

    Attributes:
        width, dtype: of a block's summary.
    """

    width: int
    dtype: torch.dtype

    @abstractmethod
    def summary(self, keys_NKSD: Tensor, starts_N: Tensor) -> Tensor:
        """The summaries ``[N, K, W]`` of blocks that begin at positions ``starts_N``, from their cached keys."""

    @abstractmethod
    def scores(self, query_RHD: Tensor, last_R: Tensor, summary_KRNW: Tensor, read: Keys) -> Tensor:
        """Scores ``[R, K, N]`` of the blocks for queries at positions ``last_R``."""


class GateScores(Scores):
    """The learned gate: a block's summary is its compressed key.

    Args:
        gate: of this layer, with this rank's heads.
        unrotate: of this layer.
    """

    def __init__(self, gate: Scorer, unrotate: Unrotation) -> None:
        self.gate, self.unrotate = gate, unrotate
        self.width, self.dtype = gate.config.gate_dim, gate.k_proj.weight.dtype

    def summary(self, keys_NKSD: Tensor, starts_N: Tensor) -> Tensor:
        size = keys_NKSD.shape[2]
        positions_N1S = starts_N[:, None, None] + torch.arange(size, device=starts_N.device)
        pooled = self.gate.pool(self.unrotate(keys_NKSD, positions_N1S))
        return self.gate.keys(pooled, starts_N[:, None])[:, :, 0]

    def scores(self, query_RHD: Tensor, last_R: Tensor, summary_KRNW: Tensor, read: Keys) -> Tensor:
        plain = self.unrotate(query_RHD, last_R[:, None])
        return self.gate.step_scores(plain, last_R + 1, summary_KRNW.transpose(0, 1))


class QuestScores(Scores):
    """Quest's upper bound: a block's summary is the largest and the smallest key per channel.

    Args:
        head_dim: D.
        dtype: of the cache.
        group_reduction: ``"max"`` or ``"mean"`` over the query heads of a group.
    """

    def __init__(self, head_dim: int, dtype: torch.dtype, group_reduction: str) -> None:
        self.width, self.dtype, self.group_reduction = 2 * head_dim, dtype, group_reduction

    def summary(self, keys_NKSD: Tensor, starts_N: Tensor) -> Tensor:
        return torch.cat((keys_NKSD.amax(2), keys_NKSD.amin(2)), -1)

    def scores(self, query_RHD: Tensor, last_R: Tensor, summary_KRNW: Tensor, read: Keys) -> Tensor:
        high_KRDN, low_KRDN = summary_KRNW.float().transpose(-1, -2).chunk(2, 2)
        query_KRGD = query_RHD.unflatten(1, (len(high_KRDN), -1)).float().transpose(0, 1)
        bound_KRGN = query_KRGD.clamp(min=0) @ high_KRDN + query_KRGD.clamp(max=0) @ low_KRDN
        bound_KRN = bound_KRGN.mean(2) if self.group_reduction == "mean" else bound_KRGN.amax(2)
        return bound_KRN.transpose(0, 1)


class OracleScores(Scores):
    """The blocks that dense attention weighs most: the largest log-probability that a query head of the group gives to
    a key of the block. It reads all keys, so it measures and does not save.

    Args:
        size: tokens per block.
        scale, softcap: of the layer's attention; 0 for no cap.
    """

    width, dtype = 0, torch.float32

    def __init__(self, size: int, scale: float, softcap: float) -> None:
        self.size, self.scale, self.softcap = size, scale, softcap

    def summary(self, keys_NKSD: Tensor, starts_N: Tensor) -> Tensor:
        return keys_NKSD.new_empty(*keys_NKSD.shape[:2], 0)

    def scores(self, query_RHD: Tensor, last_R: Tensor, summary_KRNW: Tensor, read: Keys) -> Tensor:
        keys_RKTD = read().float()
        query_RKGD = query_RHD.unflatten(1, (keys_RKTD.shape[1], -1)).float()
        logits = (query_RKGD * self.scale) @ keys_RKTD.transpose(-1, -2)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        held_RT = torch.arange(keys_RKTD.shape[2], device=last_R.device) <= last_R[:, None]
        logp_RKGT = F.log_softmax(logits.masked_fill(~held_RT[:, None, None], -torch.inf), -1)
        return logp_RKGT.unflatten(-1, (-1, self.size)).amax(-1).amax(2)
