"""SnapKV, applied again and again while decoding (Li et al., arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from seergate.methods.base import LayerSpec, LayerState, Step
from seergate.methods.budgeted import BudgetedMethod, BudgetedState
from seergate.methods.checks import check_choice, check_counts
from seergate.methods.scoring import QueryWindow, causal_softmax, logits, pooled, reduced


@dataclass(kw_only=True)
class SnapKV(BudgetedMethod):
    """Every ``interval`` decode steps keep the last ``window`` tokens and those that their queries attend to most.

    The paper compresses a long prompt once; of a reasoning model's long answer that would keep everything. So it is
    repeated, as in R-KV's comparison (``compress``). The queries are kept as they were, at their own positions.

    Attributes:
        token_budget: residents after an eviction.
        window: the observation window; 32 in the authors' code, 8 in R-KV's.
        interval: steps between evictions.
        compress: ``"repeatedly"``; or ``"prompt"``: once, a prompt that is longer than the budget, as in the paper.
            Then all that is generated stays.
        kernel: odd width of the pooling over neighbouring tokens; 7 in the authors' long-context settings.
        pooling: ``"max"`` or ``"avg"``.
        group_reduction: ``"mean"`` or ``"max"`` of the probabilities of a group; or ``"max_logits"``, as in R-KV: the
            largest logit of the group goes into a softmax over the tokens before the window.
    """

    name: ClassVar[str] = "snapkv"
    periodic: ClassVar[bool] = True
    token_budget: int = 2048
    window: int = 32
    interval: int = 128
    compress: str = "repeatedly"
    kernel: int = 7
    pooling: str = "max"
    group_reduction: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, window=1, kernel=1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel is {self.kernel}; it must be odd")
        check_choice(self, pooling=("max", "avg"), group_reduction=("mean", "max", "max_logits"))
        check_choice(self, compress=("repeatedly", "prompt"))
        if self.compress == "prompt" and self.prompt != "evictable":
            raise ValueError(f"prompt is {self.prompt!r} and compress is 'prompt'; then it must be 'evictable'")
        self.check_recent("window")

    @property
    def recent(self) -> int:
        """See `BudgetedMethod`."""
        return self.window

    def new_state(self, spec: LayerSpec) -> LayerState:
        """See `Method`."""
        return SnapKVState(spec, self)


class SnapKVState(BudgetedState):
    """The last ``window`` queries of each row."""

    def __init__(self, spec: LayerSpec, method: SnapKV) -> None:
        super().__init__(spec, method)
        self.method, self.window = method, QueryWindow(self, method.window)

    def append(self, step: Step) -> None:
        """See `LayerState`."""
        super().append(step)
        self.window.append(step)

    def due(self, row: int, held: int) -> bool:
        """See `BudgetedState`. If only prompts are compressed, the cache grows beyond `most_resident` afterwards."""
        return super().due(row, held) and (self.method.compress == "repeatedly" or self.decoded[row] == 0)

    def importance(self, step: Step, row: int) -> Tensor:
        """See `BudgetedState`."""
        held, method = step.ends[row], self.method
        keys, q = step.keys_BKCD[row : row + 1, :, :held], self.window.of(row)
        scores = window_scores(q, keys, step, method.group_reduction)
        scores = pooled(scores, method.kernel, method.pooling)[0]
        return torch.nn.functional.pad(scores, (0, method.window))  # the window stays in any case


def window_scores(q_1HWD: Tensor, keys_1KTD: Tensor, step: Step, group_reduction: str) -> Tensor:
    """Attention of the window's queries to the tokens before it, mean over the queries: ``[1, K, T - W]``."""
    window, held = q_1HWD.shape[2], keys_1KTD.shape[2]
    if group_reduction == "max_logits":
        return logits(q_1HWD, keys_1KTD[:, :, : held - window], step).amax(2).softmax(-1).mean(2)
    p_1KGWT = causal_softmax(q_1HWD, keys_1KTD, held - window, step)
    return reduced(p_1KGWT.mean(3), group_reduction, 2)[..., : held - window]
