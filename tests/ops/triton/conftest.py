"""Tests of the Triton backend, on a GPU or in Triton's interpreter.

Triton reads ``TRITON_INTERPRET`` at import, so `tests/ops/test_triton.py` starts processes of their own for the
interpreter. Otherwise these files are collected only on a GPU.
"""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.support.op_inputs import INTERPRETING

NARROW = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]
"""The interpreter's products of bfloat16 are wrong."""

if not INTERPRETING and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Outside of the interpreter these are tests of a GPU: ``pytest -m gpu``."""
    for item in items:
        if not INTERPRETING and "tests/ops/triton" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


def small_tiles(monkeypatch: pytest.MonkeyPatch, rows: int = 32, keys: int = 32, two_loops: bool = True) -> None:
    """Small tiles for all dtypes, so that short segments have several of them in both directions."""
    from seergate.ops.triton_impl import launch, teacher

    def tiles(group, dim, v_dim, dtype, gpu):
        pack = launch.heads_per_tile(group)
        return launch.TeacherLaunch(max(1, rows // pack), pack, keys, 4, 1, two_loops)

    monkeypatch.setattr(teacher, "teacher_launch", tiles)


def moved(given: Any, device: torch.device | str) -> Any:
    """The same tuple or dictionary with its tensors on the device."""
    return tree_map_only(torch.Tensor, lambda x: x.to(device), given)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETING else "cuda")


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public ops run the Triton backend, on a GPU too."""
    monkeypatch.setenv("SEERGATE_BACKEND", "triton")
