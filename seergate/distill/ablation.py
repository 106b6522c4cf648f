"""Ablations: the same run in several variants, compared on the same held-out packs.

A study is a YAML file: ``variants`` maps the name of a variant to the options that make it, ``options`` are those that
all variants share. Each variant is an ordinary run in a directory of its own, so that a study continues like a run.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seergate.distill.callbacks import EvalLog, StepLog
from seergate.distill.config import TrainConfig, load_train_config, read_yaml
from seergate.errors import SeergateError, did_you_mean
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
        raise SeergateError(f"there is no study {name!r}; {did_you_mean(name, known)} (or give a .yaml file)")
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
        if not (config.eval_packs and config.eval_steps):
            raise SeergateError("an ablation compares held-out packs; eval_packs and eval_steps must not be 0")
        name = Path(config.model).name.lower()
        home = Path(root) if root else Path("runs") / f"ablation-{study.name}-{name}"
        directory = re.sub(r"[^a-z0-9]+", "-", variant.lower()).strip("-")
        configs[variant] = replace(config, output_dir=str(home / directory))
    if len({config.run_dir for config in configs.values()}) < len(configs):
        raise SeergateError(f"{study.name} has variants whose names differ in punctuation only")
    return configs


def run_study(study: Study, configs: Mapping[str, TrainConfig]) -> list[Outcome]:
    """Train what is not yet trained, one variant after the other, all at the commits that the study began with.

    Returns:
        The outcomes, in the order of the study.

    Raises:
        SeergateError: if a variant was trained with another commit of a model or dataset, or without an evaluation.
    """
    from seergate.distill import commits
    from seergate.distill.trainer import run_distillation

    outcomes = []
    for number, (variant, asked) in enumerate(configs.items(), start=1):
        print(f"{study.name} {number}/{len(configs)}: {variant}", flush=True)
        # Of several variants at once, only the first may look up the newest commits.
        config, entries = commits.pin(replace(asked, resume=asked.resume or number > 1), asked.run_dir.parent)
        commits.keep(entries, asked.run_dir.parent)
        config = replace(config, resume=asked.resume)
        done = _read(config)
        if done is None:
            run_distillation(config, [_Watch(config)])
            done = _read(config)
        if done is None:
            raise SeergateError(f"{config.run_dir} holds no evaluation; delete it to train the variant again")
        outcomes.append(Outcome(variant, **done))
    return outcomes


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
        """Keep nothing."""

    def on_step(self, log: StepLog) -> None:
        """Keep how long it took."""
        self._seconds.append(log.seconds)

    def on_eval(self, log: EvalLog) -> None:
        """Write the last evaluation, the result, to the disk before the run is over."""
        if log.step < self._config.max_steps:
            return
        steps = sorted(self._seconds[1:]) or [0.0]
        outcome = {"kl": log.kl, "recall": log.mean_recall(), "seconds": steps[len(steps) // 2]}
        draft = self._config.run_dir / f".{RESULT}"
        draft.write_text(json.dumps({"config": self._config.to_dict(), "outcome": outcome}))
        os.replace(draft, self._config.run_dir / RESULT)

    def close(self) -> None:
        """Close nothing."""


def _read(config: TrainConfig) -> dict[str, Any] | None:
    """The outcome of a variant that is trained to the end with these very options."""
    from safetensors import safe_open

    try:
        found = json.loads((config.run_dir / RESULT).read_text())
        with safe_open(config.run_dir / "gate_model.safetensors", "pt") as gates:
            parameters = sum(math.prod(gates.get_slice(name).get_shape()) for name in gates.keys())  # noqa: SIM118
    except (OSError, ValueError):
        return None
    if found["config"] != json.loads(json.dumps(config.to_dict())):
        return None
    recall = {int(budget): share for budget, share in found["outcome"]["recall"].items()}
    return {**found["outcome"], "recall": recall, "parameters": parameters}
