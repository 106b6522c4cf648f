"""Retention gates: trained evictors, which score each token once, when it comes.

Shape suffixes: see `seergate.methods.base`; W width of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from seergate.errors import SeergateError
from seergate.methods.base import LayerSpec, LayerState, Step
from seergate.methods.evicting import BudgetedMethod, BudgetedState
from seergate.methods.gate import equal, gate_on

if TYPE_CHECKING:
    from seergate.gates.bank import Gates
    from seergate.gates.retention import RetentionGate


@dataclass(kw_only=True)
class RetentionMethod(BudgetedMethod):
    """Keeps the tokens that trained retention gates score best.

    Attributes:
        bank: gates whose scorer has the method's name.
        interval: tokens from one eviction to the next; 128, the buffer of both papers.
    """

    state: ClassVar[type[RetentionState]]
    from_gates: ClassVar[tuple[str, ...]] = ("bank",)
    bank: Gates = field(repr=False)
    interval: int = 128

    def __post_init__(self) -> None:
        self._copies: dict[tuple[int, torch.device], RetentionGate] = {}
        config = getattr(self.bank, "config", None)
        if config is None:
            raise SeergateError(f"bank is a {type(self.bank).__name__}; it must be a GateBank")
        if config.scorer != self.name:
            raise SeergateError(
                f"these gates were trained with scorer {config.scorer!r}, for the method "
                f"{config.scorer if config.retention else 'gate'!r}; {self.name!r} needs gates of seergate train "
                f"--scorer {self.name}"
            )
        super().__post_init__()

    @classmethod
    def with_gates(cls, bank: Gates, **options: Any) -> RetentionMethod:
        if stray := sorted(set(bank.decode_defaults) - cls.option_names()):
            raise SeergateError(f"decode_defaults of these gates has {', '.join(stray)}, no option of {cls.name!r}")
        return cls(bank=bank, **{**bank.decode_defaults, **options})

    def __eq__(self, other: object) -> bool:
        """As of `Gate`."""
        return equal(self, other)

    def new_state(self, spec: LayerSpec) -> LayerState:
        """A layer that has no gate keeps everything."""
        if str(spec.layer) not in self.bank.layers:
            return LayerState(spec, self)
        return self.state(spec, self, gate_on(spec, self.bank.retention_gate(spec.layer), self._copies))


class RetentionState(BudgetedState):
    """``score`` of each resident, and which token of its row it is, ``place``: ``[B, K, T]``."""

    def __init__(self, spec: LayerSpec, method: RetentionMethod, gate: RetentionGate) -> None:
        super().__init__(spec, method)
        self.gate = gate
        dtype = next(gate.parameters()).dtype
        self.add_per_token("score", torch.promote_types(torch.promote_types(dtype, spec.dtype), torch.float32))
        self.add_per_token("place", torch.int32)

    @torch.no_grad()
    def append(self, step: Step) -> None:
        super().append(step)
        assert step.hidden is not None
        scores_BKS, score = self.gate(step.hidden()), self.room("score", step.max_length)
        for row, (at, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            score[row, :, at : at + count] = scores_BKS[row, :, :count]
        self.add_places("place", step)

    def known(self, step: Step, row: int) -> tuple[Tensor, Tensor]:
        """Score and place of a row's residents, ``[K, T]``."""
        score, place = (self.rows[name][row, :, : step.ends[row]] for name in ("score", "place"))
        return score, place
