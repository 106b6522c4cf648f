"""``seergate plan``: what a training run needs, before any weight is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

PARSES_ITS_ARGUMENTS = False
HELP = (
    "say what a training run needs: memory, time, disk",
    "Say what a training run needs: memory, time, disk. Takes all options of seergate train.",
    ["seergate plan --model Qwen3-8B --memory-gb 24", "seergate plan --model tiny-reasoner"],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None here: the options are those of training and a few of its own, parsed by the command itself."""


def run_argv(argv: Sequence[str]) -> int:
    """Pass everything on."""
    from seergate.distill.command import plan_main

    return plan_main(list(argv), prog="seergate plan", examples=HELP[2])
