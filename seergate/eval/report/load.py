"""Reads run directories. Metrics are derived from the samples, so a report never shows a stale number."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.environment import GRADES_WITH
from seergate.eval.settings import AUTO
from seergate.eval.statistics.intervals import Difference, Estimate, paired, wilson
from seergate.eval.statistics.metrics import by_problem, derive
from seergate.methods import METHODS, CompressingMethod, Method, method_class

SHOWN_ELSEWHERE = ("name", "nominal", "token_budget", "budget_share", "threshold", "block_size", "dense_layers")
"""Options that `Setting.own_options` leaves out: tables or other parts of a series' name show them."""


@dataclass(frozen=True)
class Setting:
    """One run directory.

    Attributes:
        config, proxies: contents of `config.yaml`, and of `proxies.json`, which may be missing.
        metrics: derived from its samples.
        samples: as they were stored.
        series: name in plots and tables: the method, and the options that distinguish it from the method's other runs.
    """

    directory: Path
    config: dict[str, Any]
    metrics: dict[str, Any]
    samples: list[dict[str, Any]] = field(repr=False)
    proxies: dict[str, Any]
    series: str

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.config["method"]["name"])

    @property
    def budget(self) -> int | None:
        """Tokens per KV head and step; ``None`` for methods without a budget."""
        return self._of("token_budget")

    @property
    def label(self) -> str:
        """The series with its budget, share or threshold, for sentences and legends."""
        name = self.series
        if self.budget is not None:
            return f"{name} at {self.budget}"
        if self.share is not None:
            return f"{name}, {100 * self.share:g} % of the context"
        return name if self.threshold is None else f"{name}, threshold {self.threshold:g}"

    @property
    def nominal(self) -> str:
        """The limit on tokens read or held, in words; ``"unknown"`` for a run from before it was recorded."""
        return str(self.config["method"].get("nominal", "unknown"))

    @property
    def evicts(self) -> bool:
        """True if its method evicts or compresses tokens, instead of keeping all and reading a part."""
        return issubclass(self.kind, CompressingMethod)

    @property
    def threshold(self) -> float | None:
        """Threshold on the gate's probabilities, if there is one."""
        return self._of("threshold")

    @property
    def share(self) -> float | None:
        """Share of the context that a step reads, if the budget is given as a share."""
        return self._of("budget_share")

    @property
    def block_size(self) -> int | None:
        """Tokens per block, if the method has blocks."""
        return self._of("block_size")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers that stay dense."""
        return tuple(self._of("dense_layers") or ())

    @property
    def gates(self) -> str | None:
        """Fingerprint of the weights of its gates, if it has any."""
        return (self.config.get("gates") or {}).get("fingerprint")

    def own_options(self) -> dict[str, Any]:
        """The recorded options of its method, except those that are shown elsewhere."""
        elsewhere = {*SHOWN_ELSEWHERE, *(f"gate.{key}" for key in SHOWN_ELSEWHERE if self.kind.shares_blocks)}
        return _without(self.config["method"], *elsewhere)

    @property
    def written(self) -> dict[str, str]:
        """The options in its directory's name, as they were given: of ``h2o-64-interval=8``, ``{"interval": "8"}``."""
        return dict(part.split("=", 1) for part in re.split(r"-(?=\w+=)", self.directory.name)[1:])

    def _of(self, key: str) -> Any:
        """The value of a method's option; if a method that shares blocks does not have it, that of its gate."""
        method = self.config["method"]
        return method.get(key, method.get(f"gate.{key}") if self.kind.shares_blocks else None)

    @property
    def kind(self) -> type[Method]:
        """The class of its method; `Method` if it belongs to a plugin that is not loaded."""
        try:
            return method_class(self.method)
        except SeergateError:
            return Method

    @property
    def accuracy(self) -> Estimate:
        """Accuracy with its standard error."""
        se = self.metrics["accuracy_se"]
        return Estimate(self.metrics["accuracy"], math.nan if se is None else se, self.metrics["n_problems"])

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy."""
        return wilson(self.accuracy, self.metrics["n_samples"])

    @property
    def complete(self) -> bool:
        """True if every problem of the task has all its samples (a task may have fewer problems than requested)."""
        problems = self.config["task"].get("n_problems")
        return problems is not None and self.metrics["n_samples"] >= problems * self.config["generation"]["samples"]

    @property
    def marked(self) -> str:
        """The series for tables, marked as unfinished if samples are missing."""
        return self.series if self.complete else f"{self.series} (unfinished)"

    def identity(self) -> dict[str, Any]:
        """The options that must be equal for settings to be compared: name -> value."""
        config, environment = self.config, self.config.get("environment", {})
        return store.flatten(
            {
                "task": _without(config["task"], "source", "shots_source", "file", "problems"),
                "model": {name: config["model"].get(name) for name in ("fingerprint", "rope")},
                "generation": config["generation"],
                "environment": {name: environment.get(name) for name in GRADES_WITH.values()},
            }
        )


@dataclass(frozen=True)
class Sweep:
    """Comparable settings (equal `Setting.identity`), in the order of `METHODS` and by budget within a method."""

    settings: list[Setting] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the first setting; all settings share the parts in `Setting.identity`."""
        return self.settings[0].config

    @property
    def of_texts(self) -> bool:
        """True if the task scores given texts, so that there are no answers."""
        return "kl" in self.settings[0].metrics

    @property
    def dense(self) -> Setting | None:
        """The dense run with the most samples, if there is one."""
        runs = (s for s in self.settings if s.method == "dense")
        return max(runs, key=lambda s: s.metrics["n_samples"], default=None)

    @property
    def methods(self) -> list[str]:
        """The series that have a budget, in order."""
        return list(dict.fromkeys(s.series for s in self.settings if s.budget is not None))

    @property
    def budgets(self) -> list[int]:
        """All budgets, ascending."""
        return sorted({s.budget for s in self.settings if s.budget is not None})

    @property
    def model(self) -> str:
        """The model's name: the last part of its path or id."""
        return Path(str(self.config["model"]["path"])).name

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.config["task"]["name"])

    @property
    def problems(self) -> str:
        """Number of answered problems, in words: a range where some settings are unfinished."""
        numbers = sorted({s.accuracy.n for s in self.settings})
        if len(numbers) > 1:
            return f"{numbers[0]} to {numbers[-1]} problems"
        return f"{numbers[0]} problem{'s' if numbers[0] != 1 else ''}"

    def of(self, method: str) -> list[Setting]:
        """The settings of a series that have a budget, in ascending order."""
        return [s for s in self.settings if s.series == method and s.budget is not None]

    def role(self, method: str) -> str:
        """A series' `Method.role`."""
        return next(s.kind.role for s in self.settings if s.series == method)

    def at(self, method: str, budget: int) -> Setting | None:
        """A series' setting at a budget, if there is one."""
        return next((s for s in self.of(method) if s.budget == budget), None)

    def having(self, metric: str) -> list[Setting]:
        """The settings for which a metric was measured."""
        return [s for s in self.settings if s.metrics[metric] is not None]

    def difference(self, ours: Setting, baseline: Setting) -> Difference:
        """Paired difference in accuracy, ``ours - baseline``, on the samples that both have; ``nan`` if none."""
        pairs = [{(s["problem_id"], s["sample_idx"]): s for s in setting.samples} for setting in (ours, baseline)]
        common = [
            [s for key, s in side.items() if key in other] for side, other in zip(pairs, pairs[::-1], strict=True)
        ]
        if not common[0]:
            return Difference(math.nan, math.nan, 0)
        return paired(*(by_problem(side, "correct") for side in common))

    def share(self, setting: Setting, metric: str) -> float:
        """A metric in percent of the dense run's, or else of the first run's."""
        return float(100 * setting.metrics[metric] / (self.dense or self.settings[0]).metrics[metric])

    @property
    def proxies_on(self) -> str | None:
        """The setting on whose generations all proxies were measured; ``None`` if unknown, or if windows differ."""
        records = [s.proxies for s in self.having("next_token_kl")]
        same = len({record.get("contexts") for record in records}) == 1
        return records[0].get("reference") if same else None

    @property
    def context(self) -> float:
        """Mean tokens of prompt and answer together, of the dense run or else of the first run."""
        metrics = (self.dense or self.settings[0]).metrics
        return float(metrics["mean_prompt_tokens"] + metrics["mean_tokens"])


