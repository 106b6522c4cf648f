"""Oracle selection: the blocks that dense attention itself weighs most (SeerAttention-R, section 4.2).

An upper bound on accuracy for a block size and budget, not a speed-up: it computes all scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from seergate.methods.base import Step
from seergate.methods.scoring import log_block_maxima
from seergate.methods.selecting import SelectingMethod, SelectingState


class OracleState(SelectingState):
    """Remembers nothing; reads the cache's keys."""

    reads_all_keys = True

    @torch.no_grad()
    def scores(self, step: Step) -> Tensor:
        return log_block_maxima(step, self.block_size)


@dataclass(kw_only=True)
class Oracle(SelectingMethod):
    """Score a block by the largest attention probability that any query head of the group gives to any of its keys.

    That is the gate's training target before normalisation; threshold and top-p act on it after normalisation over the
    past blocks, so that they mean the same as for the gate.
    """

    name: ClassVar[str] = "oracle"
    state = OracleState
    plot_style: ClassVar[tuple[str, str] | None] = ("#0072B2", "s")
    role: ClassVar[Literal["method", "control", "bound"]] = "bound"
    serving_scores: ClassVar[str | None] = "seergate.serving.scoring:OracleScores"
