"""The command line of `train.py` and `seergate train`, made from the fields of `TrainConfig`."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from seergate.distill.config import DEFAULT_PRESET, TrainConfig, field_types, load_train_config, presets, read_yaml
from seergate.distill.failures import CommonError
from seergate.errors import sentence
from seergate.openmp import bound_spinning
from seergate.paths import shipped

USER_ERROR, INTERRUPTED = 2, 130

SILENT_SECONDS = 5.0
"""A launcher ends all processes as soon as one has ended. So one that leaves the telling to another ends later."""

_GROUPS = {
    "model": "model",
    "block_size": "gate",
    "data": "data",
    "steps": "recipe",
    "save_every": "checkpoints, evaluation and logging",
    "deepspeed": "engine",
}


class Parser(argparse.ArgumentParser):
    """Says in one sentence what was wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        """Print ``message``, in one process of a machine, and exit with 2."""
        _tell(f"error: {message} (see {self.prog} --help)", _number("LOCAL_RANK") == 0)
        self.exit(USER_ERROR)


EXAMPLES = (
    "python train.py --model tiny-reasoner",
    "python train.py --model Qwen3-8B --dry-run",
    "deepspeed train.py --model Qwen3-8B",
    "torchrun --nproc-per-node 8 train.py --model Qwen3-8B --output-dir runs/qwen3-8b",
)


def build_parser(prog: str | None = None, examples: Sequence[str] = EXAMPLES) -> argparse.ArgumentParser:
    """One option per field; an option that is not given leaves the preset's value.

    Args:
        prog: the command's name in its help.
        examples: command lines for the end of the help.
    """
    known = textwrap.fill("presets: " + ", ".join(presets()), 100, subsequent_indent="  ", break_on_hyphens=False)
    parser = Parser(
        prog=prog,
        description="Distil attention gates for a frozen model. The defaults are the SeerAttention-R paper's recipe.",
        epilog="\n".join(("examples:", *(f"  {line}" for line in examples), "", known)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    kinds = field_types()
    group: Any = parser
    for item in fields(TrainConfig):
        if item.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[item.name])
        names = list(dict.fromkeys((f"--{item.name.replace('_', '-')}", f"--{item.name}")))
        default = DEFAULT_PRESET if item.default is MISSING else item.default
        default = ",".join(map(str, default)) if isinstance(default, tuple) else default
        shown = "" if default is None else f" [{default}]"
        extra: dict[str, Any] = {"dest": item.name, "help": (item.metadata["help"] + shown).replace("%", "%%")}
        if kinds[item.name] is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **extra)
        elif item.name == "deepspeed":
            group.add_argument(*names, nargs="?", const="", metavar="FILE", **extra)
        else:
            group.add_argument(*names, metavar=item.name.upper(), **extra)
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line wins over it")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved options and what the run will need, and stop"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    return parser


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """What ``--config`` and the command line say, without the defaults."""
    own = {name: value for name, value in options.items() if name not in ("config", "local_rank", "dry_run")}
    return {**(read_yaml(Path(options["config"])) if options.get("config") else {}), **own}


def resolve(options: dict[str, Any]) -> TrainConfig:
    """Defaults < preset < ``--config`` < command line.

    Raises:
        ValueError: for anything the user can mend.
    """
    values = given_options(options)
    local_rank = options.get("local_rank")
    # The deepspeed launcher's marks. A null in a file is "nothing said"; `--deepspeed none` is a choice.
    if values.get("deepspeed") is None and (local_rank is not None or "CROSS_SIZE" in os.environ):
        values["deepspeed"] = ""
    if values.get("deepspeed") == "":
        values["deepspeed"] = str(shipped("ds_configs/zero2.json"))
    return load_train_config(values.get("model"), values)


def main(argv: Sequence[str] | None = None, prog: str | None = None, examples: Sequence[str] = EXAMPLES) -> int:
    """Run the command; returns the exit code: 0, 2 for a mistake of the user's, 130 when interrupted."""
    options = vars(build_parser(prog, examples).parse_args(argv))
    found: list[TrainConfig] = []
    # The processes of a machine find the same fault in the options, before they know of each other.
    code = _guarded(lambda: found.append(resolve(options)), tells=_number("LOCAL_RANK") == 0)
    return code or _guarded(lambda: _train(found[0], dry_run=bool(options.get("dry_run"))))


