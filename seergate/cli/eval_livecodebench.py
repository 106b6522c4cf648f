"""``seergate eval livecodebench``: hands the programs of a run to LiveCodeBench's own evaluator."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = (
    "a run's programs, for LiveCodeBench's own evaluator",
    "Take the program out of each answer of a run (the last fenced block that is closed) and write the file that\n"
    "LiveCodeBench's custom_evaluator reads. Nothing is executed here. docs/evaluation.md says what comes before and\n"
    "after.",
    ["seergate eval livecodebench runs/eval-Qwen3-8B-livecodebench/gate-4096 --out gate-4096.json"],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="one finished run directory")
    parser.add_argument("--out", type=Path, metavar="FILE", help="[programs.json in the run directory]")


def run(options: argparse.Namespace) -> int:
    """Write it."""
    from seergate.eval.livecodebench import write_programs

    out = options.out or options.run_dir / "programs.json"
    problems, empty = write_programs(options.run_dir, out)
    print(f"{out}: programs for {problems} problems; {empty} answers hold none")
    return 0
