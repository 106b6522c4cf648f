"""A token store in the making: parts on disk, each whole or not there, so that a killed build goes on with the next.

A part holds what became of one batch of rows, and is named by the row it begins with. Its contents follow from the
rows alone, and it is written beside its name and renamed. So processes that build the same store at once write equal
parts over each other's, and need no lock, which network file systems may only pretend to hold. Until the store is put
together from its parts and these are removed, its tokens lie on the disk twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seergate.durable import flush
from seergate.errors import SeergateError

ABANDONED_SECONDS = 7 * 24 * 3600
"""A draft that nobody has added to for so long will not be continued, and may be as large as a store."""

LEFTOVER_SECONDS = 3600
"""What nobody has written to for so long, and is not a part yet, is of a process that was killed."""


@dataclass(frozen=True)
class Part:
    """What became of a batch of rows.

    Attributes:
        counts: what has happened since the first row, not only in this batch; ``counts["rows"]`` have been read.
        lengths: tokens per sample.
        digests: of every text that no earlier one equals, whether it was kept, cut or left out.
        tokens: of all samples, int32 ``[sum(lengths)]``.
    """

    counts: dict[str, Any]
    lengths: list[int]
    digests: list[str]
    tokens: np.ndarray


class Draft:
    """The parts of a store so far.

    Args:
        store: the finished store's directory.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        self.directory = store.with_name(f".{store.name}.draft")
        if self.directory.is_dir() and not os.access(self.directory, os.W_OK | os.X_OK):
            # Another user's, who may never come back; only where there are user numbers can this be.
            self.directory = store.with_name(f".{store.name}.{os.getuid()}.draft")

    def parts(self) -> Iterator[Part]:
        """The parts from the first row on, up to one that is missing or damaged."""
        row = 0
        while (part := self._read(row)) is not None:
            yield part
            row = part.counts["rows"]

    def add(self, row: int, part: Part) -> None:
        """Keep the part that begins with ``row``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        head = {"counts": part.counts, "lengths": part.lengths, "digests": part.digests}
        contents = json.dumps(head).encode() + b"\n" + part.tokens.astype(np.int32, copy=False).tobytes()
        unnamed = self.directory / f"{row}.{secrets.token_hex(8)}"
        unnamed.write_bytes(_digest(row, contents) + b"\n" + contents)
        flush(unnamed)
        unnamed.replace(self._path(row))

    def finish(self, counts: dict[str, Any]) -> None:
        """Make the store of the parts, unless another process has.

        Args:
            counts: those of the last part; what they say if there is none.

        Raises:
            SeergateError: if a part is missing or damaged.
        """
        scratch = self.directory / f"store.{secrets.token_hex(8)}"
        scratch.mkdir(parents=True)
        try:
            self._put_together(scratch, counts)
            scratch.rename(self.store)
            flush(self.store.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def remove(self) -> None:
        """Delete what is left of it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def remove_abandoned(self) -> None:
        """Delete what will not be continued, of this draft and other stores', and mark this one as in use."""
        with contextlib.suppress(OSError):  # it is not there, or another user's
            os.utime(self.directory)
        key = "[0-9a-f]" * 24
        for other in (*self.store.parent.glob(f".{key}.draft"), *self.store.parent.glob(f".{key}.*.draft")):
            if _idle(other) > ABANDONED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
        for left in self.directory.glob(f"*.{'[0-9a-f]' * 16}"):
            with contextlib.suppress(OSError):  # its process lives, and has just renamed it
                if min(map(_idle, (left, *left.glob("*")))) > LEFTOVER_SECONDS:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()

    def _put_together(self, scratch: Path, counts: dict[str, Any]) -> None:
        lengths, rows = [0], 0
        with (scratch / "tokens.i32").open("wb") as stream:
            for part in self.parts():
                stream.write(part.tokens.tobytes())
                lengths += part.lengths
                rows = part.counts["rows"]
        if rows != counts["rows"]:
            raise SeergateError(
                f"the tokens of the rows after {rows:,} were removed from {self.directory} or damaged while those of "
                "later rows were being made; the same command makes them again"
            )
        np.save(scratch / "starts.npy", np.cumsum(lengths, dtype=np.int64))
        (scratch / "counts.json").write_text(json.dumps(counts))
        for path in (*scratch.iterdir(), scratch):
            flush(path)

    def _path(self, row: int) -> Path:
        return self.directory / f"{row}.part"

    def _read(self, row: int) -> Part | None:
        try:
            digest, _, contents = self._path(row).read_bytes().partition(b"\n")
        except (FileNotFoundError, PermissionError):  # another user's is as good as missing
            return None
        if digest != _digest(row, contents):
            return None
        head, _, tokens = contents.partition(b"\n")
        return Part(**json.loads(head), tokens=np.frombuffer(tokens, dtype=np.int32))


def _idle(path: Path) -> float:
    """For how many seconds a file or directory has not been written to; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _digest(row: int, contents: bytes) -> bytes:
    """Of a part: it is whole, and where it belongs."""
    return hashlib.blake2b(contents, digest_size=16, key=str(row).encode()).hexdigest().encode()
