"""``seergate demo``: distil, evaluate and report on the model that ships with seergate, in minutes on any machine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from seergate.cli.adapters import results_of
from seergate.cli.arguments import given
from seergate.cli.console import say_report
from seergate.durable import check_writable
from seergate.models.names import TINY, model_path

HELP = (
    "gates for a small reasoning model, distilled, evaluated and reported, in minutes",
    "Take the frozen tiny reasoner that ships with seergate, distil gates for it from its own attention, save them\n"
    "to a directory, load them back, let it answer fresh problems with dense attention, and at several token\n"
    "budgets with an oracle, the gates and Quest, and write a report. Needs no network and no GPU.",
    ["seergate demo", "seergate demo --problems 128 --out runs/bigger-demo"],
)
METHODS = ["dense", "oracle", "gate", "quest"]
BUDGETS = [32, 64, 128]
VARIABLES, PROBLEMS = 12, 32
STEPS = 60
"""Fewer than the preset's, so that the demo takes about three minutes on two cores."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="output directory [runs/demo-DATE-TIME]")
    parser.add_argument("--problems", type=int, default=PROBLEMS, metavar="N", help="number of problems [%(default)s]")
    parser.add_argument(
        "--variables",
        type=int,
        default=VARIABLES,
        metavar="N",
        help="size of a problem; prompt and answer take about 27 tokens per variable [%(default)s]",
    )
    parser.add_argument("--max-steps", type=int, default=STEPS, metavar="N", help="training steps [%(default)s]")


def run(options: argparse.Namespace) -> None:
    """Distil gates, save and reload them, evaluate them, and write the report."""
    from seergate.eval.report.plots import check_libraries
    from seergate.eval.report.write import check_report
    from seergate.eval.run_plan import checked_task, run_plan
    from seergate.eval.sweep_plan import SweepPlan

    check_libraries()  # before any work
    began = time.monotonic()
    out = options.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    plan = SweepPlan(
        model=TINY,
        gates=str(out / "gates"),
        method=METHODS,
        budget=BUDGETS,
        task_options={"problems": options.problems, "variables": options.variables},
        batch_size=options.problems,
        measure_recall=True,
        out=str(out / "eval"),
    )
    checked_task(plan)
    check_writable(out)
    check_report(out)

    from transformers.utils import logging

    from seergate.distill import load_train_config, run_distillation
    from seergate.models.gate_bank import GateBank

    logging.disable_progress_bar()  # loading the tiny reasoner takes no time
    config = load_train_config(TINY, {"output_dir": plan.gates, **given(options, "max_steps")})
    print(
        f"1. Distilling gates from the attention of the frozen model in {model_path(TINY)} ({config.max_steps} steps)"
    )
    adapter = run_distillation(config)

    size = sum(file.stat().st_size for file in adapter.glob("*.safetensors"))
    print(f"\n2. The gates are in {adapter} ({size / 1e3:.0f} kB); loading them back")
    bank = GateBank.from_pretrained(adapter)
    print(
        f"\n3. Answering {options.problems} fresh problems of about {27 * options.variables} tokens, each method "
        f"reading at most {', '.join(map(str, BUDGETS))} tokens per step"
    )
    runs = run_plan(plan)

    from seergate.eval.report import write_report

    bank.results = tuple(results_of(runs, bank))
    bank.save_pretrained(adapter)  # again, with the results in its model card
    print("\n4. Writing the report")
    say_report(write_report(runs, out))
    print(f"the demo took {time.monotonic() - began:.0f} seconds")
