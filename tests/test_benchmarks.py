"""The benchmarks run, record what they promise, and refuse to time what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
TINY = """--device cpu --threads 1 --kv-heads 2 --group 2 --head-dim 16 --gate-dim 8 --block-size 16 --repeats 1"""
RUN = """
import runpy, sys
sys.path.insert(0, "benchmarks")
{before}
runpy.run_path("benchmarks/decode.py", run_name="__main__")
"""


def decode(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN.format(before=before), *TINY.split(), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_decode(tmp_path: Path) -> None:
    done = decode("--lengths", "64", "128", "--sparsities", "0.5", "0.9", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("*.json")
    record = json.loads(table.read_text())
    assert record["machine"]["torch"] and record["machine"]["commit"] and record["options"]["bandwidth"] > 0
    assert [(row["length"], row["budget"]) for row in record["rows"]] == [(64, 32), (64, 16), (128, 64), (128, 16)]
    for row in record["rows"]:
        dense = row[f"{row['best_dense']}_median_ms"]
        assert row["speedup"] == pytest.approx(dense / row["sparse_median_ms"], abs=0.02)
        assert row["roofline_fraction"] > 0 and row["relative_error"] < 1e-4
    assert table.with_suffix(".png").stat().st_size > 10_000


FAILING = """
import dense_baselines, torch
from seergate import ops
right = ops.sparse_decode
def moody(q, k, v):
    if k.shape[2] == 128:
        raise ValueError("not at this length\\nand more")
    return dense_baselines.sdpa_stock(q, k, v)
def small(q, k, *rest):
    if k.shape[2] == 96:
        raise torch.OutOfMemoryError("no memory")
    return right(q, k, *rest)
dense_baselines.ON_CPU["moody"], ops.sparse_decode = moody, small
"""


def test_decode_records_what_fails_and_goes_on(tmp_path: Path) -> None:
    lengths = ("64", "96", "128", "192")
    done = decode("--lengths", *lengths, "--sparsities", "0.5", "--output", str(tmp_path), before=FAILING)
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("*.json")
    rows = {row["length"]: row for row in json.loads(table.read_text())["rows"]}
    assert set(rows) == {64, 96, 128, 192}
    assert rows[64]["failed"] == rows[192]["failed"] == {} and rows[192]["moody_median_ms"] > 0
    assert rows[128]["failed"] == {"moody": "ValueError: not at this length"} and rows[128]["speedup"] > 0
    assert rows[96]["failed"] == {"cell": "OutOfMemoryError: no memory"} and "speedup" not in rows[96]
    assert "moody failed: ValueError: not at this length" in done.stdout


def test_decode_keeps_what_it_has_when_it_is_stopped(tmp_path: Path) -> None:
    stopping = FAILING.replace("raise torch.OutOfMemoryError", "raise SystemExit")
    done = decode("--lengths", "64", "96", "--sparsities", "0.5", "--output", str(tmp_path), before=stopping)
    assert done.returncode == 1
    (table,) = tmp_path.glob("*.json")
    assert [row["length"] for row in json.loads(table.read_text())["rows"]] == [64]


END_TO_END = """--device cpu --threads 1 --hidden-size 32 --heads 4 --kv-heads 2 --head-dim 16 --block-size 8
--budget 32 --lengths 64 200 --batch-lengths 96 --prompt 24 --rounds 2 --tokens 3"""


def end_to_end(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    run = RUN.replace("decode.py", "end_to_end.py").format(before=before)
    command = [sys.executable, "-c", run, *END_TO_END.split(), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_end_to_end(tmp_path: Path) -> None:
    done = end_to_end("--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "end_to_end-cpu-float32-1t.json").read_text())
    assert set(record["options"]["first_token_seconds"]) == set(record["rows"][0]["ways"])
    assert [(row["batch"], row["lengths"]) for row in record["rows"]] == [
        (1, [64]), (1, [200]), (4, [96, 84, 72, 48])
    ]  # fmt: skip
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, two layers, two heads of 16 float32
    for row in record["rows"]:
        ways, dense = row["ways"], row["ways"][row["best_dense"]]
        assert dense["token_median_ms"] == min(ways[f"hf_{kind}"]["token_median_ms"] for kind in ("static", "dynamic"))
        for name, speedup in row["speedup"].items():
            assert speedup == pytest.approx(dense["token_median_ms"] / ways[name]["token_median_ms"])
        assert ways["dense"]["bytes_read_per_step"] >= sum(row["lengths"]) * per_token
        for name in ("gate", "gate_offloaded"):
            assert 0 < ways[name]["density"] * sum(row["lengths"]) <= row["batch"] * 32 < sum(row["lengths"])
        assert 0 < ways["gate_offloaded"]["bytes_fetched_per_step"] <= row["batch"] * 32 * per_token
        assert ways["gate_offloaded"]["resident_bytes_peak"] < ways["gate"]["resident_bytes_peak"]


def test_end_to_end_refuses_to_time_wrong_tokens(tmp_path: Path) -> None:
    before = "from seergate import ops; right = ops.dense_decode; ops.dense_decode = lambda *a, **o: -right(*a, **o)"
    done = end_to_end("--output", str(tmp_path), before=before)
    assert done.returncode == 1 and "gives other tokens than the plain model" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


FETCH_AHEAD = "--threads 1 --variables 8 --new-tokens 12 --methods quest --budgets 32 --rooms 2 --aheads 2"


def test_fetch_ahead(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/fetch_ahead.py", *FETCH_AHEAD.split(), "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    none, some = json.loads((tmp_path / "fetch_ahead.json").read_text())["rows"]
    assert (none["ahead"], none["ahead_bytes_per_step"], none["used"], none["spared"]) == (0, 0, None, 0)
    assert some["ahead"] == 2 and some["ahead_bytes_per_step"] > 0 and 0 < some["used"] < 1
    on_demand = [row["on_demand_bytes_per_step"] for row in (none, some)]
    assert some["spared"] == pytest.approx(1 - on_demand[1] / on_demand[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "ops.sparse_decode = lambda q, k, v, *rest: 1.01 * right(q, k, v, *rest)",
            "sparse_decode has a relative error",
        ),
        (
            "ops.sparse_decode = lambda q, k, v, *rest: right(q, k, v, *rest) + 0 * v.sum()",
            "sparse_decode has",
        ),
        (
            "ops.select_blocks = lambda scores, *rest, **rule: chosen(-scores, *rest, **rule)",
            "select_blocks with {'token_budget': 64} is wrong",
        ),
    ],
)
def test_decode_refuses_to_time_wrong_kernels(wrong: str, message: str, tmp_path: Path) -> None:
    before = f"from seergate import ops; right, chosen = ops.sparse_decode, ops.select_blocks; {wrong}"
    done = decode("--lengths", "64", "--output", str(tmp_path), before=before)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
