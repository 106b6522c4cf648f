"""For every test: no network, one thread, fixed seeds, poisoned memory; deprecation warnings are errors."""

import gc
import logging
import os
import random
import re
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

# The libraries read these when they are imported.
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

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # pytest-xdist runs one process per core; more threads would only fight over them

# PyTorch registers the functions that make tensors at the first use of a device context: before tests replace some,
# or a large model on "meta" would be made in memory.
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
    """Ignore the warning of evicting methods about prompts beyond the budget; it has a test of its own."""
    config.addinivalue_line("filterwarnings", r"ignore:.*a prompt has \d+ tokens and token_budget is:UserWarning")
    metadata = tempfile.TemporaryDirectory()
    config.add_cleanup(metadata.cleanup)
    _declare_entry_points(Path(metadata.name))
    sys.path.insert(0, metadata.name)


def _declare_entry_points(folder: Path) -> None:
    """Write entry points as `pip install -e .` does, so that commands and plugins are this checkout's."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    written = folder / f"seergate-{project['version']}.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: seergate\nVersion: {project['version']}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    with (written / "entry_points.txt").open("w") as file:
        for group, targets in groups.items():
            file.writelines([f"[{group}]\n", *(f"{name} = {target}\n" for name, target in targets.items())])


def pytest_collection_finish() -> None:
    """Leave what is imported out of every later `gc.collect`, such as those of an evaluation, until the tests end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


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
    """``allocate``, but with NaN in floating-point memory."""

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
    """Memory that was never written is NaN (as in flash-linear-attention's tests)."""
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


@pytest.fixture(autouse=True)
def _no_logged_deprecations() -> Iterator[None]:
    """A test fails if transformers logs a deprecation, which it does more often than it warns."""
    logger, handler, records = logging.getLogger("transformers"), logging.Handler(logging.WARNING), []
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    deprecations = filter(_GOING_AWAY.search, (record.getMessage() for record in records))
    deprecations = [message for message in deprecations if not message.startswith(_OLD_NAMES)]
    assert not deprecations, f"transformers deprecates this: {deprecations}"
