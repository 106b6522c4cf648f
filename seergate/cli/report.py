"""``seergate report``."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = (
    "tables, plots and findings of finished runs",
    "Write report.md, report.html and plots about a run directory, or about all runs in a directory: accuracy and\n"
    "generation length against budget, recall by layer, cost, and what can and cannot be concluded.",
    [
        "seergate report runs/eval-tiny-reasoner-chain_sum",
        "seergate report runs/methods runs/methods-resident --out runs/both",
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="what `seergate eval --out` wrote; several are compared"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the report goes [the first RUN_DIR]")


def run(options: argparse.Namespace) -> int:
    """Write the report and say what it shows."""
    from seergate.cli.console import say_report
    from seergate.report import write_report

    first, *others = options.runs
    say_report(write_report(first, options.out, *others))
    return 0
