"""Engines of SGLang. Without SGLang nothing is collected here: `make test-sglang` has it."""

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.reasoner import REASONER

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SGLang uses what torch is about to remove, and its processes start for a while."""
    for item in items:
        if item.path.parent.name == "sglang":
            item.add_marker(pytest.mark.plain_empty)
            for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@contextmanager
def engine(settings: dict[str, Any], page: int = 32, **options: Any) -> Iterator[Any]:
    """An engine of the tiny reasoner with the plugin's options; gone at the end of the block."""
    import sglang

    given = {
        "model_path": REASONER,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "seergate",
        "json_model_override_args": json.dumps({"seergate": settings}),
        "page_size": page,
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "max_total_tokens": 8192,
        "max_running_requests": 8,
        "context_length": 2048,
        "log_level": "error",
    }
    made = sglang.Engine(**{**given, **options})
    try:
        yield made
    finally:
        made.shutdown()


def answers(
    engine: Any, prompts: list[list[int]], tokens: int, stop: bool = False
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Greedy continuations of prompts and SGLang's information; only with ``stop`` it overcommits its memory."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": not stop}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    return [one["output_ids"] for one in outputs], [one["meta_info"] for one in outputs]
