"""Each method's summary of a block of the cache, and how it scores blocks with it.

Shape suffixes: R rows (decoding requests), N blocks, H query heads, K KV heads, G query heads per KV head, S tokens of
a block, D head dimension, W width of a block's summary, Q = R * K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from seergate.gates.gate import AttnGate
from seergate.gates.scorer import Scorer
from seergate.methods.quest import by_probability, capped, page_bounds
from seergate.ops.backend import choose
from seergate.serving.common.rope import Unrotation
from seergate.serving.common.rows import PagedRows


class Scores(ABC):
    """How a method scores blocks in one layer.

    Args:
        method: the method that names this class.
        head_dim, dtype: channels of a cached key, and the dtype of the cache.
        scale: what the layer's attention multiplies its scores by.
        softcap: the layer's cap on attention logits; 0 without one.
        gate, unrotate: the layer's gate, with this rank's heads, and inverse RoPE; ``None`` without gates.

    Attributes:
        width, dtype: numbers per KV head in a block's summary, and their dtype.
        numbers: approximate count of numbers held in memory while scoring, per block and KV head.
    """

    width: int
    dtype: torch.dtype
    numbers: int

    @abstractmethod
    def __init__(
        self, method: Any, head_dim: int, dtype: torch.dtype, scale: float, softcap: float, gate: Any, unrotate: Any
    ) -> None: ...

    @abstractmethod
    def summary(self, keys_NKSD: Tensor, starts_N: Tensor) -> Tensor:
        """The summaries ``[N, K, W]`` of blocks that begin at positions ``starts_N``, from their cached keys."""

    @abstractmethod
    def scores(self, query_RHD: Tensor, rows: PagedRows, summary_RKNW: Tensor) -> Tensor:
        """Scores ``[R, K, N]`` of the blocks for each row's newest query."""

    def in_kernels(self, device: torch.device, blocks: int) -> bool:
        """Whether fused kernels run a step in which all rows decode, of at most ``blocks`` blocks each. That keeps its
        CUDA graph small.
        """
        return False


class GateScores(Scores):
    """The learned gate: a block's summary is its compressed key."""

    def __init__(
        self,
        method: Any,
        head_dim: int,
        dtype: torch.dtype,
        scale: float,
        softcap: float,
        gate: Scorer,
        unrotate: Unrotation,
    ) -> None:
        self.gate, self.unrotate = gate, unrotate
        self.width, self.dtype = gate.config.gate_dim, gate.k_proj.weight.dtype
        self.numbers = self.width
        self.one_query_per_head = isinstance(gate, AttnGate) and gate.config.q_pooling == "proj"

    def summary(self, keys_NKSD: Tensor, starts_N: Tensor) -> Tensor:
        size = keys_NKSD.shape[2]
        positions_N1S = starts_N[:, None, None] + torch.arange(size, device=starts_N.device)
        pooled = self.gate.pool(self.unrotate(keys_NKSD, positions_N1S))
        return self.gate.keys(pooled, starts_N[:, None])[:, :, 0]

    def scores(self, query_RHD: Tensor, rows: PagedRows, summary_RKNW: Tensor) -> Tensor:
        rotary = self.unrotate.rotary
        inverse = rows.once(("inverse RoPE", rotary), lambda: self.unrotate.at(rows.positions))
        return self.gate.step_scores(self.unrotate.undo(query_RHD, inverse), rows, summary_RKNW)

    def in_kernels(self, device: torch.device, blocks: int) -> bool:
        if not self.one_query_per_head or self.dtype.itemsize > 4 or choose(device) != "triton":
            return False
        from seergate.ops.triton_impl.selection import MAX_BLOCKS

        return blocks <= MAX_BLOCKS


class QuestScores(Scores):
    """Quest's upper bound: a block's summary is the maximum and the minimum of its keys per channel."""

    def __init__(
        self, method: Any, head_dim: int, dtype: torch.dtype, scale: float, softcap: float, gate: None, unrotate: None
    ) -> None:
        self.width, self.dtype, self.group_reduction, self.scale = 2 * head_dim, dtype, method.group_reduction, scale
        self.softcap = softcap if by_probability(method) else 0.0
        self.numbers = 2 * self.width  # in the dtype of the cache, and in float32

    def summary(self, keys_NKSD: Tensor, starts_N: Tensor) -> Tensor:
        return torch.cat((keys_NKSD.amax(2), keys_NKSD.amin(2)), -1)

    def scores(self, query_RHD: Tensor, rows: PagedRows, summary_RKNW: Tensor) -> Tensor:
        high_RKND, low_RKND = summary_RKNW.chunk(2, -1)
        return capped(page_bounds(query_RHD, high_RKND, low_RKND, self.group_reduction, self.scale), self.softcap)
