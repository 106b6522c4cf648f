"""``seergate ablate``: variants of a training run, compared in one table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from seergate.errors import SeergateError

PARSES_ITS_ARGUMENTS = False
HELP = (
    "train variants of a run and compare them",
    "Train variants of a run and compare them on held-out packs. Takes all options of seergate train, and:",
    ["seergate ablate block-size --model tiny-reasoner", "seergate ablate my-study.yaml --model Qwen3-0.6B"],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add none: the options are those of training, parsed by the command itself."""


def run_argv(argv: Sequence[str]) -> int:
    """Train what is not yet trained and print the table; returns the exit code."""
    from seergate.cli.train import given_options, train_parser
    from seergate.distill.ablation import load_study, run_study, studies, table, variant_configs

    parser = train_parser("seergate ablate", HELP[1], HELP[2], listed=False)
    known = ", ".join(studies())
    parser.add_argument("study", metavar="STUDY", help=f"one of {known}, all, or a .yaml file of your own")
    options = vars(parser.parse_args(argv))
    name, dry_run = options.pop("study"), options.get("dry_run")
    values = given_options(options)
    chosen = [load_study(one) for one in (studies() if name == "all" else [name])]
    if len(chosen) > 1 and "output_dir" in values:
        raise SeergateError(f"output_dir is {values['output_dir']!r}; it must be left out for all studies at once")
    prepared = [(study, variant_configs(study, values.get("model"), values)) for study in chosen]
    if dry_run:
        for study, configs in prepared:
            print(f"{study.name}: " + ", ".join(str(config.run_dir) for config in configs.values()))
        return 0
    tables = []
    for study, configs in prepared:
        tables.append(f"{study.name}\n\n{table(study, run_study(study, configs))}\n")
        (next(iter(configs.values())).run_dir.parent / "ablation.md").write_text(tables[-1], encoding="utf-8")
    print("\n" + "\n".join(tables), end="")
    return 0
