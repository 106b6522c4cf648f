"""Where a run's numbers and pictures go."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seergate.distill.callbacks import EvalLog, StepLog
from seergate.distill.config import load_train_config
from seergate.distill.tracking import check_trackers, heat_map, open_trackers
from seergate.errors import SeergateError

STEP = StepLog(1, 0.5, [0.25, 0.75], {32: [0.5, 0.7]}, (0, 3), 0.1, 1e-3, 100, 2.0, 1.0)
EVAL = EvalLog(1, [0.25, 0.75], {32: [[0.5, 0.6], [0.7, 0.9]]}, (0, 3))


def test_the_recall_map_is_shaded_from_the_smallest_to_the_largest() -> None:
    shares = np.array([[0.90, 0.91, 0.92], [0.93, 0.94, 1.0]])
    image = heat_map(shares, (0, 7), "recall")
    left, top = 60, 36
    cells = [image.getpixel((left + j * 34 + 1, top + i * 16 + 1)) for i in range(2) for j in range(3)]
    brightness = [sum(cell) for cell in cells]
    assert brightness == sorted(brightness) and len(set(cells)) == 6
    assert cells[0] == (13, 8, 91) and cells[-1] == (253, 250, 170)
    assert heat_map(np.ones((2, 3)), (0, 7), "equal").size == image.size


def test_none_writes_nothing(tmp_path: Path) -> None:
    config = load_train_config("tiny-reasoner", {"output_dir": str(tmp_path), "report_to": "none"})
    assert open_trackers(config, 1) == [] and list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_installed_is_told_of() -> None:
    config = load_train_config("tiny-reasoner", {"report_to": "tensorboard,wandb"})
    if importlib.util.find_spec("wandb"):
        check_trackers(config)
    else:
        with pytest.raises(SeergateError, match="report_to names wandb, which is not installed; run: pip"):
            check_trackers(config)


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
    kept = list((tmp_path / ("trackio" if service == "trackio" else "run")).rglob("*.png"))
    assert len(kept) == 2
