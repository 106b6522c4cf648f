"""Options that are declared once, as a field of a dataclass: its name, type and default, and a help text.

`add_options` derives the command line from the fields.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from types import UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from seergate.errors import SeergateError, did_you_mean

_WORDS = {"int": ("integers", "N,M"), "float": ("numbers", "X,Y"), "str": ("words", "A,B")}
"""Type -> how errors and the help name several of its values."""


def option(default: Any, help: str, **argparse_options: Any) -> Any:
    """Return a dataclass field with its help text and options for argparse."""
    metadata = {"help": help.replace("%", "%%"), **argparse_options}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def add_options(
    parser: argparse._ActionsContainer, kind: type, *names: str, defaults: bool = False, **changed: Any
) -> None:
    """Declare fields of a dataclass as options of a parser: those named, or all.

    Args:
        defaults: whether options that are not given have their defaults; otherwise the result leaves them out.
        changed: for argparse, instead of what the fields say.
    """
    types, fields_by_name = get_type_hints(kind), {item.name: item for item in fields(kind)}
    for name in names or fields_by_name:
        item = fields_by_name[name]
        default = item.default if item.default_factory is MISSING else item.default_factory()
        settings = {**item.metadata, **changed}
        settings = settings if "type" in settings else _type(types[name]) | settings
        if not ("help" in changed or default in (None, MISSING, [], ()) or settings["help"].endswith("]")):
            settings["help"] += f" [{as_text(default)}]"
        settings["default"] = default if defaults else argparse.SUPPRESS
        _add(parser, name, **settings)
        if default is True:
            opposite = {"default": settings["default"], "help": f"switch --{name.replace('_', '-')} off"}
            _add(parser, f"no_{name}", dest=name, action="store_false", **opposite)


def _add(parser: argparse._ActionsContainer, name: str, **settings: Any) -> None:
    action = parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", **settings)
    action.option_strings = action.option_strings[-1:]  # underscores are accepted, but not listed


def _type(hint: Any) -> dict[str, Any]:
    """Settings for argparse of an annotation, or of the first type of a union."""
    kind, values = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return _type(values[0])
    if kind is Literal:
        return {"choices": values}
    if hint is bool:
        return {"type": _truth, "nargs": "?", "const": True}
    if kind in (list, tuple):
        one = _type(values[0])["type"]
        return {"type": listed(one, kind, least=1 if kind is list else 0), "metavar": _WORDS[one.__name__][1]}
    return {"type": hint, **({"metavar": "N"} if hint is int else {})}


def _truth(text: str) -> bool:
    for value, words in ((True, ("yes", "true", "t", "y", "1")), (False, ("no", "false", "f", "n", "0"))):
        if text.lower() in words:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")


def listed(one: Callable[[str], Any], several: type = list, least: int = 1) -> Callable[[str], Any]:
    """Return an argparse type that parses at least ``least`` comma-separated values, each with ``one``."""

    def read(text: str) -> Any:
        try:
            values = several(one(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            what = _WORDS[one.__name__][0]
            raise argparse.ArgumentTypeError(f"{text!r} must be {what} separated by commas") from None
        if len(values) < least:
            raise argparse.ArgumentTypeError(f"{text!r} holds nothing; it must be values separated by commas")
        return values

    return read


def as_text(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `SeergateError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise a `SeergateError` with the message."""
        raise SeergateError(f"{message} (see {self.prog} --help)" if self.prog else message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; the error for an unknown option suggests the most similar known one."""
        options, unknown = self.parse_known_args(args, namespace)
        for text in unknown:
            name = text.partition("=")[0]
            flags = [option for action in self._actions for option in action.option_strings]
            hint = did_you_mean(name, flags) if name.startswith("-") else ""
            self.error(f"{name!r} is not an option{f'; {hint}' if hint.endswith('?') else ''}")
        return options

    def list_only(self, *names: str) -> None:
        """List only these options in the help."""
        for action in self._actions:
            if action.dest not in names:
                action.help = argparse.SUPPRESS
