"""``seergate demo``: the whole path on the model that ships with seergate, in minutes, on any machine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

HELP = (
    "gates for a small reasoning model, distilled, evaluated and reported, in minutes",
    "Take the frozen tiny reasoner that ships with seergate, distil gates for it from its own attention, save them\n"
    "to a directory, load them back, let it answer fresh problems with dense attention, and at several token\n"
    "budgets with an oracle, the gates and Quest, and write a report. Needs no network and no GPU.",
    ["seergate demo", "seergate demo --problems 128 --out runs/bigger-demo"],
)
REPORTS = True

METHODS = ["dense", "oracle", "gate", "quest"]
BUDGETS = [32, 64, 128]
VARIABLES, PROBLEMS = 12, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="where everything goes [runs/demo-DATE-TIME]")
    parser.add_argument(
        "--problems", type=int, default=PROBLEMS, metavar="N", help="how many problems are answered [%(default)s]"
    )
    parser.add_argument(
        "--variables",
        type=int,
        default=VARIABLES,
        metavar="N",
        help="size of a problem; prompt and answer take about 27 tokens per variable [%(default)s]",
    )
    parser.add_argument("--max-steps", type=int, metavar="N", help="steps of distillation [those of the preset]")


def run(options: argparse.Namespace) -> None:
    """Distil, save, load, evaluate, report."""
    from seergate.cli.models import TINY, check_writable, load_gates, load_model, model_path
    from seergate.eval import RunOptions, make_task, sweep
    from seergate.eval.settings import grid

    began = time.monotonic()
    out = options.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    task = make_task("chain_sum", problems=options.problems, variables=options.variables)
    base = model_path(TINY)
    check_writable(out)

    from transformers.utils import logging

    from seergate.distill import load_train_config, run_distillation

    logging.disable_progress_bar()  # loading the tiny reasoner takes no time
    overrides = {"output_dir": str(out / "gates"), "max_steps": options.max_steps}
    config = load_train_config(TINY, {name: value for name, value in overrides.items() if value is not None})
    print(
        f"1. Distilling gates from the attention of the frozen model in {base} ({config.max_steps} steps)", flush=True
    )
    adapter = run_distillation(config)

    size = sum(file.stat().st_size for file in adapter.glob("*.safetensors"))
    print(f"\n2. The gates are in {adapter} ({size / 1e3:.0f} kB); loading them back", flush=True)
    bank = load_gates(str(adapter))
    specs = grid(METHODS, BUDGETS, bank.config.block_size)

    length = 27 * options.variables
    print(
        f"\n3. Answering {options.problems} fresh problems of about {length} tokens, each method reading at most "
        f"{', '.join(map(str, BUDGETS))} tokens per step",
        flush=True,
    )
    from seergate.cli.console import EvalProgress, say_report
    from seergate.hf.loading import load_tokenizer

    with EvalProgress(len(specs)) as progress:
        run_options = RunOptions(
            batch_size=options.problems,
            measure_recall=True,
            model_name=TINY,
            on_progress=progress,
        )
        sweep(load_model(base), load_tokenizer(base), task, specs, out / "eval", run_options, gates=bank)

    from seergate.cli.adapters import results_of
    from seergate.report import write_report

    bank.results = tuple(results_of(out / "eval"))
    bank.save_pretrained(adapter)  # its card has the results now
    print("\n4. Writing the report", flush=True)
    report = write_report(out / "eval", out)
    say_report(report)
    print(f"the demo took {time.monotonic() - began:.0f} seconds")
