"""The benchmark runs, on a small model, and records what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT


@pytest.mark.timeout(600)
def test_serving(tmp_path: Path) -> None:
    small = "--heads 4 --kv-heads 2 --head-dim 32 --hidden-size 32 --block-size 32 --budget 128 --rounds 1 --tokens 4"
    run = f"benchmarks/serving.py {small} --lengths 512 --batches 1 4 --threads 1 --output {tmp_path}".split()
    done = subprocess.run([sys.executable, *run], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    (table,) = tmp_path.glob("*.json")
    record = json.loads(table.read_text())
    assert record["options"]["vllm"]
    assert [(row["length"], row["batch"]) for row in record["rows"]] == [(512, 1), (512, 4)]
    for row in record["rows"]:
        assert all(ms > 0 for ms in row["step_median_ms"].values())
        assert row["ratios"]["vllm_gate over vllm_dense"] > 0
