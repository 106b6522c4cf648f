"""What is read from the Hub, and what goes wrong there said in one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from seergate.errors import SeergateError
from seergate.paths import is_directory, resolve_model

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
OWN_NAME = re.compile(r"[\w-][\w.-]*")

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


def directory_here(name: str) -> Path | None:
    """The directory of this name, or the one that ships with seergate under it; ``None`` if there is neither."""
    try:
        found = resolve_model(name)
    except (OSError, ValueError):  # not shipped, or no name that a file can have
        return None
    return Path(found) if is_directory(found) else None


def is_hub_id(name: str | None) -> bool:
    """Whether a name has the form ``org/name`` and is no directory here."""
    return name is not None and HUB_ID.fullmatch(name) is not None and directory_here(name) is None


def check_repo_id(repo_id: str) -> None:
    """Refuse what cannot be the name of a repository to push to: ``org/name``, or ``name`` in one's own namespace."""
    if not isinstance(repo_id, str) or not (HUB_ID.fullmatch(repo_id) or OWN_NAME.fullmatch(repo_id)):
        raise SeergateError(f"repo_id is {repo_id!r}; it must have the form org/name, or name for one of your own")


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

    A connection that breaks is resumed. When a process was killed, the next call downloads only what is not complete;
    whether it goes on in the middle of a file depends on the version of `huggingface_hub`.

    Args:
        source: directory, one that ships with seergate (``"checkpoints/tiny-reasoner/gates"``), or Hub repository.
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
    here = directory_here(source)
    if here is not None:
        if revision is not None:
            raise SeergateError(f"revision is {revision!r}, but {source} is a directory, which has none; leave it out")
        return here / inside
    if os.path.exists(source):
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


def cached_commit(
    repo_id: str, revision: str | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> str | None:
    """The commit that a revision of a model had when it was last downloaded here; ``None`` if it never was."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, "config.json", revision=revision, cache_dir=cache_dir)
    return Path(config).parent.name if isinstance(config, str) else None


def only_commit(repo_id: str) -> str | None:
    """The commit of a model that the Hub's cache holds, if it holds a single one."""
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}" / "snapshots"
    commits = [path.name for path in snapshots.iterdir()] if snapshots.is_dir() else []
    return commits[0] if len(commits) == 1 else None


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
