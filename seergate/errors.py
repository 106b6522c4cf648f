"""The exception for a user's mistakes other than a wrong argument, and helpers for the text of error messages."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable

from seergate.escaping import visible

DISK = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO") if hasattr(errno, name)}
"""Errors of a disk that is full, over its quota, or failing; of a file that is larger than allowed."""


class SeergateError(ValueError):
    """A mistake that the user can correct: a missing file, a model of an unsupported family, gates for another model.

    The message is one sentence that says what is wrong and what would be right. The command line prints it without a
    traceback and exits with status 2, as for every `ValueError`.
    """


LONGEST = 4000
"""Characters of an error on the command line; from the middle of a longer one, such as an option's value, parts are
left out.
"""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the most similar known name, or all known names.

    ``evaluate`` gives ``eval``, ``lr`` gives ``learning_rate``, ``qest`` gives ``quest``; ``budget`` gives
    ``token_budget``, which ends with it, rather than ``budget_min``.
    """
    plain = {_plain(each): each for each in names}
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
    """The command that installs an optional part of seergate, for messages about missing libraries.

    Args:
        extra: a key of ``optional-dependencies`` in `pyproject.toml`.
    """
    return f'run: pip install "seergate[{extra}]"'


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_users(error: ValueError | OSError) -> bool:
    """True if the command line prints an error as one sentence; false if it shows the traceback.

    An `OSError` counts as the user's only if it is about a file or in `DISK`. If ``SEERGATE_TRACEBACK`` is set, always
    false.
    """
    known_cause = not isinstance(error, OSError) or isinstance(error, FileNotFoundError) or error.errno in DISK
    return (known_cause or getattr(error, "filename", None) is not None) and not os.environ.get("SEERGATE_TRACEBACK")


def sentence(error: BaseException) -> str:
    """An error in one line for the command line; an `OSError` about a file becomes the file's name and the reason."""
    if isinstance(error, OSError) and error.strerror and (error.filename is not None or error.errno in DISK):
        reason = f"{error.strerror[0].lower()}{error.strerror[1:]}"
        if error.errno in DISK:
            file = "the output or a file" if error.filename is None else error.filename
            return visible(f"{file} cannot be written: {reason}; what was finished before is kept")
        return visible(f"{error.filename} cannot be used: {reason}")
    message = visible(" ".join(str(error).split()))
    return message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
