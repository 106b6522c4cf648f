"""Base class of retention gates: a score per token and KV head, computed from the attention's input.

Shape suffixes: B batch, S tokens, W width of the model, H query heads, K KV heads, G query heads per KV head
(H = G * K), E gate dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor, nn

from seergate.config import GateConfig
from seergate.gates.scorer import INIT_STD
from seergate.geometry import ModelGeometry


class RetentionGate(nn.Module, ABC):
    """Scores each token once, for as long as it may stay in the cache. Computes in float32 or wider.

    Args:
        config: the architecture.
        hidden_size: W.
        num_heads: H, query heads of the model's layer.
        num_kv_heads: K, KV heads; divides H.

    Raises:
        ValueError: if the head counts do not divide, or the width of the model is not known.
    """

    def __init__(self, config: GateConfig, *, hidden_size: int | None, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        if hidden_size is None or hidden_size < 1:
            raise ValueError(f"hidden_size is {hidden_size}; retention gates need the width of their model")
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads is {num_heads}; it must be a positive multiple of num_kv_heads ({num_kv_heads})"
            )
        self.config, self.hidden_size, self.num_kv_heads = config, hidden_size, num_kv_heads
        self.group_size = num_heads // num_kv_heads

    @classmethod
    def for_geometry(cls, config: GateConfig, geometry: ModelGeometry) -> Self:
        """The gate of one layer of a model, with fresh weights."""
        heads = {"num_heads": geometry.num_heads, "num_kv_heads": geometry.num_kv_heads}
        return cls(config, hidden_size=geometry.hidden_size, **heads)

    @abstractmethod
    def forward(self, hidden_BSW: Tensor) -> Tensor:
        """Scores ``[B, K, S]`` of tokens, from what the model's attention module gets as input."""


def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A linear map with weights Normal(0, 0.02) and no bias yet."""
    made = nn.Linear(inputs, outputs, bias, dtype=torch.float32)
    nn.init.normal_(made.weight, std=INIT_STD)
    if bias:
        nn.init.zeros_(made.bias)
    return made


def wide_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """What the layer makes of ``x``, in float32 or wider."""
    wide = torch.promote_types(torch.promote_types(x.dtype, layer.weight.dtype), torch.float32)
    bias = None if layer.bias is None else layer.bias.to(wide)
    with torch.autocast(x.device.type, enabled=False):
        return nn.functional.linear(x.to(wide), layer.weight.to(wide), bias)
