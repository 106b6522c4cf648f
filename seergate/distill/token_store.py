"""Tokenised samples on disk: built once, mapped by every process, keyed by everything that shaped them.

A store is a directory with all tokens in one flat int32 file, where each sample starts, and the report's counts. It is
written beside its final name and renamed, so that it is either whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seergate.distill.formatting import Formatter, MalformedRow
from seergate.distill.sources import BAD_LINE, Source

FORMAT = 2
BATCH_ROWS, BATCH_CHARS = 512, 4_000_000


def default_cache() -> Path:
    """Where stores go unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seergate" / "tokens"


def store_key(*parts: Any) -> str:
    """A name for a store: a digest of everything its contents depend on."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], sort_keys=True).encode()).hexdigest()[:24]


class TokenStore:
    """An opened store.

    Attributes:
        lengths: tokens per sample, int64.
        counts: what happened on the way from rows to samples.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._starts = np.load(directory / "starts.npy")
        empty = self._starts[-1] == 0  # an empty file cannot be mapped
        self._tokens = (
            np.zeros(0, np.int32) if empty else np.memmap(directory / "tokens.i32", dtype=np.int32, mode="r")
        )
        self.lengths = np.diff(self._starts)
        self.counts: dict[str, Any] = json.loads((directory / "counts.json").read_text())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sample: int) -> np.ndarray:
        """The tokens of a sample, int32."""
        return np.asarray(self._tokens[self._starts[sample] : self._starts[sample + 1]])

    @classmethod
    def build(
        cls,
        directory: Path,
        source: Source,
        formatter: Formatter,
        *,
        max_length: int,
        drop_over_length: bool,
        limit: int | None = None,
        progress: Callable[[int], None] = lambda rows: None,
    ) -> TokenStore:
        """Tokenise a source into ``directory``.

        Args:
            directory: the store's final name; if another process finishes it first, that one is used.
            source: the rows.
            formatter: makes texts of them.
            max_length: longest sample kept whole.
            drop_over_length: leave longer samples out instead of cutting them.
            limit: stop after this many rows.
            progress: called with the number of rows read so far.
        """
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_drafts(directory)
        draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            starts, seen = [0], set()
            counts: dict[str, Any] = {"rows": 0, "truncated": 0, "dropped": 0, "duplicates": 0, "malformed": {}}
            with (draft / "tokens.i32").open("wb") as stream:
                for ids in _tokenised(source, formatter, limit, counts, progress):
                    digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
                    if digest in seen:
                        counts["duplicates"] += 1
                        continue
                    seen.add(digest)
                    if len(ids) > max_length:
                        counts["dropped" if drop_over_length else "truncated"] += 1
                        if drop_over_length:
                            continue
                        ids = ids[:max_length]
                    stream.write(ids.tobytes())
                    starts.append(starts[-1] + len(ids))
            counts |= formatter.counts
            np.save(draft / "starts.npy", np.asarray(starts, dtype=np.int64))
            (draft / "counts.json").write_text(json.dumps(counts))
            try:
                draft.rename(directory)
            except OSError:
                if not directory.is_dir():
                    raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return cls(directory)


def _remove_abandoned_drafts(directory: Path) -> None:
    """Drafts of this store that nobody has written to for an hour: their process was killed."""
    for tokens in directory.parent.glob(f".{directory.name}.*/tokens.i32"):
        if time.time() - tokens.stat().st_mtime > 3600:
            shutil.rmtree(tokens.parent, ignore_errors=True)


def _tokenised(
    source: Source, formatter: Formatter, limit: int | None, counts: dict[str, Any], progress: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """Token ids of the usable rows, in order; batches let the tokenizer use all cores."""
    batch: dict[bool, list[str]] = {True: [], False: []}  # texts of chats, plain texts
    chars = 0

    def flush() -> Iterator[np.ndarray]:
        for is_chat, texts in batch.items():
            if texts:
                for ids in formatter.tokenizer(texts, add_special_tokens=not is_chat, verbose=False)["input_ids"]:
                    if ids:
                        yield np.asarray(ids, dtype=np.int32)
                    else:
                        _count(counts, "no tokens")
            texts.clear()

    for row in source.rows:
        if limit is not None and counts["rows"] >= limit:
            break
        counts["rows"] += 1
        if row is BAD_LINE:
            _count(counts, "not JSON")
            continue
        try:
            text, is_chat = formatter.text(row)
        except MalformedRow as reason:
            _count(counts, str(reason))
            continue
        batch[is_chat].append(text)
        chars += len(text)
        if chars >= BATCH_CHARS or sum(map(len, batch.values())) >= BATCH_ROWS:
            yield from flush()
            chars = 0
            progress(counts["rows"])
    yield from flush()
    progress(counts["rows"])


def _count(counts: dict[str, Any], reason: str) -> None:
    counts["malformed"][reason] = counts["malformed"].get(reason, 0) + 1
