"""A run stays at the commits that it began with, whatever is pushed meanwhile."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from seergate.distill import TrainConfig, commits, load_train_config
from tests.support.running import refused

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


@pytest.mark.parametrize("text", ["[]", '{"model": "v1"}', "{"])
def test_a_damaged_file_is_named(config: TrainConfig, tmp_path: Path, text: str) -> None:
    (tmp_path / "commits.json").write_text(text)
    refused(r"commits\.json is damaged; delete it", pinned, config, tmp_path)


def test_what_is_not_kept_is_looked_up_again(config, tmp_path, monkeypatch):
    """Of another dataset, of a run that is refused, and where nothing could be looked up."""
    with monkeypatch.context() as offline:
        offline.setattr(commits, "data_commit", lambda config: None)
        assert pinned(config, tmp_path) == "v1"
    assert pinned(config, tmp_path) == A
    assert commits.pin(replace(config, data_revision="main"), tmp_path)[0].data_revision == B
    assert pinned(config, tmp_path) == A
    assert pinned(replace(config, data="org/others"), tmp_path) == C
    assert pinned(config, tmp_path) == A


def test_each_source_of_a_mixture_has_its_own(config: TrainConfig, tmp_path: Path, monkeypatch) -> None:
    sources = {"org/a": (None, A), "org/b": ("v2", B), "c.jsonl": (None, None)}

    def look_up(one: TrainConfig) -> str | None:
        revision, commit = sources[one.data]
        assert one.data_revision == revision
        return commit

    monkeypatch.setattr(commits, "data_commit", look_up)
    config = replace(config, data="org/a:2,org/b@v2:.5,c.jsonl:1", data_revision=None)
    at, entries = commits.pin(config, tmp_path)
    assert at.data == f"org/a@{A}:2.0,org/b@{B}:0.5,c.jsonl:1.0"
    named = [(one.data, one.data_revision, share) for one, share in at.sources]
    assert named == [("org/a", A, 2.0), ("org/b", B, 0.5), ("c.jsonl", None, 1.0)]
    commits.keep(entries, tmp_path)
    monkeypatch.setattr(commits, "data_commit", lambda one: None if one.data == "c.jsonl" else C)
    assert commits.pin(config, tmp_path)[0] == at == commits.pin(at, tmp_path)[0]
