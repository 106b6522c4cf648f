"""``seergate ablate``: variants of a training run, compared in one table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

PARSES_ITS_ARGUMENTS = False
HELP = (
    "train variants of a run and compare them",
    "Train variants of a run and compare them on held-out packs. Takes all options of seergate train.",
    ["seergate ablate block-size --model tiny-reasoner", "seergate ablate my-study.yaml --model Qwen3-0.6B"],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None here: the options are those of training, parsed by the command itself."""


def run_argv(argv: Sequence[str]) -> int:
    """Pass everything on."""
    from seergate.distill.command import ablate_main

    return ablate_main(list(argv), prog="seergate ablate", examples=HELP[2])
