"""Retention gates: trained evictors that score each token once, on arrival. The gates of Fast KVzip predict how much
attention it will get, the gates of TRIM-KV how long it is worth keeping.

Shape suffixes: see `seergate.methods.base`; W width of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from seergate.checks import check_counts
from seergate.errors import SeergateError
from seergate.methods.base import LayerSpec, LayerState, Step
from seergate.methods.evicting import BudgetedMethod, BudgetedState
from seergate.methods.gate import GatedMethod

if TYPE_CHECKING:
    from seergate.gates.bank import Gates
    from seergate.gates.retention import RetentionGate


@dataclass(kw_only=True, eq=False)
class RetentionMethod(GatedMethod, BudgetedMethod):
    """Keeps the tokens that trained retention gates score best.

    Attributes:
        bank: gates whose scorer has the method's name.
        interval: tokens between evictions; 128, the buffer of both papers.
    """

    state: ClassVar[type[RetentionState]]
    chunked_prefill = True
    interval: int = 128

    def __post_init__(self) -> None:
        self.check_bank()
        config = self.bank.config
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

    def new_state(self, spec: LayerSpec) -> LayerState:
        """State of one layer; a layer without a gate keeps everything."""
        gate = self.gate_on(spec)
        return LayerState(spec, self) if gate is None else self.state(spec, self, gate)


class RetentionState(BudgetedState):
    """``score`` of each resident, and ``position``, in its row: ``[B, K, T]``."""

    def __init__(self, spec: LayerSpec, method: RetentionMethod, gate: RetentionGate) -> None:
        super().__init__(spec, method)
        self.gate = gate
        dtype = next(gate.parameters()).dtype
        self.add_per_token("score", torch.promote_types(torch.promote_types(dtype, spec.dtype), torch.float32))
        self.add_per_token("position", torch.int32)

    def append(self, step: Step) -> None:
        super().append(step)
        assert step.hidden is not None
        scores_BKS, score = self.gate(step.hidden()), self.rows["score"]
        for row, (at, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            score[row, :, at : at + count] = scores_BKS[row, :, :count]
        self.add_positions(step)

    def known(self, step: Step, row: int) -> tuple[Tensor, Tensor]:
        """Score and position of a row's residents, ``[K, T]``."""
        score, position = (self.rows[name][row, :, : step.ends[row]] for name in ("score", "position"))
        return score, position


class FastKVzipState(RetentionState):
    """State of retention gates whose scores are in 0..1."""

    method: FastKVzip

    def importance(self, step: Step, row: int) -> Tensor:
        score, position = self.known(step, row)
        return torch.where(position < self.method.first_tokens, 1.0, score)


@dataclass(kw_only=True, eq=False)
class FastKVzip(RetentionMethod):
    """Keep the newest tokens and those with the highest predicted attention (Kim, Han, Yun, arXiv 2601.17668).

    The authors rank the tokens of all layers and KV heads together, so that some heads keep more than others; here all
    KV heads keep equally many. Their code gives the first tokens the highest possible score, and evicts when the
    length of the text is a multiple of 128.

    Attributes:
        token_budget: 4096 in the authors' script for answers of reasoning models.
        window: number of newest tokens that always stay; the gates' ``block_size`` if ``None``, 128 in the authors'
            code.
        first_tokens: number of first tokens of a text, which get the score 1.
    """

    name = "fast_kvzip"
    plot_style = ("#228833", "<")
    state = FastKVzipState
    recent_option = "window"
    token_budget: int = 4096
    window: int | None = None
    first_tokens: int = 4

    def __post_init__(self) -> None:
        self.check_bank()
        if self.window is None:
            self.window = self.bank.config.block_size
        super().__post_init__()
        check_counts(self, first_tokens=0)


class TrimKVState(RetentionState):
    """State of retention gates whose scores are ``log beta``."""

    def importance(self, step: Step, row: int) -> Tensor:
        score, position = self.known(step, row)
        return score * (self.total_tokens(row) + 1 - position)


@dataclass(kw_only=True, eq=False)
class TrimKV(RetentionMethod):
    """Keep the tokens with the highest ``beta ** age`` (Bui et al., arXiv 2512.03324).

    Neither the newest tokens nor the prompt are protected. Ages are those of the authors' code, where the newest token
    has age 2; in their training attention it has age 0. Their caches of one budget for all heads of a layer or model,
    and the factor of the key's norm, are not implemented.

    Attributes:
        token_budget: 1024 in the authors' code, where gates were trained for 512 to 4096.
    """

    name = "trim_kv"
    plot_style = ("#EE6677", ">")
    state = TrimKVState
