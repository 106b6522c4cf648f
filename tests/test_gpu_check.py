"""`benchmarks/gpu_check.py`: its plan in Triton's interpreter, and on a GPU where there is one (``pytest -m gpu``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("machine", "right", "large", "sanitizer", "generation", "decode_times", "teacher_times", "lesson_times",
         "model_times")  # fmt: skip


def gpu_check(folder: Path, *steps: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    command = [sys.executable, "benchmarks/gpu_check.py", "--minutes", "60", "--output", str(folder), "--only", *steps]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (path,) = folder.glob("gpu_check-*.json")
    return done, json.loads(path.read_text())


def check_everything(folder: Path, *steps: str) -> None:
    done, record = gpu_check(folder, *steps)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(record["steps"]) == list(steps) and all(record["steps"][name]["rows"] for name in steps)
    assert not [line for line in record["verdict"].values() if "WRONG" in line]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the whole plan runs")
@pytest.mark.timeout(600)
def test_the_plan_without_a_gpu(tmp_path):
    check_everything(tmp_path, "right", "teacher_times")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_whole_plan_without_a_gpu(tmp_path):
    check_everything(tmp_path, *STEPS)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", STEPS)
def test_on_a_gpu(step, tmp_path):
    check_everything(tmp_path, step)


WRONG = """
import json, sys
from pathlib import Path
sys.path.insert(0, "benchmarks")
import gpu_check
pool = gpu_check.ops.pool_keys
gpu_check.ops.pool_keys = lambda k, *rest: pool(k, *rest) * 1.01
gpu_check.STEPS["right"] = gpu_check.Step(gpu_check.right_keys, 60)
gpu_check.child("right", Path(sys.argv[1], "rows"))
rows = [json.loads(line) for line in Path(sys.argv[1], "rows").read_text().splitlines()]
slow = gpu_check.perform("model_times", 0.2, Path(sys.argv[1]))
print(json.dumps(gpu_check.verdict({"right": {"ended": "well", "rows": rows}, "model_times": slow})))
"""


def test_a_wrong_kernel_is_called_wrong_and_a_slow_step_is_stopped(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRONG, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["pool_keys"] == "WRONG in 3 of 3: max"
    assert verdict["update_compressed_keys"] == "right in 4 checks"
    assert verdict["step model_times"].startswith("stopped after 0 s")
