"""Runs every file of `tests/ops/triton` in Triton's interpreter, in processes of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

PARTS = {
    "decoding": (
        *("test_selection", "test_scoring", "test_sparse_decode", "test_compression"),
        *("triton/test_registration", "triton/test_decode", "triton/test_paged"),
    ),
    "distillation": ("triton/test_teacher", "triton/test_gate_kl", "test_packed_attention"),
}
"""Those outside of `tests/ops/triton` hold for every backend."""

LEFT_OUT = "not bfloat16 and not accumulated_in_fp32"
"""The interpreter rounds to bfloat16 by cutting off, and multiplies matrices of bfloat16 wrongly."""


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def test_no_file_is_forgotten() -> None:
    listed = {name for part in PARTS.values() for name in part}
    assert {f"triton/{path.stem}" for path in Path(__file__).parent.glob("triton/test_*.py")} <= listed


@pytest.mark.slow
@pytest.mark.skipif(
    release(triton.__version__) < (3, 7) and release(numpy.__version__) >= (2, 4),
    reason="the interpreter of Triton 3.6 turns arrays of one number into int, which NumPy 2.4 refuses",
)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
@pytest.mark.parametrize("part", PARTS)
def test_in_the_interpreter(part: str, which: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    env |= {"TRITON_INTERPRET": "1", "SEERGATE_BACKEND": "triton"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", LEFT_OUT, "-m", f"{which} and not gpu"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/ops/{name}.py" for name in PARTS[part])]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) and "skipped" not in done.stdout, done.stdout[-2000:]
