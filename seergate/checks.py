"""Checks of options. Each raises a `ValueError` that names the option, its value and what it must be."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard


def is_int(value: object) -> TypeGuard[int]:
    """True if a value is an integer, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """True if a value is an integer or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def plain_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with numbers of NumPy and PyTorch as Python's own."""
    return {name: x.item() if getattr(x, "shape", None) == () else x for name, x in options.items()}


def check_count(name: str, value: Any, least: int = 0, most: int | None = None) -> None:
    """Check that a value is a whole number in ``least..most``."""
    right = is_int(value) and value >= least and (most is None or value <= most)
    bounds = f", {least} or greater" if most is None else f" in {least}..{most}"
    check(name, value, right, f"a whole number{bounds}")


def check_counts(options: object, *, optional: bool = False, **least: int) -> None:
    """Check that attributes are whole numbers of at least ``least[name]``, or, if ``optional``, ``None``."""
    for name, lowest in least.items():
        if not (optional and getattr(options, name) is None):
            check_count(name, getattr(options, name), lowest)


def check_one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that a value is one of ``choices``."""
    check(name, value, value in choices, " or ".join(map(repr, choices)))


def check_choice(options: object, **choices: Sequence[str]) -> None:
    """Check that each named attribute is one of ``choices[name]``."""
    for name, values in choices.items():
        check_one_of(name, getattr(options, name), values)


def check_flags(options: object, *names: str) -> None:
    """Check that attributes are bools."""
    for name in names:
        check(name, getattr(options, name), isinstance(getattr(options, name), bool), "True or False")


def check_share(options: object, *names: str) -> None:
    """Check that attributes are numbers in 0..1."""
    for name in names:
        value = getattr(options, name)
        check(name, value, is_number(value) and 0 <= value <= 1, "a number in 0..1")


def check(name: str, value: object, right: bool, must_be: str) -> None:
    """Raise a `ValueError` about ``value`` unless ``right`` is true."""
    if not right:
        kind = ", and a number of Python's own" if getattr(value, "shape", None) == () else ""
        raise ValueError(f"{name} is {value!r}; it must be {must_be}{kind}")


def holds_turns(text: str) -> bool:
    """True if a text is a conversation in JSON, or as Python prints it, instead of what is said in one."""
    if text.lstrip()[:1] not in ("[", "{", '"') or "role" not in text or "content" not in text:
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, str):
            return value != text and holds_turns(value)
        turns = value if isinstance(value, list) else [value]
        return bool(turns) and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns)
    return False
