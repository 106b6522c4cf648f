"""The names and the life cycle of an adapter's files.

Beside the files that make an adapter there is a `config.json`, whose only purpose is that
`AutoModelForCausalLM.from_pretrained` on an adapter says what to do instead. Large weights are sharded as transformers
shards them: `gate_model-00001-of-00002.safetensors` and so on, with `gate_model.safetensors.index.json`.

Saving: everything is written to a scratch directory, which is then renamed to `.pending` (the moment at which the new
adapter exists), from where its files move to their places. Files in `.pending` win over their namesakes, so a reader
finds the old adapter before that moment and the new one after it, wherever the writer was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seergate.errors import SeergateError

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "gate_config.json", "gate_model.safetensors", "README.md"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
PLOT_FILE = "accuracy.png"
SIGN_FILE = "config.json"
PENDING, SCRATCH = ".pending", ".saving-"
MAX_JSON = 64 << 20

# A model type that transformers does not know stands at the beginning of its error message.
SIGN = {
    "model_type": "seergate_gates: not a model but gates for one, load them with seergate.load(...), see README.md"
}

_WEIGHTS = re.compile(r"gate_model(-\d{5}-of-\d{5})?\.safetensors")


def is_weights_file(name: str) -> bool:
    """Whether a file of this name holds weights of an adapter."""
    return _WEIGHTS.fullmatch(name) is not None


def is_sign(path: Path) -> bool:
    """Whether a `config.json` is the one that stands beside gates, and not a model's."""
    try:
        return str(json.loads(path.read_text()).get("model_type", "")).startswith("seergate_gates")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def locate(directory: Path, name: str) -> Path:
    """Where a file of the adapter in ``directory`` is to be read from."""
    pending = directory / PENDING / name
    return pending if pending.is_file() else directory / name


def read_json(path: Path) -> Any:
    """Read a JSON file of an adapter.

    Raises:
        SeergateError: if it cannot be read.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ValueError(f"it has {size} bytes")
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if "\\ud" in text.lower():  # halves of surrogate pairs, which no card and no terminal can show
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, OSError, RecursionError) as error:
        raise SeergateError(f"{path} is not readable JSON: {error}") from error


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Let one process at a time put files into a directory, where the file system can say so.

    The lock is the kernel's and on the directory itself: it leaves no file behind, and ends with its process.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def move_pending(directory: Path) -> None:
    """Put the files of a published adapter in place, and remove those of the one before it; call it `exclusive`.

    The configuration goes last: as long as it is pending, this can be called again and knows what belongs.
    """
    pending = directory / PENDING
    if not pending.is_dir():
        return
    config = locate(directory, CONFIG_FILE)
    current = set(read_json(config).get("files", ())) if config.is_file() else set()
    for path in sorted(pending.iterdir(), key=lambda path: path.name == CONFIG_FILE):
        if path.name == CONFIG_FILE:
            _remove_old_weights(directory, current)
        os.replace(path, directory / path.name)
    pending.rmdir()


def _remove_old_weights(directory: Path, current: set[str]) -> None:
    for path in directory.iterdir():
        if is_weights_file(path.name) and path.name not in current:
            path.unlink(missing_ok=True)
    if current == {WEIGHTS_FILE}:
        (directory / INDEX_FILE).unlink(missing_ok=True)
