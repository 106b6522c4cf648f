"""Tokenised samples on disk: built once, mapped by every process, keyed by everything that shaped them.

A store is a directory with all tokens in one flat int32 file, where each sample starts, and the report's counts. It is
made of a draft's parts beside its final name and renamed, so that it is either whole or not there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seergate.distill.formatting import Formatter, MalformedRow
from seergate.distill.sources import BadLine, Source
from seergate.distill.token_draft import Draft, Part
from seergate.errors import SeergateError

FORMAT = 3
"""Changes with what is in a store or a draft, for the same rows."""

BATCH_ROWS, BATCH_CHARS = 512, 4_000_000
"""A batch ends with the row that reaches one of these. Other values are another `FORMAT`."""


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
        """Tokenise a source into ``directory``, unless that has been done; go on where a killed build stopped.

        Args:
            directory: the store's final name; if another process finishes it first, that one is used.
            source: the rows.
            formatter: makes texts of them.
            max_length: longest sample kept whole.
            drop_over_length: leave longer samples out instead of cutting them.
            limit: stop after this many rows.
            progress: called with the number of rows read so far; first with the row where it goes on, if it does.
        """
        draft = Draft(directory)
        if not directory.is_dir():
            draft.remove_abandoned()
            try:
                counts = _fill(draft, source, formatter, max_length, drop_over_length, limit, progress)
                if not directory.is_dir():
                    draft.finish(counts)
            except (OSError, SeergateError):
                if not directory.is_dir():  # otherwise another process has finished it, and removed the draft
                    raise
        draft.remove()
        return cls(directory)


def _fill(
    draft: Draft,
    source: Source,
    formatter: Formatter,
    max_length: int,
    drop_over_length: bool,
    limit: int | None,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Add the parts that a draft lacks, or those until another process has finished the store; returns all counts."""
    counts: dict[str, Any] = {"rows": 0, "truncated": 0, "dropped": 0, "duplicates": 0, "malformed": {}}
    counts |= formatter.counts
    seen: set[str] = set()
    for part in draft.parts():
        counts = part.counts
        seen.update(part.digests)
    formatter.counts = {name: counts[name] for name in formatter.counts}
    if done := counts["rows"]:
        print(f"tokenising continues at row {done:,}; those before it are done", flush=True)
        progress(done)
    for first, batch in _batches(source, formatter, limit, counts):
        kept, digests = [], []
        for ids in batch:
            digest = hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()
            if digest in seen:
                counts["duplicates"] += 1
                continue
            seen.add(digest)
            digests.append(digest)
            if len(ids) > max_length:
                counts["dropped" if drop_over_length else "truncated"] += 1
                if drop_over_length:
                    continue
            kept.append(ids[:max_length])
        counts |= formatter.counts
        tokens = np.concatenate(kept) if kept else np.zeros(0, np.int32)
        draft.add(first, Part(counts, [len(ids) for ids in kept], digests, tokens))
        progress(counts["rows"])
        if draft.store.is_dir():
            break
    return counts


def _batches(
    source: Source, formatter: Formatter, limit: int | None, counts: dict[str, Any]
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Token ids of the usable rows after the first ``counts["rows"]``, and the row where each batch begins.

    Batches let the tokenizer use all cores. Where one ends depends on its own rows only, so they are the same wherever
    reading began.
    """
    begun = counts["rows"]
    texts: dict[bool, list[str]] = {True: [], False: []}  # of chats, plain ones
    chars = 0

    def tokenised() -> Iterator[np.ndarray]:
        for is_chat, some in texts.items():
            if some:
                for ids in formatter.tokenizer(some, add_special_tokens=not is_chat, verbose=False)["input_ids"]:
                    if ids:
                        yield np.asarray(ids, dtype=np.int32)
                    else:
                        _count(counts, "no tokens")
            some.clear()

    for row in itertools.islice(source.after(begun), None if limit is None else limit - begun):
        counts["rows"] += 1
        if isinstance(row, BadLine):
            _count(counts, row.reason)
            continue
        try:
            text, is_chat = formatter.text(row)
        except MalformedRow as reason:
            _count(counts, str(reason))
            continue
        texts[is_chat].append(text)
        chars += len(text)
        if chars >= BATCH_CHARS or sum(map(len, texts.values())) >= BATCH_ROWS:
            yield begun, list(tokenised())
            begun, chars = counts["rows"], 0
    if counts["rows"] > begun:
        yield begun, list(tokenised())


def _count(counts: dict[str, Any], reason: str) -> None:
    counts["malformed"][reason] = counts["malformed"].get(reason, 0) + 1
