"""The benchmark of distillation runs, records what it promises, and refuses to time what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
TINY = """--device cpu --threads 1 --kv-heads 2 --group 3 --head-dim 16 --gate-dim 8 --block-sizes 16 --rounds 1"""
RUN = """
import runpy, sys
sys.path.insert(0, "benchmarks")
from seergate import ops
attention, loss = ops.attention_with_block_targets, ops.gate_kl
{before}
runpy.run_path("benchmarks/distill.py", run_name="__main__")
"""


def distill(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN.format(before=before), *TINY.split(), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_distill(tmp_path: Path) -> None:
    done = distill("--lengths", "100", "256", "--baseline-up-to", "128", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("*.json")
    record = json.loads(table.read_text())
    assert record["machine"]["torch"] and record["machine"]["commit"] and record["options"]["backend"] == "torch"
    small, large = record["rows"]
    assert (small["length"], large["length"]) == (100, 256)
    for row in record["rows"]:
        assert max(row[f"{name}_error"] for name in ("loss", "dqg", "dkg")) < 1e-4
        for name in ("gate_kl", "gate_kl_given_lse", "attention_with_block_targets", "plain_attention"):
            assert row[f"{name}_median_ms"] > 0 and row[f"{name}_peak_mb"] >= 0
    assert small["materialised_loss_error"] < 1e-5  # the baseline computes the same
    assert small["time_ratio"] == pytest.approx(
        small["gate_kl_median_ms"] / small["materialised_median_ms"], rel=0.1, abs=0.02
    )
    assert "materialised_peak_mb" not in large
    assert table.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("ops.gate_kl = lambda *a, **o: (1.01 * loss(*a, **o)[0], loss(*a, **o)[1])", "loss has a relative error"),
        (
            "ops.attention_with_block_targets = lambda q, k, v, *a: attention(q, k, v, *a)._replace(output=1.01 * v)",
            "output has a relative error",
        ),
        (  # right on short packs only
            "ops.gate_kl = lambda q, k, qg, kg, *a, **o: loss(q, k, qg if len(q) < 150 else qg * 1.01, kg, *a, **o)",
            "on the tensors to be timed",
        ),
    ],
)
def test_distill_refuses_to_time_what_is_wrong(wrong: str, message: str, tmp_path: Path) -> None:
    wrong = wrong.replace("output=1.01 * v", "output=1.01 * attention(q, k, v, *a).output")
    done = distill("--lengths", "256", "--output", str(tmp_path), before=wrong)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
