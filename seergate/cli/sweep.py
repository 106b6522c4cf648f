"""``seergate sweep``: a grid of settings from one YAML file."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from seergate.cli.models import named_gates

HELP = (
    "a grid of settings from one YAML file",
    "Evaluate a grid over methods, budgets, thresholds, block sizes and dense layers. What is there already is kept,\n"
    "so an interrupted sweep continues and a longer list makes only what is new. The file's keys are those of\n"
    "seergate.eval.plan.SweepPlan, for instance:\n\n"
    "    model: tiny-reasoner\n"
    "    task: chain_sum\n"
    "    task_options: {problems: 64, variables: 70}\n"
    "    method: [dense, oracle, 'h2o:interval=16', 'lazy_eviction:window=auto']\n"
    "    budget: [64, 128, 256]\n"
    "    block_size: [8, 16, 32]\n"
    "    dense_layers: [[], [0, 1]]\n"
    "    out: runs/my-sweep",
    [
        "seergate sweep configs/sweeps/methods.yaml",
        "seergate sweep configs/sweeps/methods.yaml --match resident --out runs/methods-resident",
        "seergate sweep my-sweep.yaml --model Qwen3-4B --out runs/qwen3-4b",
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the grid, as YAML")
    parser.add_argument("--model", help="instead of the file's")
    parser.add_argument("--gates", type=named_gates, metavar="DIR", help="instead of the file's")
    parser.add_argument("--out", metavar="DIR", help="instead of the file's")
    parser.add_argument("--match", choices=("budget", "resident", "read"), help="instead of the file's")
    parser.add_argument("--problems", type=int, metavar="N", help="how many, instead of the file's")
    parser.add_argument("--no-report", action="store_true", help="leave out the report")


def run(options: argparse.Namespace) -> int:
    """Run the plan in the file."""
    from seergate.cli.running import run_and_report
    from seergate.eval.plan import SweepPlan

    given = {name: getattr(options, name) for name in ("model", "gates", "out", "match")}
    plan = replace(SweepPlan.read(options.file), **{name: value for name, value in given.items() if value is not None})
    if options.problems is not None:
        plan = replace(plan, task_options={**plan.task_options, "problems": options.problems})
    run_and_report(plan, report=not options.no_report)
    return 0
