"""H2O: heavy hitters by accumulated attention, and recent tokens (Zhang et al., arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seergate.checks import check_choice
from seergate.methods.base import LayerSpec, Step
from seergate.methods.evicting import BudgetedMethod, BudgetedState
from seergate.methods.scoring import prompt_probabilities, reduced
from seergate.ops.gate_math import wide_dtype


class H2OState(BudgetedState):
    """``mass [B, K, T]``: attention probability received by each resident."""

    method: H2O
    reads_all_keys = True

    def __init__(self, spec: LayerSpec, method: H2O) -> None:
        super().__init__(spec, method)
        # half precision would lose small increments
        self.add_per_token("mass", wide_dtype(spec.dtype))

    def append(self, step: Step) -> None:
        super().append(step)
        if step.decoded == step.q_BHSD.shape[2] == 1:
            return  # `observe_attention` counts it
        for row, end in enumerate(step.ends):
            for p_KGWT in prompt_probabilities(step, row):
                self.rows["mass"][row, :, :end] += reduced(p_KGWT, self.method.group_reduction, 1).sum(1)

    def observe_attention(self, step: Step) -> None:
        p_BKGT = step.p_BKGT
        assert p_BKGT is not None
        size = step.max_length

        def slots() -> Tensor:
            newest = step.lengths[:, None, None] - 1
            return torch.arange(size, device=p_BKGT.device) >= newest

        fresh = step.rows.once("fresh", slots)  # such a slot may hold the value of an evicted token
        given = reduced(p_BKGT, self.method.group_reduction, 2)
        self.rows["mass"][:, :, :size].masked_fill_(fresh, 0).add_(given)

    def importance(self, step: Step, row: int) -> Tensor:
        return self.importances(step, [row])[0, :, : step.ends[row]]

    def importances(self, step: Step, rows: list[int]) -> Tensor:
        return self.of_rows(self.rows["mass"], step, rows)


@dataclass(kw_only=True)
class H2O(BudgetedMethod):
    """Keep the newest tokens and those with the largest sum of attention probability over all queries so far.

    As in the paper one token leaves at each step, which moves the cache each time; a larger ``interval`` is cheaper.
    The paper's code has one KV head per query head; here the group's probabilities are reduced.

    Attributes:
        token_budget: heavy hitters and recent tokens together; 1024 + 1024 in the authors' scripts.
        recent_tokens: number of newest tokens within the budget; half of it if ``None``.
        group_reduction: ``"mean"`` or ``"max"`` over the query heads of a group, query by query.
    """

    name = "h2o"
    state = H2OState
    plot_style = ("#E69F00", "D")
    recent_option = "recent_tokens"
    chunked_prefill = True
    token_budget: int = 2048
    recent_tokens: int | None = None
    group_reduction: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, group_reduction=("mean", "max"))

    @property
    def recent(self) -> int:
        return self.token_budget // 2 if self.recent_tokens is None else self.recent_tokens
