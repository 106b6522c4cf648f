"""Runs every file of `tests/ops/triton` in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

SHARED = {
    "tests/ops/test_selection.py": "",
    "tests/ops/test_pooling.py": "not accumulated_in_fp32",
    "tests/ops/test_sparse_decode.py": "not bfloat16",
    "tests/ops/test_compression.py": "not bfloat16",
}
"""Tests of the public ops that hold for every backend, and what to leave out: the interpreter rounds to bfloat16 by
cutting off, and multiplies matrices of bfloat16 wrongly."""

OWN = {path.relative_to(ROOT).as_posix(): "" for path in sorted(Path(__file__).parent.glob("triton/test_*.py"))}


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.mark.skipif(
    release(triton.__version__) < (3, 7) and release(numpy.__version__) >= (2, 4),
    reason="the interpreter of Triton 3.6 turns arrays of one number into int, which NumPy 2.4 refuses",
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", [*SHARED, *OWN])
def test_in_the_interpreter(path: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    env |= {"TRITON_INTERPRET": "1", "SEERGATE_BACKEND": "triton"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path, "-k", (SHARED | OWN)[path]]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) and "skipped" not in done.stdout, done.stdout[-2000:]
