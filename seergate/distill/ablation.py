"""Ablations: the same run in several variants, compared on the same held-out packs.

A study is a YAML file: ``variants`` maps the name of a variant to the options that make it, ``options`` are those that
all variants share. Each variant is an ordinary run in a directory of its own, so that a study continues like a run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seergate.distill.base_model import check_model
from seergate.distill.callbacks import EvalLog, StepLog
from seergate.distill.checkpoint import REVISIONS, at_its_commits, begun, note_commits
from seergate.distill.config import TrainConfig, load_train_config, locate_model, nearest, read_yaml
from seergate.distill.sources import COMMIT, data_commit
from seergate.distill.trainer import run_distillation
from seergate.errors import SeergateError
from seergate.paths import shipped

RESULT = "ablation.json"


@dataclass(frozen=True)
class Study:
    """What varies.

    Attributes:
        name: of the study.
        options: training options of every variant.
        variants: name -> the options that make it, over those of the study and the user's.
    """

    name: str
    options: dict[str, Any]
    variants: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What became of a variant.

    Attributes:
        variant: its name.
        parameters: of all gates.
        kl: nats per row on the held-out packs, at the last step.
        recall: budget in tokens -> mean share of the teacher's mass on the held-out packs.
        seconds: time of a training step, the median.
    """

    variant: str
    parameters: int
    kl: float
    recall: dict[int, float]
    seconds: float


def studies() -> dict[str, Path]:
    """Name -> file, of the studies that ship with seergate."""
    return {path.stem: path for path in sorted((shipped("configs") / "ablations").glob("*.yaml"))}


def load_study(name: str) -> Study:
    """A shipped study, or a YAML file of one's own.

    Raises:
        SeergateError: if there is none, with the nearest one, or the file is no study.
    """
    known = studies()
    path = known.get(name.lower(), Path(name))
    if name.lower() not in known and path.suffix not in (".yaml", ".yml"):
        hint = nearest(name.lower(), list(known)) or f"; there are {', '.join(known)}, or give a .yaml file"
        raise SeergateError(f"there is no study {name!r}{hint}")
    content = read_yaml(path)
    variants, options = content.get("variants"), content.get("options") or {}
    if (
        not isinstance(variants, dict)
        or not all(isinstance(given, dict) and given for given in variants.values())
        or not isinstance(options, dict)
        or content.keys() - {"variants", "options"}
    ):
        raise SeergateError(f"{path} is no study: it must map 'variants' to names, and each name to its options")
    return Study(path.stem, options, {str(variant): given for variant, given in variants.items()})


def variant_configs(study: Study, model: str | None, options: Mapping[str, Any]) -> dict[str, TrainConfig]:
    """The run of every variant, checked: what is wrong with the last one is found before the first one trains.

    Args:
        study: what varies.
        model: preset, directory or Hub id.
        options: training options of the user; ``output_dir`` is the study's directory.
    """
    common = {**study.options, **options}
    root = common.pop("output_dir", None)
    configs = {}
    for variant, given in study.variants.items():
        try:
            config = load_train_config(model, {**common, **given})
        except ValueError as error:
            raise SeergateError(f"the variant {variant!r} of {study.name} cannot run: {error}") from error
        if not (config.eval_packs and config.eval_every):
            raise SeergateError("an ablation compares held-out packs; eval_packs and eval_every must not be 0")
        name = Path(config.model).name.lower()
        home = Path(root) if root else Path("runs") / f"ablation-{study.name}-{name}"
        directory = re.sub(r"[^a-z0-9]+", "-", variant.lower()).strip("-")
        configs[variant] = replace(config, output_dir=str(home / directory))
    if len({config.run_dir for config in configs.values()}) < len(configs):
        raise SeergateError(f"{study.name} has variants whose names differ in punctuation only")
    return configs


def run_study(study: Study, configs: Mapping[str, TrainConfig]) -> list[Outcome]:
    """Train what is not yet trained, one variant after the other, all at the commits that the first one began with.

    Returns:
        The outcomes, in the order of the study.

    Raises:
        SeergateError: if a variant was trained with another commit of a model or dataset, or without an evaluation.
    """
    outcomes, commits = [], _commits(configs)
    for number, (variant, config) in enumerate(configs.items(), start=1):
        print(f"{study.name} {number}/{len(configs)}: {variant}", flush=True)
        done = _read(config)
        if done is None:
            run_distillation(_at_commits(config, commits), [_Watch(config)])
            done = _read(config)
        if done is None:
            raise SeergateError(f"{config.run_dir} holds no evaluation; delete it to train the variant again")
        _add(commits, config, done.pop("commits"))
        outcomes.append(Outcome(variant, **done))
    return outcomes


