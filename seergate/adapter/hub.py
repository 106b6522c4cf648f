"""What is read from the Hub, and what goes wrong there said in one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from seergate.errors import SeergateError

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

# huggingface_hub's own errors, and those of the HTTP library underneath, which is another one in each major version
_CLIENTS = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn whatever the Hub's client raises into a `SeergateError` that begins with ``what``."""
    try:
        yield
    except SeergateError:
        raise
    except Exception as error:
        if not isinstance(error, (OSError, ValueError)) and type(error).__module__.split(".")[0] not in _CLIENTS:
            raise
        raise SeergateError(f"{what}: {_sentence(error)}") from error


def is_hub_id(name: str | None) -> bool:
    """Whether a name has the form ``org/name`` and is no directory here."""
    return name is not None and HUB_ID.fullmatch(name) is not None and not Path(name).is_dir()


def fetch(
    source: str,
    *,
    patterns: list[str],
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """The directory that ``source`` names, downloaded if it is a Hub repository.

    An interrupted download goes on where it stopped when it is called again.

    Args:
        source: directory or Hub repository.
        patterns: file names to download, ``*`` for anything.
        revision: branch, tag or commit; only for a repository.
        subfolder: a directory inside ``source``.
        token, cache_dir, local_files_only, force_download: as in `huggingface_hub`.

    Raises:
        SeergateError: if it is not there, or the Hub does not give it.
    """
    inside = PurePosixPath(subfolder or "")
    if inside.is_absolute() or ".." in inside.parts:
        raise SeergateError(f"subfolder is {subfolder!r}; it must be a path inside the adapter's repository")
    if Path(source).is_dir():
        return Path(source) / inside
    if Path(source).exists():
        raise SeergateError(f"{source} is a file; gates are a directory or a Hub repository")
    if HUB_ID.fullmatch(source) is None:
        raise SeergateError(f"{source} is neither a directory here nor a Hub repository of the form org/name")
    from huggingface_hub import snapshot_download

    with hub_errors(f"{source} could not be read from the Hub"):
        snapshot = snapshot_download(
            source,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
            allow_patterns=[str(inside / pattern) for pattern in patterns],
        )
    return Path(snapshot) / inside


def _sentence(error: Exception) -> str:
    """The lines of an error that say what happened, and what can be done about the commonest ones."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    kind = type(error).__name__
    hints = {
        401: "a token is needed or this one is not valid: `hf auth login`, or pass token=",
        403: "this token may not do that",
        409: "somebody else has just changed the repository; try again",
        412: "somebody else has just changed the repository; try again",
        429: "too many requests; try again later",
    }
    if kind in ("RepositoryNotFoundError", "GatedRepoError"):
        hint = "there is no such repository, or it is private and the token does not open it"
    elif kind == "RevisionNotFoundError":
        hint = "it has no such revision"
    elif status is not None and status >= 500:
        hint = "the Hub is not well; try again later"
    else:
        hint = hints.get(status, "") if status is not None else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[0] if lines else kind}{f' ({hint})' if hint else ''}"
