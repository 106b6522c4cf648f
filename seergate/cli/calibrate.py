"""``seergate calibrate``: what some evicting methods have to know about a model before they can be used."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

HELP = (
    "find out what LazyEviction or TriAttention need to know about a model",
    "lazy_eviction: answers some problems of a task and notes when attention comes back to each token. The window is\n"
    "the recurrence interval that 80 % of tokens do not exceed. Also tells how many tokens are milestones (used, and\n"
    "then no more) or phoenixes (used again after a cache of the budget would have lost them). Writes JSON.\n"
    "tri_attention: averages the queries of every head over problems and answers. Writes the file that the method\n"
    "takes as centres=.",
    [
        "seergate calibrate lazy_eviction --model tiny-reasoner --problems 4",
        "seergate calibrate tri_attention --model Qwen3-8B --task math500 --problems 20 --max-new-tokens 1024",
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("method", choices=("lazy_eviction", "tri_attention"), help="for which method")
    parser.add_argument("--model", default="tiny-reasoner", help="preset, directory, GGUF or Hub id [%(default)s]")
    parser.add_argument("--task", default="chain_sum", help="a task's name or a .jsonl file [%(default)s]")
    parser.add_argument("--problems", type=int, metavar="N", help="how many, spread evenly [1 %% of the task's]")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer [what the task allows]")
    parser.add_argument("--alpha", type=float, default=1e-4, help="probability of an active token [%(default)s]")
    parser.add_argument("--share", type=float, default=0.8, help="of tokens inside the window [%(default)s]")
    parser.add_argument("--budget", type=int, default=1024, metavar="N", help="that phoenixes outlast [%(default)s]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="[runs/calibrate-MODEL-METHOD.json or .safetensors]")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [%(default)s]")


def run(options: argparse.Namespace) -> int:
    """Load, measure, write."""
    from seergate.cli.models import check_writable, load_model, model_path
    from seergate.eval import RunOptions, make_task
    from seergate.eval.calibration import evenly_chosen_prompts, made_on
    from seergate.eval.engine import end_ids
    from seergate.eval.recurrence import measure_recurrence, query_centres
    from seergate.eval.store import write_json
    from seergate.hf.loading import load_tokenizer

    _check(options)
    path = model_path(options.model)
    tokenizer = load_tokenizer(path)
    task = make_task(options.task).bound(tokenizer)
    problems = task.problems()
    name = f"calibrate-{Path(options.model).name}-{options.method}"
    suffix = "safetensors" if options.method == "tri_attention" else "json"
    target = options.out or Path("runs") / f"{name}.{suffix}"
    _check_target(target, options.method)
    check_writable(target.parent)
    model = load_model(path, options.dtype, options.device)
    prompts = evenly_chosen_prompts(tokenizer, task, options.problems)
    limit = RunOptions(max_new_tokens=options.max_new_tokens).limit(task).of(max(map(len, prompts)))
    if limit < 1:
        raise ValueError("the longest prompt leaves no room for an answer; give --max-new-tokens")
    sampling, ends = RunOptions().resolved_sampling(task, model), end_ids(model, tokenizer)
    print(
        f"answering {len(prompts)} of {len(problems)} problems of {options.task}, at most {limit} tokens each",
        flush=True,
    )
    made = made_on(model, task, prompts, limit, sampling)
    if options.method == "tri_attention":
        centres = query_centres(model, prompts, max_new_tokens=limit, sampling=sampling, ends=ends, made=made)
        centres.save(target)
        print(f"centres of {len(centres.mean)} layers from {centres.tokens} tokens: {target}")
        return 0
    found = measure_recurrence(model, prompts, max_new_tokens=limit, alpha=options.alpha, sampling=sampling, ends=ends)
    record = {
        "model": options.model,
        "task": options.task,
        "made": made,
        "alpha": options.alpha,
        "share": options.share,
        "window": found.window(options.share),
        "recurring": found.recurring(),
        "token_budget": options.budget,
        "kinds": found.kinds(options.budget),
        "histogram": found.histogram(),
    }
    write_json(target, record)
    print(
        f"window {record['window']}: attention comes back to {100 * options.share:g} % of tokens within as many steps"
    )
    print(f"{100 * found.recurring():.1f} % of tokens are used again after more than one step")
    for part, kinds in found.kinds(options.budget).items():
        print(f"{part}: " + ", ".join(f"{100 * share:.1f} % {kind}" for kind, share in kinds.items()))
    print(f"all of it: {target}")
    return 0


def _check_target(target: Path, method: str) -> None:
    """Refuse to write over anything but an earlier calibration for the same method."""
    if not os.path.lexists(target):
        return
    from seergate.errors import SeergateError
    from seergate.methods.tri_attention import Centres

    if not target.is_file():
        raise SeergateError(f"{target} is no file; --out names the file to write")
    try:
        if method == "tri_attention":
            Centres.load(target)
            return
        record = json.loads(target.read_text(encoding="utf-8"))
        earlier = isinstance(record, dict) and {"window", "histogram"} <= set(record)
    except ValueError:
        earlier = False
    if not earlier:
        raise SeergateError(f"{target} holds something else than a calibration for {method}; give another --out")


def _check(options: argparse.Namespace) -> None:
    for name in ("problems", "max_new_tokens", "budget"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be a positive number")
    for name in ("alpha", "share"):
        value = getattr(options, name)
        if not 0 < value <= 1:
            raise ValueError(f"{name} is {value}; it must be greater than 0 and at most 1")
