"""Engines of vLLM in this process. Without vLLM nothing is collected here: `make test-vllm` has it."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.reasoner import REASONER

# Read when vLLM is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM multiplies unwritten memory by zero, which NaN does not survive, and uses deprecated names."""
    for item in items:
        if item.path.parent.name == "vllm":
            item.add_marker(pytest.mark.plain_empty)
            for kind in ("DeprecationWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform is CUDA."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)


@contextmanager
def engine(model: Any = REASONER, seergate: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """A `vllm.LLM` in this process; gone at the end of the block."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.triton_utils import dispatcher

    # Each engine registers vLLM's kernels for CPUs again, which fails once Numba has compiled the search for n-grams.
    if dispatcher._registry:
        dispatcher.register_kernels = lambda overrides: None
    extra = {} if seergate is None else {"additional_config": {"seergate": seergate}}
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "block_size": 32}
    llm = LLM(str(model), **{**settings, **options}, **extra)
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def answers(llm: Any, prompts: list[list[int]], tokens: int, stop: bool = True) -> list[list[int]]:
    """Greedy continuations of prompts, all asked at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=not stop, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def gated_layers(llm: Any) -> dict[int, Any]:
    """Layer -> vLLM's module of its attention, of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.gated
