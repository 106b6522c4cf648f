"""A token cache that several users and runs share: neither another's draft nor what a kill left is in the way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from seergate.distill.formatting import Formatter
from seergate.distill.sources import Source
from seergate.distill.token_draft import ABANDONED_SECONDS, LEFTOVER_SECONDS, Draft, Part
from seergate.distill.token_store import TokenStore
from tests.distill.conftest import PLAIN, byte_tokenizer

ROWS = [{"text": f"some text to learn from, number {i}"} for i in range(5)]


def build(directory: Path) -> TokenStore:
    source = Source(iter(ROWS), "rows", len(ROWS))
    return TokenStore.build(
        directory, source, Formatter(byte_tokenizer(PLAIN)), max_length=500, drop_over_length=False
    )


def aged(path: Path, seconds: float) -> Path:
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def test_another_users_draft_does_not_block_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, whom no permission stops: what the system would say is said here."""
    expected = build(tmp_path / "expected" / ("a" * 24))
    store = tmp_path / ("a" * 24)
    foreign = Draft(store)
    foreign.add(0, Part({"rows": 1}, [1], [], np.zeros(1, np.int32)))
    before = sorted(foreign.directory.iterdir())
    utime = os.utime

    def refused(path: Path, *times: object) -> None:
        if Path(path) == foreign.directory:
            raise PermissionError(1, "Operation not permitted", str(path))
        utime(path, *times)

    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != foreign.directory)
    monkeypatch.setattr(os, "utime", refused)
    foreign.remove_abandoned()  # as if it had been there when the build began
    made = build(store)
    assert len(made) == len(expected) == 5
    assert (store / "tokens.i32").read_bytes() == (expected.directory / "tokens.i32").read_bytes()
    assert sorted(foreign.directory.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{'a' * 24}.draft", "a" * 24, "expected"]


def test_a_part_that_may_not_be_read_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / ("a" * 24)
    Draft(store).add(0, Part({"rows": 5}, [1], [], np.zeros(1, np.int32)))
    read, refusals = Path.read_bytes, [1]

    def once_refused(path: Path) -> bytes:
        if path.name == "0.part" and refusals:
            refusals.pop()
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", once_refused)
    assert build(store).lengths.min() > 1 and not refusals


def test_what_a_kill_left_in_a_draft_is_removed_after_an_hour(tmp_path: Path) -> None:
    draft = Draft(tmp_path / ("a" * 24))
    draft.add(0, Part({"rows": 1}, [1], [], np.zeros(1, np.int32)))
    long_ago, now = LEFTOVER_SECONDS + 60, 0.0
    for name, copied, made in (("0", long_ago, long_ago), ("1", now, long_ago), ("2", now, now)):
        scratch = draft.directory / f"store.{name * 16}"
        scratch.mkdir()
        (scratch / "tokens.i32").touch()
        aged(scratch / "tokens.i32", copied)  # it grows while the directory stays as it is
        aged(scratch, made)
        (draft.directory / f"4.{name * 16}").touch()
        aged(draft.directory / f"4.{name * 16}", made)
    aged(draft.directory / "0.part", long_ago)
    draft.remove_abandoned()
    left = ["0.part", f"4.{'2' * 16}", f"store.{'1' * 16}", f"store.{'2' * 16}"]
    assert sorted(path.name for path in draft.directory.iterdir()) == left


def test_a_users_own_draft_is_kept_for_a_week_too(tmp_path: Path) -> None:
    old, young = (tmp_path / f".{digit * 24}.1000.draft" for digit in "01")
    old.mkdir()
    young.mkdir()
    aged(old, ABANDONED_SECONDS + 60)
    Draft(tmp_path / ("a" * 24)).remove_abandoned()
    assert not old.exists() and young.exists()
