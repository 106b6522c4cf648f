"""Atomic, fsynced writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; the file there replaces ``path`` atomically when the block succeeds."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        flush(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file's contents, or a directory's entries, are on the disk.

    Raises:
        OSError: if ``path`` does not exist or is not writable.
    """
    if not path.is_dir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    elif os.name == "posix":  # other systems do not open directories
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
