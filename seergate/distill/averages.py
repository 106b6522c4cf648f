"""Averages of losses, KL and recall over the packs of all processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from seergate.distill.distributed import DistributedState
from seergate.distill.losses.distill_loss import DistillOutput
from seergate.gates.bank import Gates


@dataclass(frozen=True)
class Averages:
    """Averages over the packs of all processes; of KL and recall over their rows.

    Attributes:
        tokens: total number of tokens of the packs.
        non_finite: number of packs that are left out because their loss is not finite.
        kl_per_layer: KL of each layer in nats per row; NaN if no row counted.
        recall: token budget -> for each layer and KV head, the share of the teacher's mass in the gate's best blocks;
            NaN if no row counted.
        stop: whether any process was asked to stop.
    """

    loss: float
    tokens: int
    non_finite: int
    kl_per_layer: list[float]
    recall: dict[int, list[list[float]]]
    stop: bool

    @classmethod
    def over(
        cls,
        bank: Gates,
        budgets: Sequence[int],
        world: DistributedState,
        outputs: list[DistillOutput],
        packs: int,
        stop: bool = False,
    ) -> Averages:
        """Average over ``packs`` packs, given this process's outputs, with one all-reduce of a float64 vector."""
        layers, heads = len(bank), bank.geometry.num_kv_heads
        numbers = 6 + layers * (1 + len(budgets) * heads)
        sums = torch.zeros(numbers, dtype=torch.float64, device=world.device)
        sums[0] = stop
        for output in outputs:
            counted = sums.new_full((), output.tokens)  # filled on the device: a copy from the host would synchronise
            rows = output.rows.to(sums)
            recall_rows = rows if output.recall_rows is None else output.recall_rows.to(sums)
            per_row = (output.kl_per_layer.to(sums) * rows, output.recall.to(sums) * recall_rows)
            parts = (sums.new_zeros(2), output.loss, counted, rows, recall_rows, *per_row)
            pack = torch.cat([x.to(sums).reshape(-1) for x in parts])
            finite = output.loss.isfinite()
            pack = torch.where(finite, pack, torch.zeros_like(pack))
            pack[1] = ~finite
            sums += pack
        stops, non_finite, loss, tokens, rows, recall_rows, *rest = world.sum(sums).tolist()
        loss /= packs - int(non_finite) or math.nan
        values = torch.tensor(rest, dtype=torch.float64)
        shares = values[layers:].view(-1, layers, heads) / (recall_rows or math.nan)  # nothing was measured
        recall = dict(zip(budgets, shares.tolist(), strict=True))
        kl_per_layer = (values[:layers] / (rows or math.nan)).tolist()
        return cls(loss, int(tokens), int(non_finite), kl_per_layer, recall, stop=stops > 0)
