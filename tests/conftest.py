"""What holds for every test: no network, one thread, fixed seeds, poisoned memory, no use of what is going away."""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

# Read when the libraries are imported, so they are set before any of them is.
if os.environ.get("SEERGATE_TEST_HUB") != "1":
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.models import tiny_model

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

torch.set_num_threads(1)  # pytest-xdist runs one process per core; more threads would only fight over them

# PyTorch notes at the first use of a device context which functions make tensors. Let that be now, before the tests
# replace some: a model of eight billion weights that is meant to be on "meta" would otherwise be made in memory.
with torch.device("meta"):
    torch.zeros(1)

# No deadline: the first call of an op may compile. In CI the same examples are drawn every time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
if os.environ.get("TRITON_INTERPRET") == "1":  # slow: kernels run in Python
    hypothesis.settings.register_profile("interpreted", hypothesis.settings(), max_examples=10)
    hypothesis.settings.load_profile("interpreted")


def pytest_configure(config: pytest.Config) -> None:
    """Most tests of what evicts have prompts beyond the budget; that it warns of them is tested by itself."""
    config.addinivalue_line("filterwarnings", r"ignore:.*a prompt has \d+ tokens and token_budget is:UserWarning")
    metadata = tempfile.TemporaryDirectory()
    config.add_cleanup(metadata.cleanup)
    _declare_entry_points(Path(metadata.name))
    sys.path.insert(0, metadata.name)


def _declare_entry_points(folder: Path) -> None:
    """Write what `pip install -e .` writes: commands and plugins are this checkout's, whatever is installed."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    written = folder / f"seergate-{project['version']}.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: seergate\nVersion: {project['version']}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    with (written / "entry_points.txt").open("w") as file:
        for group, targets in groups.items():
            file.writelines([f"[{group}]\n", *(f"{name} = {target}\n" for name, target in targets.items())])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run."""
    needs = {
        "gpu": (torch.cuda.is_available(), "needs a CUDA device"),
        "hub": (os.environ.get("SEERGATE_TEST_HUB") == "1", "needs the Hugging Face Hub (SEERGATE_TEST_HUB=1)"),
    }
    for item in items:
        for marker, (available, reason) in needs.items():
            if not available and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def model() -> PreTrainedModel:
    """A tiny Qwen3 of random weights, for the test alone."""
    return tiny_model("qwen3")


def _poisoned(allocate):
    """`allocate`, but floating-point memory holds NaN instead of whatever was there before."""

    def wrapper(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        # A compiled graph allocates by itself, and `out=` hands back memory of the caller.
        skipped = tensor.is_meta or torch.compiler.is_compiling() or "out" in kwargs
        if tensor.is_floating_point() and not skipped:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return wrapper


@pytest.fixture(autouse=True)
def _poisoned_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading memory that was never written gives NaN, not a lucky zero (as in flash-linear-attention's tests)."""
    if request.node.get_closest_marker("plain_empty"):
        return
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


_GOING_AWAY = re.compile(r"deprecat|will be removed|will be an error|no longer supported in", re.IGNORECASE)


_OLD_NAMES = "`past_key_values`/`cache_params` are deprecated"  # before 5.24, transformers knew no other


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if _GOING_AWAY.search(message) and not message.startswith(_OLD_NAMES):
            self.messages.append(message)


@pytest.fixture(autouse=True)
def _no_logged_deprecations() -> Iterator[None]:
    """transformers logs most of its deprecations instead of warning; a test that causes one fails."""
    logger = logging.getLogger("transformers")
    collector = _Collector()
    logger.addHandler(collector)
    yield
    logger.removeHandler(collector)
    assert not collector.messages, f"transformers says that this is going away: {collector.messages}"