def load_setting(directory: Path) -> Setting | None:
    """Read one run directory; ``None`` if it has no finished samples."""
    if not (samples := store.read_samples(directory)):
        return None
    config, proxies = store.read_config(directory), store.read_json(directory / store.PROXIES) or {}
    sections = ("task", "method", "model", "generation")
    if missing := [name for name in sections if not isinstance(config.get(name), dict)]:
        raise SeergateError(f"{directory / store.CONFIG} has no {', '.join(missing)}; it is not from an evaluation")
    metrics = derive(samples, proxies)
    return Setting(directory, config, metrics, samples, proxies, series=str(config["method"]["name"]))


def load_sweeps(*roots: str | os.PathLike[str]) -> list[Sweep]:
    """Read runs, given as run directories or directories of them, and group them into comparable sweeps.

    Raises:
        SeergateError: if no run has finished samples, a run is damaged, or two are runs of the same setting.
    """
    paths: dict[Path, Path] = {}
    for root in roots:
        for path in store.run_directories(Path(root)):
            paths.setdefault(path.resolve(), path)  # a run may be given twice
    started = [setting for path in paths.values() if (setting := load_setting(path)) is not None]
    if not started:
        raise SeergateError(f"{', '.join(map(str, roots))} holds no runs with finished samples")
    groups = grouped(started, lambda setting: repr(setting.identity()))
    return [Sweep(sorted(_named(settings), key=_rank)) for settings in groups.values()]


