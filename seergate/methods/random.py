"""Random selection: the control that every other selection must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from seergate.config import is_int
from seergate.methods.base import LayerSpec, LayerState, SelectingMethod, SelectingState, Step


@dataclass(kw_only=True)
class Random(SelectingMethod):
    """Read the current block and a uniformly random choice of past ones, anew at each step, per layer and KV head.

    The choice is a hash of (seed, layer, head, position, block): it repeats, and does not depend on the batch.
    """

    name: ClassVar[str] = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_int(self.seed):
            raise ValueError(f"seed is {self.seed!r}; it must be an integer")

    def new_state(self, spec: LayerSpec) -> LayerState:
        """See `Method`."""
        return RandomState(spec, self.block_size, self.seed)


class RandomState(SelectingState):
    """Remembers nothing."""

    def __init__(self, spec: LayerSpec, block_size: int, seed: int) -> None:
        super().__init__(spec)
        self.block_size, self.seed = block_size, seed

    def scores(self, step: Step) -> Tensor:
        """See `SelectingState`."""
        device = step.lengths.device
        heads = torch.arange(self.spec.num_kv_heads, device=device)[None, :, None]
        blocks = torch.arange(-(-step.max_length // self.block_size), device=device)[None, None]
        mixed = mix(mix(torch.tensor(self.seed * 1_000_003 + self.spec.layer, device=device)) + step.lengths)
        hashed = mix(mix(mixed[:, None, None] + heads) + blocks)
        return (hashed >> 40).float()  # 24 bits: exact in fp32


def mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64, with wrap-around arithmetic and logical shifts."""
    x = x * -7046029254386353131 + 1442695040888963407
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))
