"""Where a run's numbers go."""

import importlib.util
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seergate.distill.callbacks import EvalLog, StepLog
from seergate.distill.config import load_train_config
from seergate.distill.tracking import check_trackers, open_trackers
from seergate.distill.training_run import scheduled_rate
from tests.distill.conftest import scalars, trained
from tests.support.running import refused

STEP = StepLog(1, 0.5, [0.25, 0.75], {32: [0.5, 0.7]}, (0, 3), 0.1, 1e-3, 100, 2.0, 1.0)
EVAL = EvalLog(1, [0.25, 0.75], {32: [[0.5, 0.6], [0.7, 0.9]]}, (0, 3))


def test_tensorboard_holds_every_scalar_of_every_step(config):
    out, heard = trained(config)
    for name in (
        "kl/mean", "kl/layer_0", "kl/layer_1", "loss", "recall_at_32/mean", "recall_at_128/layer_1", "grad_norm",
        "learning_rate", "speed/tokens_per_second", "speed/memory_gb",
    ):  # fmt: skip
        assert [step for step, _ in scalars(out, name)] == list(range(1, 9)), name
    for name, values in (
        ("kl/mean", {log.step: log.kl for log in heard.steps}),
        ("learning_rate", {step: scheduled_rate(config, step - 1) for step in range(1, 9)}),
        ("held_out/kl", {log.step: log.kl for log in heard.evals}),
        ("held_out/recall_at_32", {log.step: log.mean_recall()[32] for log in heard.evals}),
    ):
        assert dict(scalars(out, name)) == pytest.approx(values, rel=1e-5), name
    assert [log.step for log in heard.evals] == [4, 8]


def test_tensorboard_leaves_the_errors_of_threads_to_others(tmp_path: Path) -> None:
    before = threading.excepthook
    (tracker,) = open_trackers(load_train_config("tiny-reasoner", {"output_dir": str(tmp_path)}), 1)
    tracker.close()
    assert threading.excepthook is before


def test_none_writes_nothing(tmp_path: Path) -> None:
    config = load_train_config("tiny-reasoner", {"output_dir": str(tmp_path), "report_to": "none"})
    assert open_trackers(config, 1) == [] and list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_installed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_train_config("tiny-reasoner", {"report_to": "tensorboard,wandb"})
    (tmp_path / "wandb").mkdir()  # as an earlier run leaves it
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    if getattr(importlib.util.find_spec("wandb"), "origin", None):
        check_trackers(config)
    else:
        refused("report_to names wandb, which is not installed; run: pip", check_trackers, config)


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_services_keep_a_run_that_continues_as_one(service, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip(service)
    config = load_train_config("tiny-reasoner", {"output_dir": str(tmp_path / "run"), "report_to": service})
    config.run_dir.mkdir()
    for first in (1, 2):
        (tracking,) = open_trackers(config, first)
        tracking.on_step(replace(STEP, step=first))
        tracking.on_eval(replace(EVAL, step=first))
        tracking.close()
    kept = {path.stem for path in tmp_path.rglob("*.wandb" if service == "wandb" else "*.db")}
    assert len(kept) == 1


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_a_run_that_starts_over_is_not_appended_to_the_one_before(service, tmp_path, monkeypatch):
    """W&B ignores steps below those that it has. Arguments would win over its environment variables."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, service, SimpleNamespace(init=lambda **given: asked.append(given)))
    config = load_train_config("tiny-reasoner", {"output_dir": str(tmp_path), "report_to": service})
    for first in (1, 2):
        open_trackers(config, first)
    assert [given.get("resume") for given in asked] == [None, "allow"] and asked[0]["project"] == "seergate"
    for name in ("PROJECT", "NAME", "DIR", "RUN_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "mine")
    open_trackers(config, 2)
    given = {"config", "resume"} if service == "wandb" else {"config", "name", "project", "resume"}
    assert asked[-1].keys() == given
