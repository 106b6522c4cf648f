"""Names of models, Hub repositories and shipped files. Files that ship with seergate are next to the package in a
checkout and inside it in a wheel.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""Pattern of a Hub id."""
GGUF = ".gguf"
_PACKAGE = Path(__file__).resolve().parent


def shipped(relative: str) -> Path:
    """The path of a shipped file or directory such as ``"configs"`` or ``"checkpoints/tiny-reasoner"``.

    Raises:
        FileNotFoundError: if this installation does not have it.
    """
    roots = [_PACKAGE / "shipped"]
    if (_PACKAGE.parent / "pyproject.toml").is_file():  # a checkout; in site-packages, neighbours are other packages
        roots.append(_PACKAGE.parent)
    for root in roots:
        if (root / relative).exists():
            return root / relative
    raise FileNotFoundError(
        f"{relative} is not part of this installation of seergate; looked beside and in {_PACKAGE}"
    )


def resolve_model(name: str | os.PathLike[str]) -> str:
    """The name or path to give to transformers: for a shipped directory its path, else ``name`` itself."""
    name = str(name)
    return str(shipped(name)) if name.startswith("checkpoints/") and not os.path.isdir(name) else name


def resolve_file(path: str | os.PathLike[str]) -> Path:
    """The file of this name, or the shipped one, such as ``configs/sweeps/methods.yaml``, if there is none here."""
    path = Path(path)
    if path.exists() or path.parts[:1] not in (("configs",), ("ds_configs",)):
        return path
    try:
        return shipped(path.as_posix())
    except FileNotFoundError:
        return path


def directory_here(name: str | os.PathLike[str]) -> Path | None:
    """The local or shipped directory of this name; ``None`` if there is neither."""
    try:
        path = resolve_model(name)
    except (OSError, ValueError):  # not shipped, or not a valid file name
        return None
    return Path(path) if os.path.isdir(path) else None


def exists(name: str) -> bool:
    """True if a name is an existing file or directory, whatever signs it holds; ``~`` is the home directory."""
    return os.path.exists(os.path.expanduser(name))


def gguf_file(name: str | os.PathLike[str] | None) -> Path | None:
    """The GGUF file of a model: the file of this name, or the only GGUF file in a directory of this name without a
    `config.json`; ``None`` if there is none.
    """
    path = Path(name or "")
    if path.suffix.lower() == GGUF:
        return path if os.path.isfile(path) else None
    if not name or not os.path.isdir(path) or os.path.exists(path / "config.json"):
        return None
    files = list(path.glob(f"*{GGUF}"))
    return files[0] if len(files) == 1 else None


def model_name(model: str | os.PathLike[str]) -> str:
    """The last part of a model's path or Hub id, also of ``.`` and ``..``; names of outputs contain it."""
    path = Path(model)
    return (path.resolve() if path.name in ("", "..") else path).name


def is_local_model(name: str | os.PathLike[str] | None) -> bool:
    """True if a name is an existing directory or GGUF file."""
    return name is not None and (os.path.isdir(name) or gguf_file(name) is not None)


def is_hub_id(name: str | None) -> bool:
    """True if a name has the form ``org/name`` and is neither a local directory nor the name of a GGUF file."""
    if name is None or HUB_ID.fullmatch(name) is None or name.lower().endswith(GGUF):
        return False
    return directory_here(name) is None


def shipped_name(path: str | os.PathLike[str]) -> str | None:
    """The short name (``"checkpoints/..."``) of a model directory that ships with seergate; ``None`` for others."""
    directory = Path(path).resolve()
    if "checkpoints" not in directory.parts:
        return None
    start = len(directory.parts) - 1 - directory.parts[::-1].index("checkpoints")
    name = "/".join(directory.parts[start:])
    try:
        return name if shipped(name).resolve() == directory else None
    except FileNotFoundError:
        return None
