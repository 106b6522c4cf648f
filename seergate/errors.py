"""The one error type for a user's mistake that is not about an argument's value, and what such sentences share."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


class SeergateError(ValueError):
    """A mistake that the user can correct: a missing file, a model of an unsupported family, gates for another model.

    The message is one sentence that names what was wrong and what would be right. The command line prints it without a
    traceback and exits with 2, as it does for every `ValueError`.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the most similar known name, or all of them.

    ``evaluate`` is like ``eval``, ``lr`` like ``learning_rate``, ``qest`` like ``quest``; ``budget`` is more like
    ``token_budget``, which ends with it, than like ``budget_min``.
    """
    plain = {_plain(each): each for each in known}
    word = _plain(name)
    kinds = [each for each in plain if len(word) > 2 and each.endswith(f"_{word}")]
    longer = [each for each in plain if len(word) > 2 and each.startswith(word)]
    shorter = [each for each in plain if len(each) > 2 and word.startswith(each)]
    spelled_out = [each for each in plain if word == "".join(part[:1] for part in each.split("_"))]
    near = kinds + longer + shorter + spelled_out + difflib.get_close_matches(word, plain, n=1)
    return f"did you mean {plain[near[0]]!r}?" if near else f"there are {', '.join(plain.values()) or 'none'}"


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")


def how_to_install(extra: str) -> str:
    """The command that adds an optional part of seergate, for the messages about libraries that are missing.

    Args:
        extra: a key of ``optional-dependencies`` in `pyproject.toml`.
    """
    return f'run: pip install "seergate[{extra}]"'


def first_line(error: BaseException) -> str:
    """The first line of another error's message, or the name of its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_users(error: ValueError | OSError) -> bool:
    """True if the command line prints an error as one sentence; false if its traceback is to be shown.

    Of the system's errors, only those about a file are the user's. ``SEERGATE_TRACEBACK`` shows every traceback.
    """
    foreign = isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and error.filename is None
    return not foreign and not os.environ.get("SEERGATE_TRACEBACK")


def sentence(error: BaseException) -> str:
    """An error in one line for the command line; an error of the system includes the file's name and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used: {error.strerror[0].lower()}{error.strerror[1:]}"
    return " ".join(str(error).split())
