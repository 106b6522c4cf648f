"""LazyEviction: keep tokens whose attention is expected to recur (Zhang et al., arXiv 2506.15969)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from seergate.checks import check_choice, check_counts, check_flags, check_share
from seergate.methods.base import LayerSpec, Step
from seergate.methods.evicting import BudgetedMethod, BudgetedState
from seergate.methods.scoring import reduced


class LazyState(BudgetedState):
    """``active``: the decode step of a resident's last activation; ``mri``: its maximum recurrence interval. Both
    int32 ``[B, K, T]``.
    """

    method: LazyEviction
    reads_all_keys = True

    def __init__(self, spec: LayerSpec, method: LazyEviction) -> None:
        super().__init__(spec, method)
        for name in ("active", "mri"):
            self.add_per_token(name, torch.int32)

    def due(self, row: int, held: int) -> bool:
        return self.decoded[row] > 0 and super().due(row, held)

    def observe_attention(self, step: Step) -> None:
        """Update the recurrence intervals (equation 1)."""
        p_BKGT = step.p_BKGT
        assert p_BKGT is not None
        resident, device = step.max_length, p_BKGT.device
        active, mri = (self.rows[name][:, :, :resident] for name in ("active", "mri"))
        now = torch.tensor(self.decoded, dtype=torch.int32, device=device)[:, None, None]
        slots = torch.arange(resident, device=device)
        new = slots == torch.tensor(step.starts, device=device)[:, None, None]
        active.copy_(torch.where(new, (now - 1).clamp(min=0), active))  # active at the previous step
        mri.masked_fill_(new, 0)
        hit = (reduced(p_BKGT, self.method.group_reduction, 2) >= self.method.alpha) & (now > 0)
        mri.copy_(torch.where(hit, torch.maximum(mri, now - active), mri))
        active.copy_(torch.where(hit, now, active))

    def importance(self, step: Step, row: int) -> Tensor:
        active, mri = (self.rows[name][row, :, : step.ends[row]].double() for name in ("active", "mri"))
        method = self.method
        h1 = method.h1 if method.use_h1 else None
        return recurrence_score(self.decoded[row] - active, mri, method.use_h2, h1)


@dataclass(kw_only=True)
class LazyEviction(BudgetedMethod):
    """Every ``window`` decode steps keep the last ``window`` tokens and those whose attention is likely to recur.

    A token is active at a step if its attention probability is at least ``alpha``. Its maximum recurrence interval
    (MRI) is the longest time between two of its activations so far. The score is high while the time since the last
    activation is short compared with the MRI (the paper's H1), and if the MRI is small (H2).

    The paper's code is followed where its text is ambiguous: H1 is ``2 / (1 + exp(1 + elapsed / MRI))``, so at most
    0.54 (``h1``). The code has a cache and a state per query head, in half precision; here a token is active for a KV
    head if it is for the group, and times are integers. The prompt is not protected, and a prompt longer than the
    budget stays whole until the first multiple of ``window``.

    Attributes:
        token_budget: 1492 in the authors' scripts for MATH-500 and a Qwen model.
        window: steps between evictions, and number of recent tokens that always stay (the paper's W): the 80th
            percentile of MRI (``seergate calibrate``), 175 for MATH-500 and a Qwen model.
        alpha: probability from which a token is active; 1e-4 for Qwen models, 5e-4 for Llama models.
        use_h1, use_h2: whether each term counts. The paper has both; on GSM8K it loses 4 to 6 points without H1 and
            about one without H2 (Table 4).
        h1: ``"capped"``: as in the authors' code, at most 0.54; ``"full"``: ``2 / (1 + exp(elapsed / MRI))``, which
            covers 0 to 1, the range of both terms in appendix D of the paper, and weighs more against H2.
        group_reduction: ``"max"`` or ``"mean"`` of the probabilities of a group.
    """

    name = "lazy_eviction"
    state = LazyState
    plot_style = ("#44AA99", "d")
    calibrates: ClassVar[Mapping[str, str]] = {"window": "seergate.eval.calibration.recurrence:WindowCalibration"}
    periodic = True
    recent_option = "window"
    chunked_prefill = True
    token_budget: int = 1492
    window: int = 175
    interval: int = field(init=False, default=1)
    alpha: float = 1e-4
    use_h1: bool = True
    use_h2: bool = True
    h1: str = "capped"
    group_reduction: str = "max"

    def __post_init__(self) -> None:
        check_counts(self, window=1)
        self.interval = self.window
        super().__post_init__()
        check_share(self, "alpha")
        check_flags(self, "use_h1", "use_h2")
        if not (self.use_h1 or self.use_h2):
            raise ValueError("use_h1 and use_h2 are both False; without either there is nothing to rank tokens by")
        check_choice(self, h1=("capped", "full"), group_reduction=("max", "mean"))


def recurrence_score(elapsed: Tensor, mri: Tensor, use_h2: bool = True, h1: str | None = "capped") -> Tensor:
    """H1 + H2 of LazyEviction for ``elapsed`` steps since the last activation and maximum recurrence intervals
    ``mri``; without H1 if ``h1`` is ``None``.
    """
    score = torch.zeros_like(mri)
    if h1 is not None:
        overdue = elapsed / (mri + 1e-5)
        score = score + 2 * torch.sigmoid(-1 - overdue if h1 == "capped" else -overdue)
    return score + torch.where(mri == 0, 0, 2 * torch.sigmoid(1 - mri)) if use_h2 else score
