"""What the packs of a step or an evaluation add up to, over all processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from seergate.distill.distributed import World
from seergate.distill.engines import Losses


@dataclass(frozen=True)
class Means:
    """Averages over packs.

    Attributes:
        loss: of the reduction that is optimised.
        tokens: in all packs together, not an average.
        kl_per_layer: nats per row.
        recall: budget in tokens -> per layer, per KV head, the share of the teacher's mass in the gate's best blocks.
    """

    loss: float
    tokens: int
    kl_per_layer: list[float]
    recall: dict[int, list[list[float]]]


class Tally:
    """Sums over packs, in float64, as one vector: one collective per step.

    Args:
        layers, kv_heads: of the gates.
        budgets: at which recall is measured.
        device: where the packs are computed.
    """

    def __init__(self, layers: int, kv_heads: int, budgets: tuple[int, ...], device: torch.device) -> None:
        self._layers, self._heads, self._budgets = layers, kv_heads, budgets
        numbers = 2 + layers * (1 + len(budgets) * kv_heads)
        self._sums = torch.zeros(numbers, dtype=torch.float64, device=device)

    def add(self, losses: Losses, tokens: int) -> None:
        """Add one pack."""
        parts = (losses.loss, torch.tensor(tokens), losses.kl_per_layer, losses.recall)
        self._sums += torch.cat([x.detach().to(self._sums).reshape(-1) for x in parts])

    def means(self, world: World, packs: int) -> Means:
        """The averages over the ``packs`` of all processes; collective."""
        loss, tokens, *rest = world.sum(self._sums).tolist()
        values = torch.tensor(rest, dtype=torch.float64) / packs
        kl, recall = values[: self._layers], values[self._layers :].view(-1, self._layers, self._heads)
        return Means(loss / packs, int(tokens), kl.tolist(), dict(zip(self._budgets, recall.tolist(), strict=True)))
