"""Finds the files that ship with seergate: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped(relative: str) -> Path:
    """The path of a shipped file or directory such as ``"configs"`` or ``"checkpoints/tiny-reasoner"``.

    Raises:
        FileNotFoundError: if this installation does not have it.
    """
    roots = [_PACKAGE / "shipped"]
    if (_PACKAGE.parent / "pyproject.toml").is_file():  # a checkout; in site-packages the neighbours are not ours
        roots.append(_PACKAGE.parent)
    for root in roots:
        if (root / relative).exists():
            return root / relative
    raise FileNotFoundError(
        f"{relative} is not part of this installation of seergate; looked beside and in {_PACKAGE}"
    )


def is_directory(name: str | os.PathLike[str]) -> bool:
    """Whether a directory of this name is here; a name that no file can have names none."""
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):
        return False


def resolve_model(name: str | os.PathLike[str]) -> str:
    """Turn a model's name into what transformers can load: a shipped directory if there is one of that name."""
    if is_directory(name):
        return str(name)
    if str(name).startswith("checkpoints/"):
        return str(shipped(str(name)))
    return str(name)


def shipped_name(path: str | os.PathLike[str]) -> str | None:
    """The short name (``"checkpoints/..."``) of a model's directory that ships with seergate; ``None`` for others."""
    directory = Path(path).resolve()
    if "checkpoints" not in directory.parts:
        return None
    start = len(directory.parts) - 1 - directory.parts[::-1].index("checkpoints")
    name = "/".join(directory.parts[start:])
    try:
        return name if shipped(name).resolve() == directory else None
    except FileNotFoundError:
        return None
