"""``seergate train``, also `train.py`: runs as a single process, or as one of several processes of a launcher.

``prepare``, ``plan`` and ``ablate`` take the same options.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from seergate.cli.arguments import Command
from seergate.cli.console import guarded
from seergate.cli.openmp import bound_spinning
from seergate.config import is_retention
from seergate.distill.config import TrainConfig, load_train_config, option_parser, overridden, read_options
from seergate.errors import SeergateError
from seergate.models.names import is_tiny, presets
from seergate.options import Parser
from seergate.paths import shipped

HELP = (
    "distil gates for a frozen model",
    "Distil attention gates for a frozen model. --recipe sets the defaults of the other options.",
    [
        "seergate train --model tiny-reasoner",
        "seergate train --model Qwen3-8B --dry-run",
        "seergate train --model Qwen3-8B --block-size 32 --max-steps 400 --output-dir runs/qwen3-8b-b32",
        "deepspeed train.py --model Qwen3-8B",
        "torchrun --nproc-per-node 8 train.py --model Qwen3-8B",
    ],
)

SILENT_SECONDS = 5.0
"""Seconds that a process waits before it exits if another process reports the error."""
INTERRUPT = "interrupted; the same command continues from the last checkpoint"


def train_parser(prog: str | None, description: str, examples: Sequence[str], *, listed: bool = True) -> Parser:
    """The parser of the training options, ``--config`` and ``--dry-run``; the help lists all only if ``listed``."""
    listing = textwrap.fill("presets: " + ", ".join(presets()), 100, subsequent_indent="  ", break_on_hyphens=False)
    epilog = "\n".join(("examples:", *(f"  {line}" for line in examples), "", listing))
    parser = option_parser(prog=prog, description=description, epilog=epilog)
    parser.add_argument(
        "--config", metavar="FILE", action="append", help="YAML file of options; the command line wins over it"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved options and what the run will need, and stop"
    )
    if not listed:
        parser.list_only("help", "model")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    return parser


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """The training options given by ``--config`` and by the command line, without defaults."""
    files, launched = options.pop("config", None) or [], options.pop("local_rank", None) is not None
    options.pop("dry_run", None)
    if len(files) > 1:
        raise SeergateError("--config is given twice; put the options into one file")
    values = overridden(read_options(Path(files[0])) if files else {}, options)
    # Set by the deepspeed launcher. In a file, null means "not given"; `--deepspeed none` disables DeepSpeed.
    if values.get("deepspeed") is None and (launched or "CROSS_SIZE" in os.environ):
        values["deepspeed"] = ""
    if values.get("deepspeed") == "":
        values["deepspeed"] = str(shipped("ds_configs/zero2.json"))
    return values | ({"deepspeed": None} if values.get("deepspeed") == "none" else {})


def resolve(options: dict[str, Any]) -> TrainConfig:
    """Resolve the options. Precedence: command line, then ``--config``, then the preset, then the defaults."""
    values = given_options(options)
    return load_train_config(values.get("model"), values)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command given by ``argv``, by default the process's arguments, and return the exit code (`guarded`)."""
    work: list[Callable[[], None]] = []
    # All processes of a machine find the same error in the options, before they can communicate: one reports it.
    tell = partial(print_error, is_reporter=_number("WORLD_SIZE") <= 1 or _number("LOCAL_RANK") == 0)
    return guarded(lambda: work.append(parse_command(argv, prog)), tell, INTERRUPT) or exit_code_of(work[0])


def parse_command(argv: Sequence[str] | None, prog: str | None) -> Callable[[], None]:
    """Parse and check the options, and return the function that does the work."""
    parser = train_parser(prog, *HELP[1:])
    options = vars(parser.parse_args(argv))
    dry_run = options.pop("dry_run")
    return partial(_train, resolve(options), dry_run)


def _train(config: TrainConfig, dry_run: bool) -> None:
    is_main = _number("RANK") == 0
    if dry_run:
        if is_main:
            print_plan(replace(config, output_dir=str(config.run_dir)))
        return
    prepare_process()
    from seergate.distill import run_distillation

    adapter = run_distillation(config)
    if is_main:
        print(f"the gates are in {adapter}")
        more = [] if is_tiny(config.model) else ["--task", "needle"]
        more += ["--method", f"dense,{config.scorer}"] if is_retention(config.scorer) else []
        print("next: " + shlex.join(["seergate", "eval", "--model", config.model, "--gates", str(adapter), *more]))


