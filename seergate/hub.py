"""Calls to the Hugging Face Hub: errors in one sentence, offline mode, commits in the local cache."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seergate.errors import SeergateError, first_line

_UNREACHABLE = ("TransportError", "RequestException", "ConnectionError", "TimeoutError", "LocalEntryNotFoundError")
"""Names of base classes of connection errors; the HTTP library of huggingface_hub depends on its release."""
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
    500: "Hub server error 500; try again later",
}

_OFFLINE = threading.RLock()
"""Lock for offline mode, which sets constants of the whole process."""


@contextmanager
def hub_call(what: str, *, asks: bool = True) -> Iterator[None]:
    """Turn any error in the block, except programming errors, into a `SeergateError` of the form "``what``: why".

    One short request tests whether the Hub answers. If it does not, the block runs in offline mode and uses downloaded
    files at once; the Hub's clients would retry for half a minute.

    Args:
        what: the failed action, for the message.
        asks: whether the Hub may be contacted; false for local files.
    """
    silence = None
    try:
        silence = _silence() if asks else None
        with offline(silence is not None):
            yield
    except (SeergateError, AssertionError, NameError):  # the last two are bugs
        raise
    except Exception as error:  # many libraries' types; tokenizers raises a bare `Exception`
        raise SeergateError(f"{what}: {_reason(error, silence)}") from error


@contextmanager
def offline(holds: bool = True) -> Iterator[None]:
    """Offline mode inside the block, if ``holds``: libraries use only downloaded files and do not contact the Hub."""
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
    """True if the Hub could not be reached or answered with a server error; false if it refused the request."""
    status = _status(error)
    return status >= 500 if status else any(kind.__name__ in _UNREACHABLE for kind in type(error).__mro__)


def cached_commit(repo_id: str, revision: str | None, cache_dir: str | os.PathLike[str] | None = None) -> str | None:
    """The commit of a model's revision when it was last downloaded here; ``None`` if it never was."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, "config.json", revision=revision, cache_dir=cache_dir)
    return Path(config).parent.name if isinstance(config, str) else None


def only_commit(repo_id: str) -> str | None:
    """The commit of a model in the local cache, if it holds exactly one; else ``None``."""
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}" / "snapshots"
    commits = [path.name for path in snapshots.iterdir()] if snapshots.is_dir() else []
    return commits[0] if len(commits) == 1 else None


def _silence() -> str | None:
    """Why the Hub cannot be contacted; ``None`` if it answers."""
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


@functools.cache  # only success is cached: a failure raises
def _reach(endpoint: str) -> None:
    from huggingface_hub import get_session

    get_session().head(endpoint, timeout=10)


def _reason(error: BaseException, silence: str | None) -> str:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:  # a chain may be circular
        causes.append(cause)
    if silent := [cause for cause in causes if unanswered(cause) and not _status(cause)]:  # the innermost says most
        return f"the Hub could not be asked ({silence or first_line(silent[-1]).split('. ')[0]})"
    hint = _HINTS.get(type(error).__name__) or _HINTS.get(min(_status(error), 500))
    several = str(error).startswith("Invalid metadata")  # of a model card: the Hub's reasons are in further lines
    return (" ".join(str(error).split()) if several else first_line(error)) + (f" ({hint})" if hint else "")


def _status(error: BaseException) -> int:
    """The HTTP status of a refused request; 0 if there was none."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0
