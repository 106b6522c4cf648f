"""TOVA: keep what the newest query attends to most (Oren et al., arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from seergate.checks import check_choice, check_flags
from seergate.methods.base import Step
from seergate.methods.evicting import BudgetedMethod, BudgetedState
from seergate.methods.scoring import causal_softmax


class TOVAState(BudgetedState):
    """Keeps no tensors."""

    method: TOVA
    reads_all_keys = True

    def importance(self, step: Step, row: int) -> Tensor:
        end, count = step.ends[row], step.counts[row]  # of a prompt: a step has the probabilities of all rows
        newest, keys = step.q_BHSD[row : row + 1, :, count - 1 : count], step.keys_BKCD[row : row + 1, :, :end]
        return self._mean(causal_softmax(newest, keys, end - 1, step)[:, :, :, 0])[0]

    def importances(self, step: Step, rows: list[int]) -> Tensor:
        if step.p_BKGT is None:
            return super().importances(step, rows)
        return self._mean(self.of_rows(step.p_BKGT, step, rows))

    def _mean(self, p_RKGT: Tensor) -> Tensor:
        return p_RKGT.mean((1, 2))[:, None] if self.method.scope == "layer" else p_RKGT.mean(2)


@dataclass(kw_only=True)
class TOVA(BudgetedMethod):
    """Keep the tokens with the largest attention probability of the current query, as a mean over all query heads.

    As in the paper one token leaves at each step, which moves the cache each time; a larger ``interval`` is cheaper.

    Attributes:
        token_budget: the paper studies 256 to 4096.
        protect_current: always keep the current token; in the paper it may be evicted at once.
        scope: ``"layer"``, as in the paper: one set of tokens for all heads; ``"kv_head"``: one set per group.
    """

    name = "tova"
    state = TOVAState
    plot_style = ("#56B4E9", "P")
    chunked_prefill = True
    protect_current: bool = True
    scope: str = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, scope=("layer", "kv_head"))
        check_flags(self, "protect_current")

    @property
    def recent(self) -> int:
        return int(self.protect_current)