def grouped(settings: Iterable[Setting], key: Callable[[Setting], Any]) -> dict[Any, list[Setting]]:
    """Key -> its settings, in order."""
    groups: dict[Any, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(key(setting), []).append(setting)
    return groups


def apart(sweeps: list[Sweep]) -> list[dict[str, Any]]:
    """For each sweep, its values of the options in which the sweeps differ: name -> value."""
    identities = [sweep.settings[0].identity() for sweep in sweeps]
    names = dict.fromkeys(name for own in identities for name in own)
    different = [name for name in names if len({repr(own.get(name)) for own in identities}) > 1]
    return [{name: own.get(name, "not recorded") for name in different} for own in identities]


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _named(settings: list[Setting]) -> list[Setting]:
    """Name the series: the method, and its block size, gates, dense layers and options if the method has several."""
    named = []
    for setting in settings:
        same = [s for s in settings if s.method == setting.method]
        name = setting.method
        if len({s.block_size for s in same}) > 1 and setting.block_size is not None:
            name += f" b{setting.block_size}"
        size = _gated_size(setting)
        rivals = {s.gates: s.config["gates"].get("name") for s in same if s.gates and _gated_size(s) == size}
        if len(rivals) > 1 and setting.gates:  # gates of the same block size
            given = rivals[setting.gates]
            named_apart = given and list(rivals.values()).count(given) == 1
            digits = next((n for n in range(4, 64) if len({f[:n] for f in rivals}) == len(rivals)), 64)
            name += f" [{given if named_apart else setting.gates[:digits]}]"
        if len({s.dense_layers for s in same}) > 1:
            layers = ",".join(map(str, setting.dense_layers))
            name += f", layers {layers} dense" if layers else ", all sparse"
        for key in _distinguishing(same):
            value = setting.config["method"].get(key)
            value = AUTO if setting.written.get(key) == AUTO else value
            if value is not None and value != []:
                text = "+".join(map(str, value)) if isinstance(value, list) else str(value).split(",", 1)[0]
                name += f", {key}={text}"
        named.append(replace(setting, series=name))
    seen: dict[Any, Setting] = {}
    for s in named:
        first = seen.setdefault((s.series, s.budget, s.share, s.threshold, s.gates), s)
        if first is not s and s.method != "dense":
            raise SeergateError(
                f"{first.directory} and {s.directory} are runs of the same setting; report on one of them"
            )
    return named


def _gated_size(setting: Setting) -> int | None:
    """Tokens per block of a setting's gates, if it has any; the method's own blocks may differ."""
    return setting.config["method"].get("gate.block_size", setting.block_size)


def _distinguishing(settings: list[Setting]) -> list[str]:
    """The options in which settings of one method differ although the rest of their names is the same. Those that were
    calibrated for each budget (``auto``) are not among them.
    """
    differing: dict[str, None] = {}
    for group in grouped(settings, lambda s: (s.budget, s.share, s.threshold, s.block_size, s.dense_layers)).values():
        options = [s.own_options() for s in group]
        keys = dict.fromkeys(key for own in options for key in own)
        differing |= dict.fromkeys(key for key in keys if len({repr(own.get(key)) for own in options}) > 1)
    for group in grouped(settings, lambda s: (s.block_size, s.dense_layers)).values():  # at any budgets, as of --match
        for key in dict.fromkeys(key for s in group for key in s.written):
            if len({s.written.get(key) for s in group}) > 1:
                names = key, f"gate.{'token_budget' if key == 'read_budget' else key}"
                differing |= {
                    name: None for name in names if len({repr(s.own_options().get(name)) for s in group}) > 1
                }
    return list(differing)


def _rank(setting: Setting) -> tuple[Any, ...]:
    name = setting.method.partition("+")[0]
    method_index = list(METHODS).index(name) if name in METHODS and METHODS[name].plot_style else len(METHODS)
    limits = setting.budget or 10**9, setting.share or 0.0, setting.threshold or 0.0
    rest = setting.block_size or 0, setting.dense_layers, *limits
    return method_index, setting.method, *rest, setting.metrics.get("own_bytes_mean") or 0.0
