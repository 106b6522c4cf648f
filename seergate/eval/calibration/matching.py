"""Search for the budgets at which methods take equal bytes: resident bytes, or bytes read per step.

A token budget of 1024 means something different for each method. Here a budget of C stands for the bytes of C tokens
of the dense cache, and each method gets the token budget (or other `Method.budget_option`) whose bytes come nearest;
with ``gate:budget_share=auto`` and ``gate:threshold=auto`` it gets a share or a threshold (`Method.searched_values`).
Bytes are measured, not computed: a dense answer of average length is replayed token by token under each setting. A
method whose bytes do not depend on a budget (``kv4bit``), or that is given its own budget
(``quest:token_budget=256``), runs unchanged, and its bytes are a further target for the other methods.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval.generation.batch import Batch
from seergate.eval.generation.costs import RowStats
from seergate.eval.settings import Banks, MethodSpec, limits_of
from seergate.eval.tasks.prompts import encode
from seergate.methods import Dense, LongPromptWarning, method_class
from seergate.methods.registry import reading_class
from seergate.models.attach import attached
from seergate.models.gate_bank import GateBank
from seergate.progress import working

MEASURES = {"resident": "own_bytes_mean", "read": "bytes_read_per_step"}
"""Quantity that can be made equal -> its name in `RowStats.of`. Neither depends on the batch of the sample."""

EVERYTHING = 2**30
"""A token budget larger than any text. In a setting it stands for a budget that is still to be found."""

TOKEN = "a token of the dense cache"
"""Key of `Replay.known` for the bytes of one token of the dense cache."""

CLOSE, FAR = 0.01, 0.10
"""Relative distances to a target: within ``CLOSE`` the search ends; beyond ``FAR`` a setting is not run."""


def record_path(directory: Path, measure: str) -> Path:
    """The file in which a sweep stores measurements and matches."""
    return directory / f"matching-{measure}.json"


def replayed(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sample whose answer is nearest to average length."""
    mean = sum(s["n_tokens"] for s in samples) / len(samples)
    return min(samples, key=lambda s: (abs(s["n_tokens"] - mean), str(s["problem_id"]), s["sample_idx"]))


