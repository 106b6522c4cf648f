"""A run stays at the commits that it began with, whatever is pushed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from seergate.distill import TrainConfig, commits, load_train_config
from seergate.errors import SeergateError

A, B, C = (digit * 40 for digit in "abc")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Model and dataset get another commit whenever one looks: a, b, c for the dataset."""
    answers: Iterator[str] = iter((A, B, C))
    monkeypatch.setattr(commits, "model_commit", lambda config: "f" * 40)
    monkeypatch.setattr(commits, "data_commit", lambda config: next(answers))
    return load_train_config("org/model", {"data": "org/rows", "data_revision": "v1"})


def pinned(config: TrainConfig, directory: Path) -> str | None:
    """The dataset's commit, kept."""
    at, entries = commits.pin(config, directory)
    commits.keep(entries, directory)
    assert at.revision == "f" * 40
    return at.data_revision


def test_the_first_answer_is_kept_however_the_revision_is_named(config: TrainConfig, tmp_path: Path) -> None:
    for revision in ("v1", None, "v1", A, None):
        assert pinned(replace(config, data_revision=revision), tmp_path) == A
    assert pinned(replace(config, data_revision="main"), tmp_path) == B  # what is asked for now is another thing
    assert pinned(replace(config, data_revision=None), tmp_path) == B
    assert pinned(replace(config, data_revision=None, resume=False), tmp_path) == C


def test_another_dataset_has_another_commit(config: TrainConfig, tmp_path: Path) -> None:
    assert pinned(config, tmp_path) == A
    assert pinned(replace(config, data="org/others"), tmp_path) == B
    assert pinned(config, tmp_path) == A


def test_what_a_refused_run_has_looked_up_is_not_kept(config: TrainConfig, tmp_path: Path) -> None:
    assert pinned(config, tmp_path) == A
    assert commits.pin(replace(config, data_revision="main"), tmp_path)[0].data_revision == B
    assert pinned(config, tmp_path) == A


def test_an_unknown_commit_is_looked_up_again(config: TrainConfig, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as offline:
        offline.setattr(commits, "data_commit", lambda config: None)
        assert pinned(config, tmp_path) == "v1"
    assert pinned(config, tmp_path) == A


def test_a_damaged_file_is_named(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / commits.FILE).write_text("{")
    with pytest.raises(SeergateError, match=r"commits\.json is damaged; delete it"):
        commits.pin(config, tmp_path)
