"""Runs `tests/pretended_gpu` in a process of its own, which has the device guard from its start."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils.cpp_extension import get_cxx_compiler, is_ninja_available

from tests.support.running import ROOT


def missing() -> str | None:
    """Why there can be no pretended GPU here."""
    if not sys.platform.startswith("linux"):
        return "the guard is loaded by LD_PRELOAD, which Linux has"
    if torch.backends.cuda.is_built():
        return "this PyTorch has a device guard for CUDA of its own"
    if shutil.which(get_cxx_compiler()) is None or not is_ninja_available():
        return "the guard has to be compiled, for which there is no C++ compiler or no ninja"
    return None


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.timeout(1800)
def test_on_a_pretended_gpu() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "tests.pretended_gpu", "-q", "--tb=short"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
