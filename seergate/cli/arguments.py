"""Arguments that commands share, and types of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Command:
    """A command that shares its module with others; any other command is a module with the same attributes.

    Attributes:
        HELP: one line, a paragraph, and examples.
        add_arguments: declares the options.
        run: runs it; returns the exit code, 0 if ``None``.
        TAKES_METHODS: true if it takes names of methods, and with them ``--plugin``.
        REPORTS: true if it ends with a report, for which matplotlib must be there before it begins.
        trains: true if it also takes the options of `seergate train`.
    """

    HELP: tuple[str, str, Sequence[str]]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    TAKES_METHODS: bool = False
    REPORTS: bool = False
    trains: bool = False


def model_args(parser: argparse._ActionsContainer, gates: str = "[gates/ of the model]") -> None:
    """``--model`` and ``--gates``, whose default the help says."""
    parser.add_argument("--model", default="tiny-reasoner", help="preset, directory, GGUF or Hub id [%(default)s]")
    parser.add_argument("--gates", metavar="DIR", help=f"directory or Hub id of gates {gates}")


def run_args(parser: argparse._ActionsContainer) -> None:
    """``--dtype`` and ``--device``."""
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="auto is as saved [%(default)s]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [%(default)s]")


def integers(text: str) -> list[int]:
    """Comma-separated integers."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be integers separated by commas") from None


def some_integers(text: str) -> list[int]:
    """The same, at least one."""
    return _some(integers(text), text)


def numbers(text: str) -> list[float]:
    """Comma-separated numbers, at least one."""
    try:
        return _some([float(part) for part in text.split(",") if part.strip()], text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers separated by commas") from None


def words(text: str) -> list[str]:
    """Comma-separated words, at least one."""
    return _some([part.strip() for part in text.split(",") if part.strip()], text)


def _some(values: list[Value], text: str) -> list[Value]:
    if not values:
        raise argparse.ArgumentTypeError(f"{text!r} holds nothing; it must be values separated by commas")
    return values