def _commits(configs: Mapping[str, TrainConfig]) -> dict[str, str | None]:
    """What every place on the Hub is at: what it was for the first variant that has begun, or is now."""
    commits: dict[str, str | None] = {}
    for config in configs.values():
        if done := _read(config):
            known = done["commits"]
        else:
            began, _ = at_its_commits(config, begun(config.run_dir) if config.resume else None)
            known = {name: getattr(began, name) for name in REVISIONS}
        _add(commits, config, {name: at for name, at in known.items() if at and COMMIT.fullmatch(at)})
    for config in configs.values():
        for name, ask in (("revision", _model_commit), ("data_revision", data_commit)):
            if (place := _place(config, name)) not in commits and (commit := ask(config)):
                commits[place] = commit
    return commits


def _add(commits: dict[str, str | None], config: TrainConfig, found: Mapping[str, str | None]) -> None:
    """Note what a variant is trained with, which must be what the others are."""
    for name, commit in found.items():
        expected = commits.setdefault(_place(config, name), commit)
        if commit != expected:
            raise SeergateError(
                f"{config.run_dir} is trained with {name}={commit!r} and the study has {expected!r}; delete it to "
                "train the variant again"
            )


def _at_commits(config: TrainConfig, commits: Mapping[str, str | None]) -> TrainConfig:
    """The run that trains with these commits."""
    at = replace(config, **{name: commits.get(_place(config, name), getattr(config, name)) for name in REVISIONS})
    if not config.resume:
        return at
    if at_its_commits(config, begun(config.run_dir))[0] != at:  # as if it had begun when the study did
        note_commits(config.run_dir, at, {name: getattr(config, name) for name in REVISIONS})
    return config


def _place(config: TrainConfig, name: str) -> str:
    """What one of `REVISIONS` names, before it is a commit."""
    return f"{REVISIONS[name]} {getattr(config, REVISIONS[name])}@{getattr(config, name)}"


def _model_commit(config: TrainConfig) -> str | None:
    path = locate_model(config).model
    return None if Path(path).is_dir() else check_model(path, config)


def table(study: Study, outcomes: list[Outcome]) -> str:
    """The outcomes as Markdown."""
    budgets = sorted({budget for outcome in outcomes for budget in outcome.recall})
    heads = ["variant", "parameters", "held-out KL", *(f"recall at {budget:,}" for budget in budgets), "s/step"]
    rows = [
        [
            outcome.variant,
            f"{outcome.parameters:,}",
            f"{outcome.kl:.4f}",
            *(f"{outcome.recall[b]:.3f}" if b in outcome.recall else "" for b in budgets),
            f"{outcome.seconds:.2f}",
        ]
        for outcome in outcomes
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    line = lambda cells: "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"  # noqa: E731
    text = "\n".join([line(heads), line(["-" * w for w in widths]), *map(line, rows)])
    if any("block_size" in given for given in study.variants.values()):
        text += "\n\nThe KL of different block sizes is over different blocks: compare the recall."
    if any(share == 0 for outcome in outcomes for share in outcome.recall.values()):
        text += "\n\nA budget of one block is the current block, which is always read: nothing is left to recall with."
    return text


class _Watch:
    """Keeps what the table needs of a run; a callback."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._seconds = config, [0.0]

    def on_message(self, text: str) -> None:
        """Nothing to keep."""

    def on_step(self, log: StepLog) -> None:
        """How long it took."""
        self._seconds.append(log.seconds)

    def on_eval(self, log: EvalLog) -> None:
        """The last evaluation is the result; it comes before the run is over, so it is on disk when that is."""
        if log.step < self._config.steps:
            return
        steps = sorted(self._seconds[1:]) or [0.0]
        outcome = {"kl": log.kl, "recall": log.mean_recall(), "seconds": steps[len(steps) // 2]}
        commits = _trained_with(self._config)
        draft = self._config.run_dir / f".{RESULT}"
        draft.write_text(json.dumps({"config": self._config.to_dict(), "commits": commits, "outcome": outcome}))
        os.replace(draft, self._config.run_dir / RESULT)

    def close(self) -> None:
        """Nothing to close."""


def _read(config: TrainConfig) -> dict[str, Any] | None:
    """The outcome of a variant that is trained to the end with these very options."""
    from safetensors import safe_open

    try:
        found = json.loads((config.run_dir / RESULT).read_text())
        with safe_open(config.run_dir / "gate_model.safetensors", "pt") as gates:
            parameters = sum(_count(gates.get_slice(name).get_shape()) for name in gates.keys())  # noqa: SIM118
    except (OSError, ValueError):
        return None
    if found["config"] != json.loads(json.dumps(config.to_dict())):
        return None
    outcome, commits = found["outcome"], found.get("commits") or _trained_with(config)
    recall = {int(k): v for k, v in outcome["recall"].items()}
    return {**outcome, "recall": recall, "parameters": parameters, "commits": commits}


def _trained_with(config: TrainConfig) -> dict[str, str | None]:
    """`REVISIONS` as the run has found them."""
    options = read_yaml(config.run_dir / "train_config.yaml")
    return {name: options.get(name) for name in REVISIONS}


def _count(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
