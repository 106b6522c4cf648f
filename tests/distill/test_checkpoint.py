"""Checkpoints are whole or not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seergate.distill import checkpoint as module
from seergate.distill import load_train_config
from seergate.distill.checkpoint import (
    Checkpoint,
    at_its_commits,
    begun,
    check_same_run,
    clear_drafts,
    load_checkpoint,
    newest_checkpoint,
    note_commits,
    random_states,
    read_record,
    remove_checkpoints,
    save_checkpoint,
    set_random_states,
)
from seergate.distill.engines import MOMENTS, OptimizerState
from seergate.errors import SeergateError


def make(step: int) -> Checkpoint:
    gates = {"layers.0.q_proj.weight": torch.full((2, 3), float(step)), "layers.0.q_norm.weight": torch.ones(3)}
    moments = {m: {name: torch.randn_like(x) for name, x in gates.items()} for m in MOMENTS}
    progress, asked = {"best_kl": 0.1 + step}, {"revision": "v1", "data_revision": None}
    return Checkpoint(OptimizerState(gates, moments, step), {"lr": 0.1}, random_states(), progress, asked)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_round_trip_is_exact(tmp_path: Path) -> None:
    saved = make(7)
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved, keep=2))
    assert loaded.optimizer.step == 7 and loaded.run == saved.run and loaded.progress == saved.progress
    assert loaded.asked == saved.asked
    for part in ("gates", *MOMENTS):
        a, b = (c.optimizer.gates if part == "gates" else c.optimizer.moments[part] for c in (saved, loaded))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_random_states_come_back() -> None:
    states = random_states()
    first = torch.rand(3)
    set_random_states(states)
    assert torch.equal(torch.rand(3), first)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (3, 20, 100):
        save_checkpoint(tmp_path, make(step), keep=2)
    assert names(tmp_path) == ["step-00000020", "step-00000100"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000100"
    assert newest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("moment", ["save_file", "flush", "_discard"])
def test_a_kill_while_saving_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save_checkpoint(tmp_path, make(1), keep=1)

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, moment, killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, make(2), keep=1)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert load_checkpoint(newest).optimizer.step == (2 if moment == "_discard" else 1)  # it was whole by then
    clear_drafts(tmp_path)
    assert all(name.startswith("step-") for name in names(tmp_path))
    save_checkpoint(tmp_path, make(3), keep=1)
    assert names(tmp_path) == ["step-00000003"]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make(5), keep=1)
    tensors = path / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    with pytest.raises(SeergateError, match=r"step-00000005 is damaged"):
        load_checkpoint(path)
    (path / "state.json").write_text('{"format": 99}')
    with pytest.raises(SeergateError, match="format 99"):
        load_checkpoint(path)


def test_starting_over_removes_everything(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(1), keep=1)
    (tmp_path / ".draft-step-00000002-99").mkdir()
    remove_checkpoints(tmp_path)
    assert names(tmp_path) == []


def test_a_run_keeps_to_the_commits_that_it_began_with() -> None:
    config = load_train_config("org/model", {"data": "org/rows"})
    began = {"revision": "a" * 40, "data_revision": "b" * 40}
    record = {"run": began, "asked": {"revision": None, "data_revision": "v1"}}

    def asks(revision: str | None, data_revision: str | None) -> dict[str, str | None]:
        kept, _ = at_its_commits(replace(config, revision=revision, data_revision=data_revision), record)
        return {name: getattr(kept, name) for name in began}

    assert asks(None, None) == asks(None, "v1") == asks("a" * 40, None) == began
    assert asks("main", "v2") == {"revision": "main", "data_revision": "v2"}  # said now, and not what was said before
    before = {"run": {"revision": None, "data_revision": "v1"}}  # of a version that kept no commits
    nothing = {"revision": None, "data_revision": None}
    assert at_its_commits(config, before) == at_its_commits(config, None) == (config, nothing)


def test_what_was_asked_for_first_is_remembered() -> None:
    """Otherwise ``v1``, nothing, ``v1`` would take a branch for one that nobody has named yet."""
    config = load_train_config("org/model", {"data": "org/rows"})
    record = {"run": {"revision": None, "data_revision": "b" * 40}, "asked": {"revision": None, "data_revision": "v1"}}
    for again, remembered in ((None, "v1"), ("v1", "v1"), ("b" * 40, "v1"), ("v2", "v2")):
        _, asked = at_its_commits(replace(config, data_revision=again), record)
        assert asked == {"revision": None, "data_revision": remembered}


def test_commits_are_noted_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    asked: dict[str, str | None] = {"revision": None, "data_revision": "v1"}
    config = load_train_config("org/model", {"data": "org/rows", **asked})
    at = replace(config, revision="a" * 40, data_revision="b" * 40)
    assert begun(tmp_path / "run") is None
    note_commits(tmp_path / "run", at, asked)
    assert at_its_commits(config, begun(tmp_path / "run")) == (at, asked)
    other = replace(config, data="org/others")  # a revision of one dataset says nothing about another
    assert at_its_commits(other, begun(tmp_path / "run")) == (replace(other, revision="a" * 40), asked)
    assert names(tmp_path / "run") == ["commits.json"]
    save_checkpoint(tmp_path / "run" / "checkpoints", make(3), keep=1)
    record = begun(tmp_path / "run")
    assert record is not None and record["step"] == 3
    remove_checkpoints(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "commits.json").write_text("{")
    with pytest.raises(SeergateError, match=r"commits\.json is damaged; delete it"):
        begun(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "refused"),
    [({}, None), ({"tokens": None}, None), ({"tokens": None, "asked": None}, 2), ({"tokens": 99}, 99)],
)
def test_tokens_of_another_format_are_refused_at_once(
    tmp_path: Path, changes: dict[str, int | None], refused: int | None
) -> None:
    path = save_checkpoint(tmp_path, make(5), keep=1)
    record = json.loads((path / "state.json").read_text()) | changes
    (path / "state.json").write_text(
        json.dumps({k: v for k, v in record.items() if k not in changes or v is not None})
    )
    if refused is None:
        assert read_record(path)["step"] == 5
    else:
        with pytest.raises(SeergateError, match=f"tokens of format {refused} and this version makes format 3; use"):
            read_record(path)


def test_a_revision_is_named_before_the_fingerprint_that_it_changes(tmp_path: Path) -> None:
    found = {"revision": "a", "model_fingerprint": "a", "data_revision": None, "data_fingerprint": "d"}

    def check(changes: dict[str, str], data_revision: str | None = None) -> None:
        check_same_run(tmp_path, found, found | changes, {"revision": None, "data_revision": data_revision})

    check({"data_revision": "b"})  # nobody knew which it was; the data are the same
    with pytest.raises(SeergateError, match="made with revision='a' and this run has 'c'"):
        check({"revision": "c", "model_fingerprint": "c"})
    with pytest.raises(SeergateError, match="made with data_fingerprint='d' and this run has 'e'"):
        check({"data_revision": "b", "data_fingerprint": "e"})
    found["data_revision"] = "v1"  # neither did anybody know it here, but what was asked for
    check({"data_revision": "b"}, "v1")
    with pytest.raises(SeergateError, match="made with data_revision='v1' and this run has 'b'"):
        check({"data_revision": "b"}, "v2")
    with pytest.raises(SeergateError, match="made with data_fingerprint='d' and this run has 'e'"):
        check({"data_revision": "b", "data_fingerprint": "e"}, "v1")
