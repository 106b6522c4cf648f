"""A run survives SIGKILL wherever it falls; `python -m tests.distill.kills --kills 100` does it a hundred times."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from seergate.distill import TrainConfig
from tests.distill.kills import PHASES, storm
from tests.distill.test_trainer import config, model_dir  # noqa: F401 (fixtures)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks a process that has loaded PyTorch")
def test_killed_anywhere_it_ends_bit_identical(config: TrainConfig) -> None:  # noqa: F811
    fell = storm(replace(config, packs_per_step=1, eval_packs=1), kills=15)
    assert set(fell) == set(PHASES) and fell.total() == 15
