"""The benchmark runs, on a small model, and records what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.serving.vllm.conftest import REASONER
from tests.support.running import ROOT
from tests.test_gpu_check import check_everything


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU's check this is the plan without one")
@pytest.mark.timeout(600)
def test_the_check_of_a_gpu_has_a_part_for_vllm(tmp_path: Path) -> None:
    rows = check_everything(tmp_path, "serving_times")["serving_times"]
    assert [row["right"] for row in rows if "right" in row] == [True]
    assert [row["case"] for row in rows if "speedup" in row] == ["batch 1, 256 tokens", "batch 2, 256 tokens"]


RANDOM = "--heads 4 --kv-heads 2 --head-dim 32 --hidden-size 32 --block-size 32"


@pytest.mark.parametrize("model", [RANDOM, f"--model {REASONER}"])
@pytest.mark.timeout(600)
def test_serving(model: str, tmp_path: Path) -> None:
    few = "--lengths 128 512 --budget 128 --batches 1 4 --rounds 1 --tokens 4 --threads 1"
    run = f"benchmarks/serving.py {model} {few} --output {tmp_path}".split()
    done = subprocess.run([sys.executable, *run], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    (table,) = tmp_path.glob("*.json")
    record = json.loads(table.read_text())
    assert record["options"]["vllm"]
    assert [(row["length"], row["batch"]) for row in record["rows"]] == [(128, 1), (128, 4), (512, 1), (512, 4)]
    for row in record["rows"]:
        assert all(ms > 0 for ms in row["step_median_ms"].values())
        assert row["ratios"]["vllm_gate over vllm_dense"] > 0
        assert row["ratios"]["over the floor"] > -1
    if RANDOM not in model:
        assert (record["options"]["model"], record["options"]["layers"]) == ("tiny-reasoner", 4)
