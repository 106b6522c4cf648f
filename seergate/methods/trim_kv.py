"""TRIM-KV: gates that say how long a token is worth keeping (Bui et al., arXiv 2512.03324)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from seergate.methods.base import Step
from seergate.methods.retention import RetentionMethod, RetentionState


class TrimKVState(RetentionState):
    """State of retention gates whose scores are ``log beta``."""

    def importance(self, step: Step, row: int) -> Tensor:
        score, place = self.known(step, row)
        return score * (self.total_tokens(row) + 1 - place)


@dataclass(kw_only=True, eq=False)
class TrimKV(RetentionMethod):
    """Keep the tokens with the highest ``beta ** age``. Nothing protects the newest tokens, or the prompt.

    Ages count as in the authors' code, in which the newest token is 2 old; in their training attention it is 0. Their
    caches of one budget for all heads of a layer or model, and the factor of the key's norm, are not here.

    Attributes:
        token_budget: 1024 in the authors' code, where gates were trained for 512 to 4096.
    """

    name: ClassVar[str] = "trim_kv"
    plot_style: ClassVar[tuple[str, str] | None] = ("#EE6677", ">")
    state = TrimKVState