@dataclass
class Replay:
    """One answer of dense attention, whose tokens are decoded again under any method to measure its bytes.

    Args:
        model: a model in eval mode, nothing attached.
        sample: the answer: the sample of the dense run that `replayed` chooses.
        figure: the measured quantity, a value of `MEASURES`.
        known: earlier measurements on the same answer and model; new ones are added.
        on_measured: called after each new measurement.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sample: dict[str, Any]
    figure: str
    known: dict[str, float] = field(default_factory=dict)
    on_measured: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        self.prompt = encode(self.tokenizer, self.sample["prompt"])
        self.answer = list(self.tokenizer(self.sample["completion"], add_special_tokens=False)["input_ids"])
        if not self.answer:
            raise SeergateError("dense answered nothing, so there is nothing to compare bytes on")

    @torch.inference_mode()
    def bytes(self, spec: MethodSpec, bank: GateBank | None) -> float:
        """Measured bytes that a setting holds, or reads per step, while it decodes the answer."""
        method = spec.method(bank)
        key = repr((method, spec.correction, spec.weights(bank)))
        if key not in self.known:
            with (
                working(f"measuring the bytes of {spec.label}"),
                warnings.catch_warnings(),
                attached(self.model, method, correction=spec.correction) as handle,
            ):
                warnings.simplefilter("ignore", LongPromptWarning)  # budgets that are only tried; the run itself warns
                stats = handle.count_with(RowStats)
                batch = Batch(self.model)
                batch.add([self.prompt])
                stats.add_rows(1)
                for token in self.answer:
                    batch.step([token])
                self.known[key] = float(stats.of(0)[self.figure])
            if self.on_measured is not None:
                self.on_measured()
        return self.known[key]

    def bytes_per_token(self) -> float:
        """Bytes of one token of the dense cache, keys and values of all layers."""
        if TOKEN not in self.known:
            with attached(self.model, Dense()) as handle, torch.inference_mode():
                batch = Batch(self.model)
                batch.add([self.prompt])
                batch.step(self.answer[:1])
                layers = handle.stats_.layers.values()
                self.known[TOKEN] = float(sum(stats.bytes_per_token * stats.heads for stats in layers))
        return self.known[TOKEN]


def distinct(specs: Sequence[MethodSpec]) -> list[MethodSpec]:
    """One setting per method and choice of options, ignoring token budgets that are to be found."""
    unique: dict[str, MethodSpec] = {}
    for spec in specs:
        bare = replace(spec, token_budget=EVERYTHING) if budget_option_of(spec) == "token_budget" else spec
        unique.setdefault(bare.label, bare)
    return list(unique.values())


def budget_option_of(spec: MethodSpec) -> str | None:
    """The option to vary so that the method takes more or fewer bytes; ``None`` if it has none, or it is given."""
    option, limits = method_class(spec.name).budget_option, limits_of(spec.name)
    for searched in reading_class(spec.name).searched_values().keys() & limits & set(spec.uncalibrated):
        return searched
    if option != "token_budget":
        return None if option in spec.options else option
    return None if spec.own_budget or option not in limits or limits & set(spec.options) else option


def with_budget(spec: MethodSpec, budget_option: str, value: float) -> MethodSpec:
    """The setting with its budget option set to a value."""
    if budget_option == "token_budget":
        return replace(spec, token_budget=int(value))
    return replace(spec, options={**spec.options, budget_option: value})


def nearest(values: Sequence[float], measure: Callable[[float], float], target: float) -> float:
    """The value whose measure is nearest to a target, or within `CLOSE` of it; measures of ``values`` must ascend."""
    low, high = 0, len(values) - 1
    at_low, at_high = measure(values[low]), measure(values[high])
    while high - low > 1 and at_low < target < at_high:
        share = (target - at_low) / (at_high - at_low)
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        measured = measure(values[middle])
        if abs(measured - target) <= CLOSE * target:
            return values[middle]
        if measured <= target:
            low, at_low = middle, measured
        else:
            high, at_high = middle, measured
    return values[low] if abs(at_low - target) <= abs(at_high - target) else values[high]


def match(
    replay: Replay,
    specs: Sequence[MethodSpec],
    budgets: Sequence[int],
    *,
    prepare: Callable[[MethodSpec], MethodSpec],
    banks: Banks,
) -> tuple[list[MethodSpec], list[dict[str, Any]]]:
    """Find the settings that take equal bytes on a replayed answer, print and record the matches.

    Args:
        specs: one per method; their token budgets are ignored.
        budgets: budgets in tokens of the dense cache.
        prepare: calibrates a setting.

    Returns:
        The settings, without repetition, and one record per target and method: ``target`` (its name),
        ``target_bytes``, ``method`` (with its options), ``label``, ``knob``, ``value``, ``bytes`` (of the replay) and
        ``matched``.
    """
    per_token, length = replay.bytes_per_token(), len(replay.prompt) + len(replay.answer)
    targets = {f"{budget} tokens": budget * per_token for budget in sorted(budgets)}
    chosen, records = [spec for spec in specs if budget_option_of(spec) is None], list[dict[str, Any]]()
    targets |= {s.label: replay.bytes(prepare(s), s.bank(banks)) for s in chosen if s.name != Dense.name}
    for spec in specs:
        if (budget_option := budget_option_of(spec)) is None:
            continue
        values = _values(spec, budget_option, length, prepare, spec.bank(banks))
        method = spec.label.replace(f"-{EVERYTHING}", "", 1)

        def measure(value: float, spec: MethodSpec = spec, budget_option: str = budget_option) -> float:
            return replay.bytes(prepare(with_budget(spec, budget_option, value)), spec.bank(banks))

        outcomes = []
        for name, target in targets.items():
            value = nearest(values, measure, target)
            measured, setting = measure(value), with_budget(spec, budget_option, value)
            matched = abs(measured - target) <= FAR * target
            if matched and setting not in chosen:
                chosen.append(setting)
            outcomes.append(f"{name}: {value if matched else 'not possible'} ({100 * (measured / target - 1):+.0f} %)")
            records.append(
                {
                    "target": name,
                    "target_bytes": target,
                    "method": method,
                    "label": setting.label if matched else method,
                    "knob": budget_option,
                    "value": value,
                    "bytes": measured,
                    "matched": matched,
                }
            )
        print(f"{method}, {budget_option} for {'; '.join(outcomes)}")
    return chosen, records


def _values(
    spec: MethodSpec,
    budget_option: str,
    length: int,
    prepare: Callable[[MethodSpec], MethodSpec],
    bank: GateBank | None,
) -> list[float]:
    """Values of the budget option that the method accepts, from fewest bytes to most."""

    def accepted(value: float) -> bool:
        try:
            prepare(with_budget(spec, budget_option, value)).method(bank)
        except ValueError:
            return False
        return True

    gates = bank.config if bank is not None and spec.has_gates else None
    own = spec.options.get("block_size") or spec.block_size or getattr(method_class(spec.name), "block_size", None)
    step = own or 1 if gates is None else 1 if gates.retention else gates.block_size
    searched_values = reading_class(spec.name).searched_values()
    values = searched_values.get(budget_option) or method_class(spec.name).budget_values(length, step)
    if not (accepted_values := list(dropwhile(lambda value: not accepted(value), values))):
        option = budget_option.replace("_", " ")
        raise SeergateError(
            f"the method {spec.name!r} takes no {option} of up to {max(values)} with these options; make them smaller"
        )
    return accepted_values
