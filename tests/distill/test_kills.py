"""A run survives SIGKILL wherever it falls; `python -m tests.support.kills --kills 100` does it a hundred times."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from seergate.distill import TrainConfig
from tests.support.kills import PHASES, storm
from tests.support.running import ROOT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks a process that has loaded PyTorch")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(15, marks=pytest.mark.soak)])
def test_killed_anywhere_it_ends_bit_identical(config: TrainConfig, kills: int) -> None:
    fell = storm(replace(config, packs_per_step=1, eval_packs=1), kills=kills)
    assert fell.total() == kills and (kills < 15 or set(fell) == set(PHASES))


@pytest.mark.soak
def test_the_record_says_what_came_out(tmp_path: Path) -> None:
    file = tmp_path / "kills.json"
    command = [sys.executable, "-m", "tests.support.kills", "--kills", "2", "--record", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "final gates bit-identical" in done.stdout, done.stderr[-2000:]
    record = json.loads(file.read_text())
    (row,) = record["rows"]
    assert row["identical"] and row["kills"] == sum(row["by_phase"].values()) == 2
    assert set(row["by_phase"]) == set(PHASES)
    assert row["seconds"] > 0 and record["machine"]["torch"] and record["machine"]["commit"]
