"""Fast KVzip: gates that predict how much attention a token will get (Kim, Han, Yun, arXiv 2601.17668)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from seergate.checks import check_counts
from seergate.methods.base import Step
from seergate.methods.retention import RetentionMethod, RetentionState


class FastKVzipState(RetentionState):
    """State of retention gates whose scores are in 0..1."""

    method: FastKVzip

    def importance(self, step: Step, row: int) -> Tensor:
        score, place = self.known(step, row)
        return torch.where(place < self.method.first_tokens, 1.0, score)


@dataclass(kw_only=True, eq=False)
class FastKVzip(RetentionMethod):
    """Keep the newest tokens and those to which the gates expect most attention.

    The authors rank the tokens of all layers and KV heads together, so that some heads keep more than others; here all
    KV heads keep as many. Their code gives the first tokens the highest score there is, and evicts where the length
    of the text is a multiple of 128.

    Attributes:
        token_budget: 4096 in the authors' script for answers of reasoning models.
        window: the newest tokens, which always stay: the gates' ``block_size`` if ``None``. The authors' is 128.
        first_tokens: the first tokens of a text, which count as 1.
    """

    name: ClassVar[str] = "fast_kvzip"
    plot_style: ClassVar[tuple[str, str] | None] = ("#228833", "<")
    state = FastKVzipState
    token_budget: int = 4096
    window: int | None = None
    first_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None:
            self.window = self.bank.config.block_size
        check_counts(self, window=0, first_tokens=0)
        self.check_recent("window")

    @property
    def recent(self) -> int:
        return self.window or 0
