"""Calibration of LazyEviction's window on a model's own answers.

The window comes from the recurrence intervals of attention: the decode steps between those at which a token's
probability under dense attention reached a threshold (recorded by `LazyState`, with a budget under which it evicts
nothing).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from seergate.checks import check, is_number
from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.calibration.calibrator import Calibration, Prompts, answers
from seergate.eval.calibration.matching import EVERYTHING
from seergate.methods import LazyEviction
from seergate.methods.lazy_eviction import LazyState
from seergate.models.attach import attached


@torch.inference_mode()
def measure_recurrence(
    model: PreTrainedModel, prompts: Prompts, *, alpha: float = LazyEviction.alpha, **how: Any
) -> np.ndarray:
    """Answer prompts with dense attention and record when attention returns to each token.

    Args:
        model: a model in eval mode, nothing attached.
        alpha: the attention probability from which a token counts as active.
        **how: see `answers`.

    Returns:
        The maximum recurrence interval (MRI) of each token, layer and KV head, in decode steps; 0 for a token that was
        never active.

    Raises:
        SeergateError: if no token was generated.
    """
    recorder = LazyEviction(token_budget=EVERYTHING, window=EVERYTHING, alpha=alpha)
    mri = list[np.ndarray]()
    with attached(model, recorder):
        for batch in answers(model, prompts, **how):
            for layer in batch.cache.layers:
                state = getattr(layer, "state", None)
                if not isinstance(state, LazyState) or not state.decoded[0]:
                    continue
                resident = layer.rows.resident[0]
                mri.append(state.rows["mri"][0, :, :resident].cpu().numpy().reshape(-1))
    if not mri:
        raise SeergateError("no token was generated, so there is nothing to measure; let the answers be longer")
    return np.concatenate(mri)


def window_of(mri: np.ndarray, share: float) -> int:
    """The MRI that this share of tokens does not exceed, at least 1: LazyEviction's window (section 4)."""
    check("share", share, 0 < share <= 1, "greater than 0 and at most 1")
    return max(1, int(np.quantile(mri, share, method="inverted_cdf")))


@dataclass(frozen=True)
class WindowCalibration(Calibration):
    """Calibrates LazyEviction's window, which is limited to half of the token budget that it is a part of.

    Attributes:
        alpha: see `measure_recurrence`.
        share: share of tokens whose recurrence intervals the window covers; see `window_of`.
    """

    alpha: float = LazyEviction.alpha
    share: float = 0.8

    def __post_init__(self) -> None:
        for name in ("alpha", "share"):
            value = getattr(self, name)
            check(name, value, is_number(value) and 0 < value <= 1, "greater than 0 and at most 1")

    @property
    def file_name(self) -> str:
        return f"lazy_eviction-{self.alpha:g}.json"

    def made(self, path: Path) -> dict[str, Any] | None:
        try:
            record = store.read_json(path)
        except ValueError:
            return None
        return record.get("made", {}) if record and {"alpha", "share", "window"} <= record.keys() else None

    def measure(
        self, model: PreTrainedModel, prompts: Prompts, path: Path, about: Mapping[str, Any], **how: Any
    ) -> list[str]:
        window = window_of(measure_recurrence(model, prompts, alpha=self.alpha, **how), self.share)
        store.write_json(path, {**about, "alpha": self.alpha, "share": self.share, "window": window})
        return [
            f"window {window}: attention comes back to {100 * self.share:g} % of tokens within as many steps: {path}"
        ]

    def value(self, path: Path, token_budget: int | None) -> int:
        window = int((store.read_json(path) or {})["window"])
        return max(1, min(window, (token_budget or 2 * window) // 2))
