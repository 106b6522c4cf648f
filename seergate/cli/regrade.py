"""``seergate regrade``: grades stored samples again, without generating anything."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

HELP = (
    "grade stored samples again",
    "Grade the samples of one run directory, or of all run directories in a directory, with the present graders, and\n"
    "derive metrics.json anew. The completions stay as they are; what changes is told.",
    ["seergate regrade runs/eval-tiny-reasoner-chain_sum", "seergate regrade RUN --dry-run"],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="what `seergate eval --out` wrote")
    parser.add_argument(
        "--grader", help="another grader than the run's, which has it from then on: math, exact, letter or digit"
    )
    parser.add_argument("--dry-run", action="store_true", help="only tell what would change")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="[%(default)s]")


def run(options: argparse.Namespace) -> int:
    """Grade, compare, write."""
    from seergate.eval.regrade import regrade
    from seergate.eval.store import run_directories

    if options.processes < 1:
        raise ValueError(f"processes is {options.processes}; it must be a positive number")
    for directory in run_directories(options.run_dir):
        result = regrade(directory, grader=options.grader, dry_run=options.dry_run, processes=options.processes)
        if not result.total:
            print(f"{directory}: no samples yet")
            continue
        print(
            f"{directory}: {result.total} samples, {len(result.changed)} changed; accuracy "
            f"{100 * result.before:.1f} % -> {100 * result.after:.1f} %"
        )
        for problem, sample, old, new in result.changed[:10]:
            print(f"  problem {problem}, sample {sample}: {old} -> {new}")
        if len(result.changed) > 10:
            print(f"  and {len(result.changed) - 10} more")
    return 0
