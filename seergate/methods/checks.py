"""Checks that the methods' options share."""

from __future__ import annotations

from seergate.config import is_int


def check_counts(method: object, **least: int) -> None:
    """Refuse options that are not whole numbers of at least ``least[name]``.

    Raises:
        ValueError: naming the option, what it is and what it must be.
    """
    for name, lowest in least.items():
        value = getattr(method, name)
        if not is_int(value) or value < lowest:
            raise ValueError(f"{name} is {value!r}; it must be a whole number, {lowest} or greater")


def check_choice(method: object, **choices: tuple[str, ...]) -> None:
    """Refuse options that are none of ``choices[name]``.

    Raises:
        ValueError: naming the option, what it is and what it must be.
    """
    for name, known in choices.items():
        value = getattr(method, name)
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be {' or '.join(map(repr, known))}")


def check_flags(method: object, *names: str) -> None:
    """Refuse options that are neither true nor false.

    Raises:
        ValueError: naming the option, what it is and what it must be.
    """
    for name in names:
        value = getattr(method, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be True or False")


def check_share(method: object, *names: str) -> None:
    """Refuse options that are not numbers in 0..1.

    Raises:
        ValueError: naming the option, what it is and what it must be.
    """
    for name in names:
        value = getattr(method, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
            raise ValueError(f"{name} is {value!r}; it must be a number in 0..1")