def prepare_process() -> None:
    """Set the environment variables that libraries read on first use, unless the user has set them."""
    bound_spinning()
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        # Packs differ in length, so freed buffers are rarely reused: fixed segments would fragment memory.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def print_plan(config: TrainConfig) -> None:
    """Print the options as YAML for ``--config``, followed by the plan as comments."""
    from seergate.distill.estimate import make_plan

    plan = make_plan(config, processes=_number("WORLD_SIZE") or 1)
    values = replace(config, max_length=plan.config.max_length).to_dict()
    if values["gradient_accumulation_steps"]:
        del values["packs_per_step"]  # it has no effect beside the other
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")
    print("\n".join(f"# {line}" for line in plan.text().splitlines()))


def exit_code_of(run: Callable[[], None]) -> int:
    """Run the work by `guarded`; after an error, end this process at once if it is one of several."""
    code = 1
    try:
        code = guarded(run, print_error, INTERRUPT)
    except Exception:
        if _number("WORLD_SIZE") <= 1:
            raise
        traceback.print_exc()
    if code:
        from seergate.distill.distributed import exit_without_barrier  # late import: `run` sets the environment

        exit_without_barrier(code)
    return code


def print_error(message: str, error: BaseException, is_reporter: bool = True) -> None:
    """Print an error message, with the rank of the process unless it is rank 0.

    Only rank 0 reports an interrupt or an error common to all processes; ``is_reporter`` is false if another process
    reports the error. A process that does not report it waits, because a launcher ends all processes when one exits.
    """
    rank = _number("RANK")
    if isinstance(error, KeyboardInterrupt):
        is_reporter = rank == 0
    elif rank and getattr(error, "is_common", False):
        is_reporter = False
    if is_reporter:
        print(f"[rank {rank}] {message}" if rank else message, file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        time.sleep(SILENT_SECONDS)


def _number(variable: str) -> int:
    """An environment variable of the launcher as a number; 0 if unset."""
    return int(os.environ.get(variable) or 0)


def _prepare(options: argparse.Namespace) -> None:
    dry_run, config = options.dry_run, resolve(vars(options))
    if dry_run:
        return print_plan(config)
    from seergate.distill.trainer import prepare_run

    print(prepare_run(config).summary())


PREPARE = Command(
    (
        "download and tokenise what a training run needs, without a GPU",
        "Look up commits, download model and data, tokenise and pack, so that the run begins at once, offline too.\n"
        "Takes all options of seergate train; give the run the same ones.",
        ["seergate prepare --model Qwen3-8B"],
    ),
    lambda parser: None,
    _prepare,
    trains=True,
)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    group.add_argument("--processes", type=int, default=1, help="processes that share the work [1]")
    group.add_argument("--memory-gb", type=float, help="memory of the GPU that will train [this machine's]")
    group.add_argument("--device", choices=("cpu", "cuda"), help="plan for this kind of device [what is here]")
    group.add_argument("--tflops", type=float, help="speed that a device sustains, in TFLOP/s, to compute the time")


def _plan(options: argparse.Namespace) -> None:
    own = {name: vars(options).pop(name) for name in ("processes", "memory_gb", "device", "tflops")}
    config = resolve(vars(options))
    from seergate.distill.estimate import make_plan

    print(make_plan(config, **own).text())


PLAN = Command(
    (
        "estimate the memory, work and disk space of a training run",
        "Estimate the memory, work and disk space of a training run. Takes all options of seergate train, and:",
        ["seergate plan --model Qwen3-8B --memory-gb 24", "seergate plan --model tiny-reasoner"],
    ),
    _plan_arguments,
    _plan,
    trains=True,
)


def _ablate_arguments(parser: argparse.ArgumentParser) -> None:
    from seergate.distill.ablation import studies

    text = f"some of {', '.join(studies())}, all, or .yaml files of your own"
    parser.add_argument("studies", metavar="STUDY", nargs="+", help=text)


def _ablate(options: argparse.Namespace) -> None:
    from seergate.distill.ablation import compare, prepared

    values = vars(options)
    names, dry_run = values.pop("studies"), values.get("dry_run")
    values = given_options(values)
    if dry_run:
        for study, configs in prepared(names, values):
            print(f"{study.name}: " + ", ".join(str(config.run_dir) for config in configs.values()))
    else:
        prepare_process()
        tables = compare(names, values)
        if _number("RANK") == 0:
            print("\n" + tables, end="")


ABLATE = Command(
    (
        "train variants of a run and compare them",
        "Train variants of a run and compare them on held-out packs. Takes all options of seergate train, and:",
        ["seergate ablate block-size --model tiny-reasoner", "seergate ablate my-study.yaml --model Qwen3-0.6B"],
    ),
    _ablate_arguments,
    lambda options: exit_code_of(partial(_ablate, options)),
    trains=True,
)
