"""Recurrence of attention to tokens: LazyEviction's recurrence intervals, RaaS's milestone and phoenix tokens.

Both are derived from the decode steps at which a token's probability under dense attention reached a threshold, for
every token, layer and KV head (recorded by `LazyState`, with a budget under which it evicts nothing).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from seergate.checks import check, is_number
from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.calibration.calibrator import Calibration, Prompts
from seergate.eval.generation.engine import Batch
from seergate.eval.sampling import SampledRow, Sampling, TokenChooser
from seergate.fingerprint import fingerprint
from seergate.methods import LazyEviction
from seergate.methods.lazy_eviction import LazyState
from seergate.methods.tri_attention import Centres, QueryCentres
from seergate.models.attach import attached

_EVERYTHING = 2**30
"""A token budget that nothing exceeds."""


@dataclass(frozen=True)
class Recurrence:
    """Recurrence statistics; the arrays ``[N]`` have one entry per token, layer and KV head of the measured answers.

    Attributes:
        mri: maximum recurrence interval, in decode steps; 0 for a token that was never active.
        elapsed: decode steps from the last activation (or birth) to the end of the answer.
        in_prompt: whether the token belongs to the prompt.
        alpha: the attention probability from which a token counts as active.
    """

    mri: np.ndarray
    elapsed: np.ndarray
    in_prompt: np.ndarray
    alpha: float

    def window(self, share: float = 0.8) -> int:
        """The MRI that this share of tokens does not exceed, at least 1: LazyEviction's window (section 4)."""
        check("share", share, 0 < share <= 1, "greater than 0 and at most 1")
        return max(1, int(np.quantile(self.mri, share, method="inverted_cdf")))

    def recurring(self) -> float:
        """Share of tokens to which attention came back after more than one step (LazyEviction, Figure 3c)."""
        return float((self.mri > 1).mean())

    def kinds(self, token_budget: int) -> dict[str, dict[str, float]]:
        """Shares of RaaS's kinds of tokens, among prompt tokens and among generated tokens (RaaS, section 3.1).

        Every step adds a token, so a cache of ``token_budget`` tokens that evicts the least recently used one has
        evicted every token that was not used for ``token_budget`` steps.

        Returns:
            For ``"prompt"`` and ``"generated"`` the shares of ``"phoenix"`` (evicted, and then used again),
            ``"milestone"`` (used, then not any more for at least ``token_budget`` steps), ``"lasting"`` (in use at the
            end) and ``"idle"`` (never active). They sum to 1.
        """
        phoenix = self.mri >= token_budget
        idle = self.mri == 0
        milestone = ~phoenix & ~idle & (self.elapsed >= token_budget)
        lasting = ~phoenix & ~idle & ~milestone
        shares = {}
        for name, part in (("prompt", self.in_prompt), ("generated", ~self.in_prompt)):
            kinds = {"phoenix": phoenix, "milestone": milestone, "lasting": lasting, "idle": idle}
            shares[name] = {kind: float(those[part].mean()) if part.any() else 0.0 for kind, those in kinds.items()}
        return shares

    def histogram(self) -> dict[int, int]:
        """Number of tokens with each MRI."""
        values, counts = np.unique(self.mri, return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))


@torch.inference_mode()
def measure_recurrence(
    model: PreTrainedModel,
    prompts: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    alpha: float = 1e-4,
    sampling: Sampling | None = None,
    ends: Collection[int] = (),
) -> Recurrence:
    """Answer prompts with dense attention and record when attention returns to each token.

    Args:
        model: a model in eval mode, nothing attached.
        alpha: see `Recurrence`; the default is LazyEviction's.
        sampling: how tokens are chosen; greedy if ``None``, as in the paper.
        ends: ids of the tokens that end an answer.

    Raises:
        SeergateError: if no token was generated.
    """
    recorder = LazyEviction(token_budget=_EVERYTHING, window=_EVERYTHING, alpha=alpha)
    mri, elapsed, in_prompt = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    with attached(model, recorder):
        for batch in answers(model, prompts, max_new_tokens, sampling, ends):
            for layer in batch.cache.layers:
                state = getattr(layer, "state", None)
                if not isinstance(state, LazyState) or not state.decoded[0]:
                    continue
                resident = layer.rows.resident[0]
                mri_KT, active_KT = (state.rows[name][0, :, :resident].cpu().numpy() for name in ("mri", "active"))
                mri.append(mri_KT.reshape(-1))
                elapsed.append((state.decoded[0] - active_KT).reshape(-1))
                in_prompt.append(np.broadcast_to(np.arange(resident) < state.prompts[0], mri_KT.shape).reshape(-1))
    if not mri:
        raise SeergateError("no token was generated, so there is nothing to measure; let the answers be longer")
    return Recurrence(np.concatenate(mri), np.concatenate(elapsed), np.concatenate(in_prompt), alpha)


