"""``seergate eval``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from seergate.errors import SeergateError

PARSES_ITS_ARGUMENTS = True
HELP = (
    "accuracy, length and cost of decoding methods on a task",
    "Generate answers with every method at every budget, grade them, and write one run directory per setting. What\n"
    "is there already is kept: the same command after an interruption makes what is missing.",
    [
        "seergate eval --model tiny-reasoner --method dense,gate,quest --budget 64,128,256",
        "seergate eval --model Qwen3-8B --gates org/Qwen3-8B-gates --task problems.jsonl --samples 8 --budget 4096",
    ],
)


def integers(text: str) -> list[int]:
    """Comma-separated integers."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be integers separated by commas") from None


def words(text: str) -> list[str]:
    """Comma-separated words."""
    return [part.strip() for part in text.split(",") if part.strip()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_argument_group("what is compared")
    what.add_argument("--model", default="tiny-reasoner", help="preset, directory or Hub id (org/name) [%(default)s]")
    what.add_argument(
        "--gates", metavar="DIR", help="adapter directory or Hub id, for the method gate [shipped, if any]"
    )
    what.add_argument("--method", type=words, default=["dense", "gate"], metavar="A,B", help="methods [dense,gate]")
    what.add_argument(
        "--budget", type=integers, default=[], metavar="N,M", help="tokens read per KV head and step [the task's]"
    )
    what.add_argument(
        "--block-size", type=int, metavar="N", help="of methods that select blocks [the gates', else 64]"
    )
    what.add_argument("--dense-layers", type=integers, default=[], metavar="I,J", help="layers that stay dense [none]")
    task = parser.add_argument_group("task")
    task.add_argument("--task", default="chain_sum", help="chain_sum, or a .jsonl file of problems [%(default)s]")
    task.add_argument("--problems", type=int, metavar="N", help="how many problems [64 of chain_sum, all of a file]")
    task.add_argument("--variables", type=int, metavar="N", help="size of a chain_sum problem, ~11 tokens each [150]")
    task.add_argument("--task-seed", type=int, metavar="N", help="which chain_sum problems are drawn [0]")
    task.add_argument("--grader", help="of a file: math, exact or digit [math]")
    how = parser.add_argument_group("generation")
    how.add_argument("--samples", type=int, metavar="N", help="answers per problem [1]")
    how.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer [what the task allows]")
    how.add_argument("--temperature", type=float, help="0 is greedy [chain_sum: 0; a file: the model's own sampling]")
    how.add_argument("--top-p", type=float, default=1.0, help="with --temperature [%(default)s]")
    how.add_argument("--top-k", type=int, default=0, help="with --temperature; 0 is off [%(default)s]")
    how.add_argument("--seed", type=int, default=0, help="of the samples' random numbers [%(default)s]")
    how.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="samples generated together [%(default)s]"
    )
    how.add_argument("--measure-recall", action="store_true", help="also how much of dense attention's mass is read")
    how.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="[as saved]")
    how.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... [cuda if there is one]")
    how.add_argument("--threads", type=int, metavar="N", help="CPU threads [all cores]")
    out = parser.add_argument_group("output")
    out.add_argument("--out", type=Path, metavar="DIR", help="directory of the runs [runs/eval-MODEL-TASK]")
    out.add_argument("--no-report", action="store_true", help="leave out the report")


def run(options: argparse.Namespace) -> int:
    """Check everything that can be checked cheaply, then load the model and run the sweep."""
    from seergate.cli.models import check_writable, gates_for, load_gates, load_model, model_path
    from seergate.eval import RunOptions, make_task, sweep
    from seergate.eval.settings import grid
    from seergate.methods import method_class

    for name in options.method:
        method_class(name)
    task = make_task(options.task, **_task_options(options))
    task.problems()
    sampling = _sampling(options)
    path = model_path(options.model)
    gates = gates_for(options.model, options.gates)
    bank = load_gates(gates) if gates is not None else None
    if bank is not None and options.block_size not in (None, bank.config.block_size) and "gate" in options.method:
        raise SeergateError(
            f"block_size is {options.block_size}, but these gates have {bank.config.block_size}; leave it out"
        )
    block_size = options.block_size
    if block_size is None and bank is not None:
        block_size = bank.config.block_size
    specs = grid(options.method, options.budget or list(task.budgets), block_size, tuple(options.dense_layers))
    for spec in specs:
        spec.method(bank)
    out = options.out or Path("runs") / f"eval-{Path(path).name}-{task.name}"
    check_writable(out)

    import torch

    from seergate.cli.console import EvalProgress, say_report

    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"threads is {options.threads}; it must be a positive number")
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(path, options.dtype, options.device)
    with EvalProgress(len(specs)) as progress:
        run_options = RunOptions(
            samples=options.samples,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            seed=options.seed,
            batch_size=options.batch_size,
            measure_recall=options.measure_recall,
            model_name=options.model,
            gates_name=gates or "",
            on_progress=progress,
        )
        sweep(model, tokenizer, task, specs, out, run_options, bank=bank)
    if options.no_report:
        print(f"runs: {out}")
        return 0
    from seergate.report import write_report

    say_report(write_report(out))
    return 0


def _task_options(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in ("problems", "variables", "grader")}
    return {**given, "seed": options.task_seed}


def _sampling(options: argparse.Namespace) -> Any:
    from seergate.eval import Sampling

    if options.temperature is None:
        if options.top_p != 1.0 or options.top_k:
            raise SeergateError("top-p and top-k have no effect without --temperature; give it too")
        return None
    return Sampling(options.temperature, options.top_k, options.top_p)
