"""The Triton backend's tests: in its interpreter on the CPU, or on a GPU where there is one.

Triton reads ``TRITON_INTERPRET`` when it is imported, and other libraries import it, so the interpreter needs a
process of its own: `tests/ops/test_triton.py` starts one per file here. A plain run of pytest collects these files
only on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.op_inputs import INTERPRETING

if not INTERPRETING and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Outside of the interpreter these are tests of a GPU: ``pytest -m gpu``."""
    for item in items:
        if not INTERPRETING and "tests/ops/triton" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETING else "cuda")


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public ops run the Triton backend, on a GPU too."""
    monkeypatch.setenv("SEERGATE_BACKEND", "triton")