@torch.inference_mode()
def query_centres(
    model: PreTrainedModel,
    prompts: Iterable[Sequence[int]],
    *,
    max_new_tokens: int = 1,
    sampling: Sampling | None = None,
    ends: Collection[int] = (),
    made: dict[str, Any] | None = None,
) -> Centres:
    """Calibrate TriAttention: the mean queries of a model over prompts and the beginnings of its answers.

    Args:
        model, sampling, ends: see `measure_recurrence`.
        prompts: token ids of any text; about 32 thousand tokens in all in the authors' runs.
        made: conditions to store with the centres; the model's fingerprint if ``None``.
    """
    recorder = QueryCentres()
    with attached(model, recorder):
        for _ in answers(model, prompts, max_new_tokens, sampling, ends):
            pass
    return replace(recorder.centres(), made={"model": fingerprint(model)} if made is None else made)


def answers(
    model: PreTrainedModel,
    prompts: Iterable[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None,
    ends: Collection[int],
) -> Iterator[Batch]:
    """Answer prompts one by one and yield each finished answer's batch of one row. See `measure_recurrence`."""
    choose = TokenChooser(sampling or Sampling())
    for number, ids in enumerate(prompts):
        row, batch = SampledRow(list(ids), number), Batch(model)
        logits = batch.add([ids])
        while len(row.tokens) < max_new_tokens:
            row.tokens += choose(logits, [row])
            if row.tokens[-1] in ends or len(row.tokens) == max_new_tokens:
                break
            logits = batch.step(row.tokens[-1:])
        yield batch


@dataclass(frozen=True)
class WindowCalibration(Calibration):
    """Calibrates LazyEviction's window, which is limited to half of the token budget that it is a part of.

    Attributes:
        alpha: see `Recurrence`.
        share: share of tokens whose recurrence intervals the window covers; see `Recurrence.window`.
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
        return record.get("made", {}) if record and "window" in record else None

    def measure(
        self, model: PreTrainedModel, prompts: Prompts, path: Path, about: Mapping[str, Any], **how: Any
    ) -> list[str]:
        window = measure_recurrence(model, prompts, alpha=self.alpha, **how).window(self.share)
        store.write_json(path, {**about, "alpha": self.alpha, "share": self.share, "window": window})
        return [
            f"window {window}: attention comes back to {100 * self.share:g} % of tokens within as many steps: {path}"
        ]

    def value(self, path: Path, token_budget: int | None) -> int:
        window = int((store.read_json(path) or {})["window"])
        return max(1, min(window, (token_budget or 2 * window) // 2))


@dataclass(frozen=True)
class CentresCalibration(Calibration):
    """Calibrates TriAttention's centres."""

    @property
    def file_name(self) -> str:
        return "tri_attention.safetensors"

    def made(self, path: Path) -> dict[str, Any] | None:
        try:
            return Centres.load(path).made
        except SeergateError:
            return None

    def measure(
        self, model: PreTrainedModel, prompts: Prompts, path: Path, about: Mapping[str, Any], **how: Any
    ) -> list[str]:
        centres = query_centres(model, prompts, made=about["made"], **how)
        centres.save(path)
        return [f"centres of {len(centres.mean)} layers from {centres.tokens} tokens: {path}"]
