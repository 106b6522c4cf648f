"""``seergate train``: the same as ``train.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

PARSES_ITS_ARGUMENTS = False
HELP = (
    "distil gates for a frozen model",
    "Distil gates for a frozen model.",
    [
        "seergate train --model tiny-reasoner",
        "seergate train --model Qwen3-8B --dry-run",
        "seergate train --model Qwen3-8B --block-size 32 --steps 400 --output-dir runs/qwen3-8b-b32",
        "deepspeed train.py --model Qwen3-8B",
        "torchrun --nproc-per-node 8 train.py --model Qwen3-8B",
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None here: the options are made from `TrainConfig`'s fields, by the command itself."""


def run_argv(argv: Sequence[str]) -> int:
    """Pass everything on."""
    from seergate.distill.command import main

    return main(list(argv), prog="seergate train", examples=HELP[2])
