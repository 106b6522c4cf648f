"""`benchmarks/gpu_check.py`: its plan in Triton's interpreter, and on a GPU with ``pytest -m gpu``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.running import ROOT

pytest.importorskip("triton")

STEPS = ("machine", "right", "large", "sanitizer", "generation", "gate_times", "decode_times", "teacher_times",
         "lesson_times", "train", "model_times", "serving_times")  # fmt: skip


def check_everything(folder: Path, *steps: str) -> dict:
    """Run steps of the plan, which must find nothing wrong; returns their rows."""
    command = [sys.executable, "benchmarks/gpu_check.py", "--minutes", "60", "--output", str(folder), "--only", *steps]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = folder.glob("gpu_check-*.json")
    record = json.loads(path.read_text())
    assert list(record["steps"]) == list(steps) and all(record["steps"][name]["rows"] for name in steps)
    assert not [line for line in record["verdict"].values() if "WRONG" in line]
    return {name: step["rows"] for name, step in record["steps"].items()}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the whole plan runs")
@pytest.mark.timeout(600)
def test_the_plan_without_a_gpu(tmp_path):
    rows = check_everything(tmp_path, "right", "gate_times", "teacher_times", "train")
    apart = [row["kernel"] for row in rows["gate_times"] if row["bytes"] and row["roofline_fraction"] > 0]
    assert apart == ["score_blocks", "select_blocks", "update_compressed_keys", "pool_keys"]
    shipped = [row.get("kernel") for row in rows["teacher_times"] if row.get("tflops") and "ablated" not in row]
    targets = ["attention_with_block_targets", "block targets, lse known"]
    assert shipped == ["packed_attention", *targets, None]  # and PyTorch's
    packs = [row for row in rows["train"] if "frozen_ms" in row]
    assert [row["case"].split("samples ")[1] for row in packs] == 3 * ["2 x 24", "1 x 48"]
    assert all(row["ms"] > 0 and row["frozen_ms"] > 0 and row["peak_bytes"] > 0 for row in packs)
    assert sum("nothing waits" in row["case"] for row in rows["train"]) == 3
    by_step = [row["case"] for row in rows["train"] if "limit" in row]
    assert by_step == [f"python train.py, KL of step {step}" for step in (1, 2, 3)]


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
gpu_check.NAMED["right"] = gpu_check.right_keys
gpu_check.child("right", Path(sys.argv[1], "rows"))
rows = [json.loads(line) for line in Path(sys.argv[1], "rows").read_text().splitlines()]
slow = gpu_check.perform("model_times", 0.2, Path(sys.argv[1]))
print(json.dumps(gpu_check.verdict({"right": {"ended": "well", "rows": rows}, "model_times": slow})))
gpu_check.ON_GPU = True
fact = {"kernel": "block targets", "case": "as shipped", "tflops": 300.4, "roofline_fraction": 0.4}
other = fact | {"case": "stages 2", "tflops": 500.0, "roofline_fraction": 0.7, "ablated": True}
print(json.dumps(gpu_check.verdict({"teacher_times": {"ended": "well", "rows": [fact, other]}})))
"""


def test_a_wrong_kernel_is_called_wrong_and_a_slow_step_is_stopped(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRONG, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    verdict, speed = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert verdict["pool_keys"] == "WRONG in 3 of 3: max"
    assert verdict["update_compressed_keys"] == "right in 4 checks"
    assert verdict["step model_times"].startswith("stopped after 0 s")
    assert speed == {"block targets": "timed only; roofline 0.40 (median of 1); 300 TFLOP/s (as shipped)"}