def plan_main(argv: Sequence[str] | None = None, prog: str | None = None, examples: Sequence[str] = ()) -> int:
    """What ``seergate plan`` does; returns the exit code."""
    parser = build_parser(prog, examples)
    parser.description = "Say what a run needs (memory, time, disk) without loading a weight."
    group = parser.add_argument_group("plan")
    group.add_argument("--processes", type=int, default=1, help="processes that share the work [1]")
    group.add_argument("--memory-gb", type=float, help="memory of the GPU that will do it [this machine's]")
    group.add_argument("--device", choices=("cpu", "cuda"), help="plan for this kind of device [what is here]")
    group.add_argument("--sample-tokens", type=int, help="typical length of a sample, for the time [max_length]")
    group.add_argument("--tflops", type=float, help="what one device sustains, in TFLOP/s; instead of measuring")
    group.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True, help="time one layer here")
    options = vars(parser.parse_args(argv))
    names = ("processes", "memory_gb", "device", "sample_tokens", "tflops", "measure")
    own = {name: options.pop(name) for name in names if name in options}

    def run() -> None:
        config = resolve(options)
        from seergate.distill.plan import make_plan

        print(make_plan(config, **own).text())

    return _guarded(run)


def ablate_main(argv: Sequence[str] | None = None, prog: str | None = None, examples: Sequence[str] = ()) -> int:
    """What ``seergate ablate`` does; returns the exit code."""
    known = ", ".join(path.stem for path in sorted((shipped("configs") / "ablations").glob("*.yaml")))
    parser = build_parser(prog, examples)
    parser.description = "Train variants of a run and compare them on held-out packs. Takes all options of training."
    parser.add_argument("study", metavar="STUDY", help=f"one of {known}, all, or a .yaml file of your own")
    options = vars(parser.parse_args(argv))
    name = options.pop("study")

    def run() -> None:
        values = given_options(options)
        bound_spinning()
        from seergate.distill.ablation import load_study, run_study, studies, table, variant_configs

        chosen = [load_study(one) for one in (studies() if name == "all" else [name])]
        if len(chosen) > 1 and "output_dir" in values:
            raise ValueError(f"output_dir is {values['output_dir']!r}; it must be left out for all studies at once")
        prepared = [(study, variant_configs(study, values.get("model"), values)) for study in chosen]
        if options.get("dry_run"):
            for study, configs in prepared:
                print(f"{study.name}: " + ", ".join(str(config.run_dir) for config in configs.values()))
            return
        tables = []
        for study, configs in prepared:
            tables.append(f"{study.name}\n\n{table(study, run_study(study, configs))}\n")
            (next(iter(configs.values())).run_dir.parent / "ablation.md").write_text(tables[-1])
        print("\n" + "\n".join(tables), end="")

    return _guarded(run)


def _train(config: TrainConfig, *, dry_run: bool) -> None:
    is_main = _number("RANK") == 0
    if dry_run:
        if is_main:
            _dry_run(replace(config, output_dir=str(config.run_dir)))
        return
    bound_spinning()
    from seergate.distill.trainer import run_distillation

    adapter = run_distillation(config)
    if is_main:
        print(f"adapter: {adapter}")


def _dry_run(config: TrainConfig) -> None:
    """The options as a YAML file that ``--config`` takes, and the plan as its comments."""
    from seergate.distill.plan import make_plan

    plan = make_plan(config, processes=int(os.environ.get("WORLD_SIZE", "1")))
    print(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), end="")
    print("\n".join(f"# {line}" for line in plan.text().splitlines()))


def _guarded(run: Callable[[], None], *, tells: bool = True) -> int:
    """Run, and turn what goes wrong into a sentence and an exit code.

    Args:
        run: what to do.
        tells: whether this process tells the user. What all processes have found together, the main one tells.
    """
    try:
        run()
    except (ValueError, OSError) as error:
        # Of the system's errors, only those about a file are the user's.
        foreign = isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and error.filename is None
        if foreign or os.environ.get("SEERGATE_TRACEBACK"):
            raise
        _tell(f"error: {sentence(error)}", tells and not (isinstance(error, CommonError) and _number("RANK")))
        return USER_ERROR
    except KeyboardInterrupt:
        if _number("RANK") == 0:
            print("interrupted; the same command continues from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return 0


def _tell(text: str, tells: bool) -> None:
    """Print an error with the number of its process, if that is not the main one; or give another time to do so."""
    rank = _number("RANK")
    if tells:
        print(f"[rank {rank}] {text}" if rank else text, file=sys.stderr, flush=True)
    else:
        time.sleep(SILENT_SECONDS)


def _number(variable: str) -> int:
    """What the launcher says about this process."""
    return int(os.environ.get(variable) or 0)
