"""Calls to the Hugging Face Hub: errors in one sentence, offline mode, the commits in its cache."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seergate.errors import SeergateError, first_line

_UNREACHABLE = ("TransportError", "RequestException", "ConnectionError", "TimeoutError", "LocalEntryNotFoundError")
"""Names of the base classes of errors that mean no answer; huggingface_hub's HTTP library differs by release."""
_ABSENT = "there is no such repository, or it is private and no token (HF_TOKEN, token=, `hf auth login`) opens it"
_CHANGED = "somebody else has just changed the repository; try again"
_HINTS = {
    "RepositoryNotFoundError": _ABSENT,
    "GatedRepoError": _ABSENT,
    "RevisionNotFoundError": "it has no such revision",
    401: "a token is needed or this one is not valid: `hf auth login`, or pass token=",
    403: "this token may not do that",
    409: _CHANGED,
    412: _CHANGED,
    429: "too many requests; try again later",
    500: "the Hub is not well; try again later",
}


_OFFLINE = threading.RLock()
"""Lock of offline mode, whose constants are global to the process."""


@contextmanager
def hub_call(what: str, *, asks: bool = True) -> Iterator[None]:
    """Report every failure inside as a `SeergateError` of the form "``what``: why".

    If the Hub does not answer, which one short request finds out, downloaded files are used at once: by themselves
    its clients try for half a minute.

    Args:
        what: the failed action, for the message.
        asks: whether the Hub may be asked; false for local files.
    """
    silence = None
    try:
        silence = _silence() if asks else None
        with offline(silence is not None):
            yield
    except (SeergateError, AssertionError, NameError):  # the last two are faults of a program
        raise
    except Exception as error:  # as many types as libraries are involved; that of tokenizers is a bare `Exception`
        raise SeergateError(f"{what}: {_reason(error, silence)}") from error


@contextmanager
def offline(holds: bool = True) -> Iterator[None]:
    """If ``holds``, no library asks the Hub inside the block: only downloaded files are used."""
    if not holds:
        yield
        return
    import datasets
    from huggingface_hub import constants

    with _OFFLINE:
        before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def unanswered(error: BaseException) -> bool:
    """True if the Hub could not be reached or had an error of its own; false if it refused the request."""
    status = _status(error)
    return status >= 500 if status else any(kind.__name__ in _UNREACHABLE for kind in type(error).__mro__)


def cached_commit(repo_id: str, revision: str | None, cache_dir: str | os.PathLike[str] | None = None) -> str | None:
    """The commit that a revision of a model had when it was last downloaded here; ``None`` if it never was."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, "config.json", revision=revision, cache_dir=cache_dir)
    return Path(config).parent.name if isinstance(config, str) else None


def only_commit(repo_id: str) -> str | None:
    """The commit of a model in the Hub's cache, if the cache holds exactly one."""
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}" / "snapshots"
    commits = [path.name for path in snapshots.iterdir()] if snapshots.is_dir() else []
    return commits[0] if len(commits) == 1 else None


def _silence() -> str | None:
    """Why the Hub cannot be asked; ``None`` if it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "offline mode is on"
    try:
        _reach(constants.ENDPOINT)
    except Exception as error:
        if not unanswered(error):
            raise
        return first_line(error)
    return None


@functools.cache  # an answer holds for the life of a process; a failure raises, which is not kept
def _reach(endpoint: str) -> None:
    from huggingface_hub import get_session

    get_session().head(endpoint, timeout=10)


def _reason(error: BaseException, silence: str | None) -> str:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:  # there are circles
        causes.append(cause)
    if silent := [cause for cause in causes if unanswered(cause) and not _status(cause)]:  # the innermost says most
        return f"the Hub could not be asked ({silence or first_line(silent[-1]).split('. ')[0]})"
    hint = _HINTS.get(type(error).__name__) or _HINTS.get(min(_status(error), 500))
    return first_line(error) + (f" ({hint})" if hint else "")


def _status(error: BaseException) -> int:
    """The HTTP status of a refused request; 0 if there was none."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0
