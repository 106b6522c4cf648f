"""The benchmark of lossless decoding runs and records what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seergate.decode.speculation import expected_tokens

ROOT = Path(__file__).resolve().parent.parent
SMALL = """--problems 1 --variables 6 --new-tokens 12 --tiny-budgets 32 --tiny-draft 3 --lengths 96 --drafts 2
--budget 32 --block-size 16 --hidden-size 32 --heads 4 --kv-heads 2 --head-dim 16 --rounds 1 --tokens 5 --threads 1"""


def test_lossless_benchmark(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/lossless.py", *SMALL.split(), "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "lossless.json").read_text())
    assert record["machine"]["commit"]
    shares = [row for row in record["rows"] if row["part"] == "acceptance"]
    assert [row["method"] for row in shares] == ["gate", "quest", "oracle", "random"]
    assert all(0 <= row["acceptance"] <= 1 and 1 <= row["tokens_per_dense_pass"] <= 4 for row in shares)
    (passes,) = (row for row in record["rows"] if row["part"] == "passes")
    best = min(passes["dense_ms"], passes["hf_static_ms"])
    cycle = 2 * passes["draft_ms"] + passes["verify_ms"]
    assert passes["speedup_at_acceptance"]["0.9"] == pytest.approx(expected_tokens(0.9, 2) * best / cycle)
