"""Reads run directories back. Figures are derived anew from the samples, so a report never shows a stale number."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.metrics import by_problem, derive
from seergate.eval.stats import Estimate, clustered, paired, wilson

ORDER = ("dense", "oracle", "gate", "quest", "streaming_llm", "random")
"""Methods are listed in this order; others follow by name."""


@dataclass(frozen=True)
class Setting:
    """One run directory.

    Attributes:
        directory: where it lies.
        config: its `config.yaml`.
        metrics: derived from its samples.
        correct: problem -> 0 or 1 of each sample.
    """

    directory: Path
    config: dict[str, Any]
    metrics: dict[str, Any]
    correct: dict[str, list[float]]
    proxies: dict[str, Any] | None = None

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.config["method"]["name"])

    @property
    def budget(self) -> int | None:
        """Tokens per KV head and step; ``None`` for dense."""
        return self.config["method"].get("token_budget")

    @property
    def label(self) -> str:
        """For tables and sentences."""
        return self.method if self.budget is None else f"{self.method} at {self.budget}"

    @property
    def accuracy(self) -> Estimate:
        """Accuracy with its standard error."""
        return clustered(self.correct)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy."""
        return wilson(self.accuracy)

    @property
    def complete(self) -> bool:
        """Whether no sample is missing."""
        wanted = self.config["task"].get("problems")
        samples = self.config["generation"]["samples"]
        return wanted is None or self.metrics["n_samples"] >= wanted * samples


@dataclass(frozen=True)
class Sweep:
    """Settings that can be compared: one task, one model, one way of generating.

    Attributes:
        settings: in the order of `ORDER`, by budget within a method.
    """

    settings: list[Setting] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """What all settings share (``task``, ``model``, ``generation``, ``environment``)."""
        return self.settings[0].config

    @property
    def dense(self) -> Setting | None:
        """The dense run, if there is one."""
        return next((s for s in self.settings if s.method == "dense"), None)

    @property
    def methods(self) -> list[str]:
        """The methods that have a budget, in order."""
        return list(dict.fromkeys(s.method for s in self.settings if s.budget is not None))

    @property
    def budgets(self) -> list[int]:
        """All budgets, ascending."""
        return sorted({s.budget for s in self.settings if s.budget is not None})

    def of(self, method: str) -> list[Setting]:
        """A method's settings by budget."""
        return [s for s in self.settings if s.method == method and s.budget is not None]

    def at(self, method: str, budget: int) -> Setting | None:
        """One setting."""
        return next((s for s in self.settings if (s.method, s.budget) == (method, budget)), None)

    def difference(self, ours: Setting, baseline: Setting) -> Estimate:
        """Paired difference of the accuracies."""
        return paired(ours.correct, baseline.correct)

    @property
    def context(self) -> float:
        """Mean length of prompt and answer of the dense run (of the first run, without one)."""
        metrics = (self.dense or self.settings[0]).metrics
        return float(metrics["mean_prompt_tokens"] + metrics["mean_tokens"])


def load_setting(directory: Path) -> Setting:
    """Read one run directory.

    Raises:
        SeergateError: if it is damaged or has no samples yet.
    """
    config = store.read_config(directory)
    missing = {"task", "method", "model", "generation"} - set(config)
    if missing:
        raise SeergateError(
            f"{directory / store.CONFIG} has no {', '.join(sorted(missing))}; it is not from an evaluation"
        )
    samples = store.read_samples(directory)
    if not samples:
        raise SeergateError(f"{directory} has no finished samples yet")
    proxies = store.read_json(directory / store.PROXIES)
    return Setting(directory, config, derive(samples, proxies), by_problem(samples, lambda s: s["correct"]), proxies)


def load_sweeps(root: Path) -> list[Sweep]:
    """All runs under a directory (or the one that it is), grouped into what can be compared.

    Raises:
        SeergateError: if there is none, or one is damaged.
    """
    if not root.is_dir():
        raise SeergateError(f"the run directory {root} does not exist")
    own = [root] if (root / store.CONFIG).is_file() and (root / store.SAMPLES).is_file() else []
    found = own or sorted(path.parent for path in root.glob(f"*/{store.SAMPLES}"))
    started = [path for path in found if store.read_samples(path)]
    if not started:
        raise SeergateError(f"{root} holds no runs with finished samples; `seergate eval --out {root} ...` makes some")
    groups: dict[str, list[Setting]] = {}
    for path in started:
        setting = load_setting(path)
        config = setting.config
        shared = {
            "task": {name: value for name, value in config["task"].items() if name not in ("source", "file")},
            "model": config["model"].get("fingerprint", config["model"].get("path")),
            "generation": config["generation"],
        }
        groups.setdefault(repr(store.flatten(shared)), []).append(setting)
    return [Sweep(sorted(settings, key=_rank)) for settings in groups.values()]


def _rank(setting: Setting) -> tuple[int, str, int]:
    known = ORDER.index(setting.method) if setting.method in ORDER else len(ORDER)
    return known, setting.method, setting.budget or 0
