"""``seergate calibrate``: measures the option of a method that depends on the model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from seergate.checks import check_counts
from seergate.cli.arguments import eval_args
from seergate.durable import check_writable
from seergate.errors import SeergateError
from seergate.models.names import load_model, model_path
from seergate.paths import model_name

if TYPE_CHECKING:
    from seergate.eval.calibration.calibrator import Calibration

HELP = (
    "measure LazyEviction's window and TriAttention's statistics",
    "lazy_eviction: answers some problems of a task and notes when attention comes back to each token. The window is\n"
    "the recurrence interval that 80 % of tokens do not exceed. Writes JSON.\n"
    "tri_attention: averages the queries of every head over problems and answers. Writes the file that the method\n"
    "takes as centres=.",
    [
        "seergate calibrate lazy_eviction --model tiny-reasoner --problems 4",
        "seergate calibrate tri_attention --model Qwen3-8B --task math500 --problems 20 --max-new-tokens 1024",
    ],
)
TAKES_METHODS = True

FEW_TOKENS = 500
"""A note is printed if the answers can have fewer tokens than this in total."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("method", metavar="METHOD", help="for which method: lazy_eviction or tri_attention")
    eval_args(parser, "model", "max_new_tokens", "temperature")
    eval_args(parser, "task", help="a task's name or a .jsonl file [chain_sum, for the tiny reasoner]", metavar="TASK")
    parser.add_argument("--grader", help="of a file, whose prompts depend on it; as for eval [math]")
    parser.add_argument("--problems", type=int, metavar="N", help="how many, spread evenly [1 %% of the task's]")
    parser.add_argument("--alpha", type=float, default=1e-4, help="probability of an active token [%(default)s]")
    parser.add_argument("--share", type=float, default=0.8, help="of tokens inside the window [%(default)s]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="[runs/calibrate-MODEL-METHOD.*]")
    eval_args(parser, "dtype", "device")


def run(options: argparse.Namespace) -> None:
    """Measure the method's model-dependent option on a task, and write it to a file."""
    from seergate.eval.calibration.calibrator import calibrated_options, calibration_of, evenly_chosen_prompts, made_on
    from seergate.eval.run_plan import check_model, each_task
    from seergate.eval.sweep_plan import SweepPlan
    from seergate.eval.tasks.prompts import end_ids
    from seergate.methods import method_class
    from seergate.models.families import check_length
    from seergate.pretrained import load_tokenizer

    kind = method_class(options.method)
    if not kind.calibrates:
        can = ", ".join(name for name, _ in calibrated_options())
        raise SeergateError(f"{options.method!r} has nothing to calibrate; the method must be one of {can}")
    (option,) = kind.calibrates
    calibration = calibration_of(kind, option).of(vars(options))
    check_counts(options, optional=True, problems=1, max_new_tokens=1)
    chosen = {name: getattr(options, name) for name in ("model", "task", "max_new_tokens", "temperature")}
    each_task(plan := SweepPlan(**chosen, task_options={"grader": options.grader}))  # other models have no default
    path = model_path(options.model)
    tokenizer = load_tokenizer(path)
    task = plan.make_task().bound(tokenizer)
    problems = task.problems()
    name = f"calibrate-{model_name(options.model)}-{options.method}{Path(calibration.file_name).suffix}"
    target = options.out or Path("runs") / name
    _check_target(target, calibration, options.method)
    check_writable(target.parent)
    prompts = evenly_chosen_prompts(tokenizer, task, options.problems)
    longest = max(map(len, prompts))
    text = check_model(path, [], []).get_text_config()
    check_length(text, longest + 1, "the longest prompt, with a token of the answer,")
    limit = plan.limit_of(task, text, longest).of(longest)
    if limit < 1:
        raise ValueError("the longest prompt leaves no room for an answer; give --max-new-tokens")
    model = load_model(path, options.dtype, options.device)
    sampling, ends = plan.resolved_sampling(task, model), end_ids(model, tokenizer)
    print(f"answering {len(prompts)} of {len(problems)} problems of {task.name}, at most {limit} tokens each")
    if len(prompts) * limit < FEW_TOKENS:
        print(f"note: fewer than {FEW_TOKENS} tokens say little of a model; give more --problems or --max-new-tokens")
    made = made_on(model, task, prompts, limit, sampling)
    about = {"model": options.model, "task": options.task or task.name, "made": made}
    how = {"max_new_tokens": limit, "sampling": sampling, "ends": ends}
    print("\n".join(calibration.measure(model, prompts, target, about, **how)))


def _check_target(target: Path, calibration: Calibration, method: str) -> None:
    """Refuse to overwrite anything but an earlier calibration for the same method."""
    if not os.path.lexists(target):
        return
    if not target.is_file():
        raise SeergateError(f"{target} is no file; --out names the file to write")
    if calibration.made(target) is None:
        raise SeergateError(f"{target} holds something else than a calibration for {method}; give another --out")
