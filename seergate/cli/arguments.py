"""Arguments shared by commands, and the types of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seergate.options import add_options


@dataclass(frozen=True)
class Command:
    """A command that shares its module with others; any other command is a module with the same attributes.

    Attributes:
        HELP: one-line summary, description, and example commands.
        add_arguments: declares the options.
        run: runs the command; may return an exit code.
        TAKES_METHODS: whether it takes names of methods, and therefore ``--plugin``.
        trains: whether it also takes the options of `seergate train`.
    """

    HELP: tuple[str, str, Sequence[str]]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    TAKES_METHODS: bool = False
    trains: bool = False


def eval_args(parser: argparse._ActionsContainer, *names: str, defaults: bool = True, **changed: Any) -> None:
    """Add fields of `SweepPlan` as options, see `add_options`."""
    from seergate.eval.sweep_plan import SweepPlan

    add_options(parser, SweepPlan, *names, defaults=defaults, **changed)


def model_args(parser: argparse._ActionsContainer) -> None:
    """Add ``--model`` and ``--gates``."""
    eval_args(parser, "model")
    parser.add_argument("--gates", metavar="DIR", help="directory or Hub id of gates [gates/ of the model]")


def decoding_args(parser: argparse._ActionsContainer, method: str, budget: str) -> None:
    """Add ``--method``, ``--budget``, ``--temperature`` and ``--seed``, for commands that run one method."""
    parser.add_argument("--method", default=method, help="a method, as NAME:OPTION=VALUE:... [%(default)s]")
    parser.add_argument("--budget", "--token-budget", type=int, metavar="N", help=f"tokens read per step{budget}")
    eval_args(parser, "temperature", help="0 is greedy [the model's own sampling]")
    eval_args(parser, "seed")


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The named options that are not ``None``, by name."""
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}
