"""ReSA: sparse steps, rectified by a dense pass now and then (Sun et al., arXiv 2506.04108; section 5.4 of the paper).

The rectification is an option of every selecting method, ``rectify_every``. What is here is how ReSA's own
code selects: a tenth of the blocks, of sixteen tokens each, by Quest's bound for the mean query of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from seergate.methods.base import LayerSpec, LayerState, SelectingMethod, SelectingState, Step
from seergate.methods.checks import check_share
from seergate.methods.quest import QuestState
from seergate.methods.short_rows import with_all_blocks
from seergate.ops import Selection


@dataclass(kw_only=True)
class ReSA(SelectingMethod):
    """Read ``max(token_budget / block_size, share of the blocks, rounded up)`` blocks, the current one included; the
    defaults are those of ReSA's code.

    Attributes:
        token_budget: how much is read at least; 16 blocks in ReSA's code.
        share: of a row's blocks that is read.
        rectify_every: sparse steps between two dense passes; ``None`` for none.
    """

    name: ClassVar[str] = "resa"
    block_size: int = 16
    token_budget: int | None = 256
    share: float = 0.1
    rectify_every: int | None = 32

    def __post_init__(self) -> None:
        if self.token_budget is None or self.threshold is not None or self.top_p is not None:
            raise ValueError("resa reads a share of the blocks and at least token_budget tokens; it has no other rule")
        super().__post_init__()
        check_share(self, "share")

    @property
    def nominal(self) -> str:
        """See `Method`."""
        return f"{self.token_budget} or {100 * self.share:g} %"

    def new_state(self, spec: LayerSpec) -> LayerState:
        """See `Method`."""
        return QuestState(spec, self.block_size, "mean_query")

    def select(self, state: SelectingState, step: Step) -> Selection | None:
        """See `SelectingMethod`. How many blocks a row reads depends on its own length only."""
        if state.spec.layer in self.rule.dense_layers or self.covers(step.max_length):
            return None
        assert self.token_budget is not None
        blocks, least = [-(-end // self.block_size) for end in step.ends], self.token_budget // self.block_size
        counts = [min(count, max(least, math.ceil(count * self.share))) for count in blocks]
        step.scores_BKN = state.scores(step)
        selection = best_blocks(step.scores_BKN, blocks, counts, self.rule.sink_blocks)
        return with_all_blocks(selection, step.ends, self.block_size, self.rule.dense_up_to)


def best_blocks(scores_BKN: Tensor, blocks: list[int], counts: list[int], sinks: int = 0) -> Selection:
    """The best blocks of each row, its newest one and its first ``sinks`` always among them.

    Args:
        scores_BKN: higher is better; ties go to the lower block, NaN counts as lowest.
        blocks: how many blocks each row has.
        counts: how many of them it reads, at least one and the sinks.
        sinks: first blocks that are always read.
    """
    device, width = scores_BKN.device, max(blocks)
    places = torch.arange(width, device=device)
    used_B, wanted_B = (torch.tensor(numbers, device=device)[:, None] for numbers in (blocks, counts))
    forced_BN = (places == used_B - 1) | (places < sinks)
    scores = scores_BKN[..., :width].float().nan_to_num(nan=-torch.finfo(torch.float32).max)
    scores = scores.masked_fill(forced_BN[:, None], torch.inf).masked_fill((places >= used_B)[:, None], -torch.inf)
    ranked = scores.sort(dim=-1, descending=True, stable=True).indices[..., : max(counts)]
    kept = torch.arange(ranked.shape[-1], device=device) < wanted_B
    indices = torch.where(kept[:, None], ranked, width).sort(-1).values
    chosen = torch.where(indices == width, -1, indices)
    return Selection(chosen.int(), wanted_B.expand(-1, scores.shape[1]).int())
