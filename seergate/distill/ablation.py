"""Ablations: several variants of a run, compared on the same held-out packs.

A study is a YAML file: ``variants`` maps the name of each variant to its options, and ``options`` holds the options
that all variants share. Each variant is an ordinary run in its own directory, so an interrupted study can be resumed.
The frozen model computes each pack once for all variants.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seergate.config import is_retention
from seergate.distill.config import TrainConfig, load_train_config, overridden
from seergate.errors import SeergateError, did_you_mean
from seergate.escaping import markdown_text
from seergate.eval.report.tables import markdown
from seergate.paths import model_name, shipped
from seergate.yaml_file import read_yaml

NOTES = {
    ("block_size",): "The KL of different block sizes is over different blocks: compare the recall.",
    ("target", "target_budget"): (
        "KL and recall are measured against a variant's own target: compare the gates by decoding."
    ),
    ("scorer",): "Retention gates have other losses: compare them by decoding.",
    (
        *("seed", "data", "data_config", "data_split", "data_column", "data_revision", "data_limit", "over_length"),
        *("chain_sum_variables", "chat_template", "model", "max_length", "eval_packs", "block_size", "sink_blocks"),
    ): "The held-out packs of the variants may differ.",
    ("anchors",): "KL and recall are means over the gated layers, which differ.",
    ("row_start",): "Without eval_row_start, variants with another row_start are evaluated on other rows.",
    ("row_stride", "eval_row_start"): "The variants are evaluated on other rows.",
}
"""Options in which variants differ -> what then limits the comparison."""

DIVERGED = ("", "", "diverged")
"""Cells of a variant without gates, instead of parameters, tokens and KL."""


@dataclass(frozen=True)
class Study:
    """A study: its name and the options of its runs.

    Attributes:
        options: training options of all variants.
        variants: name of a variant -> its options, which override those of the study and of the user.
    """

    name: str
    options: dict[str, Any]
    variants: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """Result of a variant.

    Attributes:
        parameters, tokens: number of the gates' parameters, and of training tokens.
            Both are 0 if the variant diverged.
        kl: KL on the held-out packs after the last step, in nats per row; NaN if it is not finite.
        recall: token budget -> mean recall of the teacher's attention mass on the held-out packs.
    """

    variant: str
    parameters: int
    tokens: int
    kl: float
    recall: dict[int, float]


def studies() -> dict[str, Path]:
    """Return the studies that ship with seergate: name -> file."""
    return {path.stem: path for path in sorted((shipped("configs") / "ablations").glob("*.yaml"))}


def load_study(name: str) -> Study:
    """Load a study that ships with seergate, or a YAML file of the user; raises `SeergateError` if it is neither."""
    study_files = studies()
    path = study_files.get(name.lower(), Path(name))
    if name.lower() not in study_files and path.suffix not in (".yaml", ".yml"):
        raise SeergateError(f"there is no study {name!r}; {did_you_mean(name, study_files)} (or give a .yaml file)")
    content = read_yaml(path)
    variants, options = content.get("variants"), content.get("options") or {}
    if (
        not isinstance(variants, dict)
        or len(set(map(str, variants))) < max(1, len(variants))
        or not all(isinstance(given, dict) and given for given in variants.values())
        or not isinstance(options, dict)
        or content.keys() - {"variants", "options"}
    ):
        raise SeergateError(f"{path} is no study: it must map 'variants' to names, and each name to its options")
    return Study(path.stem, options, {str(variant): given for variant, given in variants.items()})


def variant_configs(study: Study, model: str | None, options: Mapping[str, Any]) -> dict[str, TrainConfig]:
    """Return the configuration of each variant's run. All are checked before the first variant trains.

    The ``output_dir`` of the user's ``options`` is the study's directory.
    """
    common = overridden({"recipe": "paper", **study.options}, options)
    root = common.pop("output_dir", None)
    configs = {}
    for variant, given in study.variants.items():
        try:
            config = load_train_config(given.get("model", model), overridden(common, given))
        except ValueError as error:
            raise SeergateError(f"the variant {variant!r} of {study.name} cannot run: {error}") from error
        if given.keys() & {"output_dir", "push_to_hub"} or config.push_to_hub:
            raise SeergateError(
                "push_to_hub must be left out of an ablation, and output_dir of its variants, which have directories "
                "below the study's; upload one with `seergate push`"
            )
        if not (config.eval_packs and config.eval_steps):
            raise SeergateError("an ablation compares held-out packs; eval_packs and eval_steps must not be 0")
        name = model_name(config.model).lower()
        home = Path(root) if root else Path("runs") / f"ablation-{study.name}-{name}"
        directory = re.sub(r"[^a-z0-9]+", "-", variant.lower()).strip("-")
        if not directory:
            raise SeergateError(
                f"{study.name} has a variant named {variant!r}; its name must hold a letter or digit of ASCII"
            )
        configs[variant] = replace(config, output_dir=str(home / directory))
    if len({config.run_dir for config in configs.values()}) < len(configs):
        raise SeergateError(f"{study.name} has variants whose names differ in punctuation only")
    return configs


def run_studies(chosen: Sequence[tuple[Study, Mapping[str, TrainConfig]]]) -> list[list[Outcome]]:
    """Train the variants, or what is left to train of them, and return the outcomes of each study.

    Runs share a frozen model if their `FROZEN` options agree. All runs of a study read the model and the dataset at
    the commits of its first run.
    """
    from seergate.distill.base_model import FROZEN
    from seergate.distill.distributed import Diverged
    from seergate.distill.trainer import prepare_run, run_together

    configs: list[dict[str, TrainConfig]] = []
    groups: dict[tuple[Any, ...], dict[str, TrainConfig]] = {}
    for study, variants in chosen:
        configs.append(_pinned(variants))
        for variant, config in configs[-1].items():
            name = variant if len(chosen) == 1 else f"{study.name}, {variant}"
            groups.setdefault(tuple(getattr(config, option) for option in FROZEN), {})[name] = config
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1 or any(key[FROZEN.index("deepspeed")] for key in groups)
    if len(groups) > 1 and several:  # a process group cannot be made twice
        differing = [
            name for name, values in zip(FROZEN, zip(*groups, strict=True), strict=True) if len(set(values)) > 1
        ]
        raise SeergateError(
            f"the runs differ in {', '.join(differing)}, so they need frozen models of their own; train them in one "
            "process without DeepSpeed, or as a study each"
        )
    for name, config in (run for runs in groups.values() if len(groups) > 1 for run in runs.items()):
        try:
            prepare_run(config)  # a missing model or data file is found before the first one trains
        except SeergateError as error:
            raise SeergateError(f"{name}: {error}") from error
    trained, last = set[Path](), list(groups.values())[-1]
    for runs in groups.values():
        try:
            trained.update(run_together({name: (config, []) for name, config in runs.items()}, compared=True))
        except Diverged as error:
            if runs is last and not trained:
                raise
            print(error)
    return [[_outcome(variant, config, trained) for variant, config in each.items()] for each in configs]


def _pinned(configs: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """Pin all runs of a study to the same commits. With several processes, each run pins its own commits instead."""
    from seergate.distill import commits

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        return dict(configs)
    pinned = {}
    for number, (variant, given) in enumerate(configs.items()):
        # Only the first variant may look up the newest commits; the others use the commits that it found.
        config, entries = commits.pin(replace(given, resume=given.resume or number > 0), given.run_dir.parent)
        commits.keep(entries, given.run_dir.parent)
        pinned[variant] = replace(config, resume=given.resume)
    return pinned


def compare(names: Sequence[str], options: Mapping[str, Any]) -> str:
    """Run studies, write the table of each to ``ablation.md`` in its directory, and return all tables.

    Args:
        names: names of shipped studies or paths of YAML files; ``["all"]`` runs all shipped studies.
        options: training options of all variants.
    """
    chosen = prepared(names, options)
    files = [next(iter(configs.values())).run_dir.parent / "ablation.md" for _, configs in chosen]
    for file in filter(Path.is_file, files):
        if b"\n\n| variant " not in file.read_bytes():
            raise SeergateError(f"{file} is not the table of a study and would be replaced; give another output_dir")
    tables = []
    for (study, _), file, outcomes in zip(chosen, files, run_studies(chosen), strict=True):
        tables.append(f"{markdown_text(study.name)}\n\n{table(study, outcomes)}\n")
        file.write_text(tables[-1], encoding="utf-8")
    return "\n".join(tables)


def prepared(names: Sequence[str], options: Mapping[str, Any]) -> list[tuple[Study, dict[str, TrainConfig]]]:
    """Return each named study with the configurations of its variants; the arguments are those of `compare`."""
    chosen = [load_study(one) for one in (studies() if list(names) == ["all"] else names)]
    if len(chosen) > 1 and "output_dir" in options:
        raise SeergateError(
            f"output_dir is {options['output_dir']!r}; it must be left out for several studies at once"
        )
    if len({study.name for study in chosen}) < len(chosen):
        raise SeergateError(f"of {', '.join(names)}, two have the same name, so the same directories; rename a file")
    return [(study, variant_configs(study, options.get("model"), options)) for study in chosen]


def table(study: Study, outcomes: list[Outcome]) -> str:
    """Format the outcomes as a Markdown table."""
    budgets = sorted({budget for outcome in outcomes for budget in outcome.recall})
    recalls = [f"recall at {budget:,}" for budget in budgets]
    heads = ["variant", "parameters", "tokens", "held-out KL", *recalls]
    rows = [
        [
            outcome.variant,
            *((f"{outcome.parameters:,}", f"{outcome.tokens:,}", f"{outcome.kl:.4f}") if outcome.tokens else DIVERGED),
            *(f"{outcome.recall[b]:.3f}" if b in outcome.recall else "" for b in budgets),
        ]
        for outcome in outcomes
    ]
    text = markdown(heads, rows)
    varied = {option for given in study.variants.values() for option in given}
    varied -= {"row_start"} if "eval_row_start" in study.options else set()
    varied -= set() if any(is_retention(given.get("scorer", "")) for given in study.variants.values()) else {"scorer"}
    text += "".join(f"\n\n{note}" for options, note in NOTES.items() if varied.intersection(options))
    if any(share == 0 for outcome in outcomes for share in outcome.recall.values()):
        text += "\n\nA budget of one block is the current block, which is always read: nothing is left to recall with."
    return text


def _outcome(variant: str, config: TrainConfig, trained: Collection[Path]) -> Outcome:
    """Read the outcome of a variant from its adapter, if that is among those ``trained``."""
    from seergate.models.gate_bank import GateBank

    if config.run_dir not in trained:
        return Outcome(variant, 0, 0, math.nan, {})
    bank = GateBank.from_pretrained(config.run_dir)
    kl, shares = bank.training_record["kl_held_out"], bank.training_record["recall_held_out"] or {}
    recall = {int(budget): share for budget, share in shares.items()}
    tokens = bank.training_record["tokens_seen"]
    return Outcome(variant, bank.num_parameters, tokens, math.nan if kl is None else kl, recall)
