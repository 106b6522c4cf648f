"""Checkpoints are whole or not there."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seergate.distill import checkpoint
from seergate.distill.checkpoint import check_same_run, load_checkpoint, newest_checkpoint, save_checkpoint
from seergate.distill.engines import MOMENTS
from tests.distill.conftest import assert_identical
from tests.support.running import refused


def make(step: int) -> checkpoint.Checkpoint:
    gates = {"layers.0.q_proj.weight": torch.full((2, 3), float(step)), "layers.0.q_norm.weight": torch.ones(3)}
    state = {f"gates.{name}": x for name, x in gates.items()}
    state |= {f"{moment}.{name}": torch.randn_like(x) for moment in MOMENTS for name, x in gates.items()}
    return checkpoint.Checkpoint(step, state, {"learning_rate": 0.1}, {"best_kl": 0.1 + step})


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


@pytest.mark.parametrize("older", [{}, {"random.cpu": torch.get_rng_state()}], ids=["of today", "older"])
def test_round_trip_is_exact(tmp_path, older):
    """But for the random states of an older checkpoint, which are left out."""
    saved = make(7)
    loaded = load_checkpoint(save_checkpoint(tmp_path, replace(saved, state=saved.state | older), keep=2))
    assert loaded.step == 7 and loaded.run == saved.run and loaded.progress == saved.progress
    assert_identical(loaded.state, saved.state)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (3, 20, 100):
        save_checkpoint(tmp_path, make(step), keep=2)
    assert names(tmp_path) == ["step-00000020", "step-00000100"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000100"
    assert newest_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / ".draft-step-00000002-99").mkdir()
    checkpoint.remove_checkpoints(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("moment", ["save_file", "flush", "_discard"])
def test_a_kill_while_saving_leaves_the_one_before(tmp_path, monkeypatch, moment):
    save_checkpoint(tmp_path, make(1), keep=1)

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, moment, killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, make(2), keep=1)
    assert load_checkpoint(newest_checkpoint(tmp_path)).step == (2 if moment == "_discard" else 1)  # it was whole then
    checkpoint.clear_drafts(tmp_path)
    assert all(name.startswith("step-") for name in names(tmp_path))
    save_checkpoint(tmp_path, make(3), keep=1)
    assert names(tmp_path) == ["step-00000003"]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make(5), keep=1)
    tensors = path / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    refused(r"step-00000005 is damaged", load_checkpoint, path)
    (path / "state.json").write_text('{"format": 99}')
    refused("format 99", load_checkpoint, path)
    (path / "state.json").write_text("[]")
    refused("step-00000005 is damaged", load_checkpoint, path)


def test_what_a_checkpoint_does_not_say_is_as_it_was_before_there_was_a_choice(tmp_path: Path) -> None:
    settings = {"reduction": "published", "learning_rate": 1e-3}
    before = {"scorer": "attn_gate", "target": "max", "k_pooling": ["max", "min", "avg"]}
    check_same_run(tmp_path, settings, settings | before)
    message = "made with scorer='attn_gate' and this run has 'msa'"
    refused(message, check_same_run, tmp_path, settings, settings | {"scorer": "msa"})
    refused("made with loss_scale=1.0", check_same_run, tmp_path, settings, settings | {"loss_scale": 9.0})


def test_a_revision_is_named_before_the_fingerprint_that_it_changes(tmp_path: Path) -> None:
    a, b, c = (digit * 40 for digit in "abc")
    record = {"revision": a, "model_fingerprint": a, "data_revision": None, "data_fingerprint": "d"}

    def check(**changes: str) -> None:
        check_same_run(tmp_path, record, record | changes)

    check(data_revision=b)  # it was not known which it was; the data are the same
    refused(f"made with revision='{a}' and this run has '{c}'", check, revision=c, model_fingerprint=c)
    refused("made with data_fingerprint='d' and this run has 'e'", check, data_revision=b, data_fingerprint="e")
