"""The command line of `train.py` and `seergate train`, made from the fields of `TrainConfig`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import yaml

from seergate.distill.config import DEFAULT_PRESET, TrainConfig, field_types, load_train_config, presets, read_yaml
from seergate.paths import shipped

USER_ERROR, INTERRUPTED = 2, 130

_GROUPS = {
    "model": "model",
    "block_size": "gate",
    "data": "data",
    "steps": "recipe",
    "save_every": "checkpoints, evaluation and logging",
    "deepspeed": "engine",
}


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """One option per field; an option that is not given leaves the preset's value."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Distil attention gates for a frozen model. The defaults are the SeerAttention-R paper's recipe.",
        epilog="Presets: " + ", ".join(presets()) + ". Also: deepspeed train.py ..., torchrun train.py ...",
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
    parser.add_argument("--dry-run", action="store_true", help="print the resolved options and stop")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    return parser


def resolve(options: dict[str, Any]) -> TrainConfig:
    """Defaults < preset < ``--config`` < command line.

    Raises:
        ValueError: for anything the user can mend.
    """
    given = dict(options)
    file = given.pop("config", None)
    local_rank = given.pop("local_rank", None)
    given.pop("dry_run", None)
    values = {**(read_yaml(Path(file)) if file else {}), **given}
    # The deepspeed launcher's marks. A null in a file is "nothing said"; `--deepspeed none` is a choice.
    if values.get("deepspeed") is None and (local_rank is not None or "CROSS_SIZE" in os.environ):
        values["deepspeed"] = ""
    if values.get("deepspeed") == "":
        values["deepspeed"] = str(shipped("ds_configs/zero2.json"))
    return load_train_config(values.get("model"), values)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a mistake of the user's, 130 when interrupted."""
    options = vars(build_parser(prog).parse_args(argv))
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = resolve(options)
        if options.get("dry_run"):
            config = replace(config, output_dir=str(config.run_dir))
            print(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), end="")
            return 0
        # Idle OpenMP threads sleep instead of spinning: on a machine that also does something else, spinning ones were
        # measured to make a step 15 times slower. Read when torch is imported, so it is set before.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from seergate.distill.trainer import run_distillation

        adapter = run_distillation(config)
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("SEERGATE_TRACEBACK"):
            raise
        if is_main:
            print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        if is_main:
            print("interrupted; the same command continues from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    if is_main:
        print(f"adapter: {adapter}")
    return 0
