"""Arguments shared by commands, and the types of their values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seergate.paths import exists


@dataclass(frozen=True)
class Command:
    """A command that shares its module with others; any other command is a module with the same attributes.

    Attributes:
        HELP: one-line summary, description, and example commands.
        add_arguments: declares the options.
        run: runs the command; may return an exit code.
        TAKES_METHODS: whether it takes names of methods, and therefore ``--plugin``.
        REPORTS: whether it ends with a report; matplotlib is then required before it starts.
        trains: whether it also takes the options of `seergate train`.
    """

    HELP: tuple[str, str, Sequence[str]]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    TAKES_METHODS: bool = False
    REPORTS: bool = False
    trains: bool = False


def model_args(parser: argparse._ActionsContainer, gates: str = "[gates/ of the model]") -> None:
    """Add ``--model`` and ``--gates``; ``gates`` is the default of ``--gates`` as its help shows it."""
    parser.add_argument("--model", default="tiny-reasoner", help="preset, directory, GGUF or Hub id [%(default)s]")
    parser.add_argument("--gates", metavar="DIR", help=f"directory or Hub id of gates {gates}")


def run_args(parser: argparse._ActionsContainer) -> None:
    """Add ``--dtype`` and ``--device``."""
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="auto is as saved [%(default)s]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [%(default)s]")


def decoding_args(parser: argparse._ActionsContainer, method: str, budget: str) -> None:
    """Add ``--method``, ``--budget``, ``--temperature`` and ``--seed``, for commands that run one method."""
    parser.add_argument("--method", default=method, help="a method, as NAME:OPTION=VALUE:... [%(default)s]")
    parser.add_argument("--budget", "--token-budget", type=int, metavar="N", help=f"tokens read per step{budget}")
    parser.add_argument("--temperature", type=float, help="0 is greedy [the model's own sampling]")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling [%(default)s]")


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The named options that are not ``None``, by name."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _listed(kind: Callable[[str], Any], what: str, least: int = 1) -> Callable[[str], list[Any]]:
    """Return an argparse type that parses at least ``least`` comma-separated values with ``kind``."""

    def read(text: str) -> list[Any]:
        try:
            values = [kind(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be {what} separated by commas") from None
        if len(values) < least:
            raise argparse.ArgumentTypeError(f"{text!r} holds nothing; it must be values separated by commas")
        return values

    return read


integers, some_integers = _listed(int, "integers", least=0), _listed(int, "integers")
numbers, words = _listed(float, "numbers"), _listed(str, "words")


def named_gates(text: str) -> str | dict[str, str]:
    """Parse ``--gates``: one adapter, or several named ones as ``NAME=DIR,NAME=DIR``."""
    if os.sep in text.partition("=")[0] or "=" not in text or exists(text):
        return text
    pairs = [part.strip().partition("=") for part in text.split(",")]
    named = {name: place for name, _, place in pairs}
    if not all(name and place for name, _, place in pairs) or len(named) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} must be DIR, or NAME=DIR,NAME=DIR with different names")
    return named
