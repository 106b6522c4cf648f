"""What is said does not depend on how vLLM schedules it: batches, chunks of prompts, cached prefixes, preemption.

Recomputing a preempted row reads its tokens densely, as a prompt, so its cache is then a little better than the sparse
one, and what is compared there are the solutions. Elsewhere it is tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.conftest import GATES, answers, engine, questions

GATE = {"gates": GATES, "token_budget": 256}
SIZES = [random.Random(1).randint(8, 24) for _ in range(64)]
NEW = 420


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return questions(*SIZES)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with engine(seergate=GATE, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Some of the prompts, one at a time."""
    return [answers(llm, [ids], NEW)[0] for ids in prompts[:8]]


@pytest.fixture(scope="module")
def together(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """All of the prompts at once: 16 rows, each replaced by the next when it ends."""
    return answers(llm, prompts, NEW)


def test_64_ragged_requests_at_once(llm: Any, alone: list[list[int]], together: list[list[int]]) -> None:
    assert together[:8] == alone
    (stats,) = llm.collective_rpc("seergate_stats")
    assert all(layer["density"] < 0.9 for layer in stats["layers"].values())


def test_cached_prefixes(llm: Any, prompts: list[list[int]], together: list[list[int]]) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts[:16]], sampling, use_tqdm=False)
    assert all(output.num_cached_tokens >= len(output.prompt_token_ids) - 64 for output in outputs)
    assert [list(output.outputs[0].token_ids) for output in outputs] == together[:16]


def test_chunks_and_no_cached_prefixes(prompts: list[list[int]], together: list[list[int]]) -> None:
    with engine(seergate=GATE, max_num_seqs=16, enable_prefix_caching=False, max_num_batched_tokens=64) as llm:
        assert answers(llm, prompts[:16], NEW) == together[:16]


def test_preemption(prompts: list[list[int]], together: list[list[int]]) -> None:
    """Sixteen rows of up to 650 tokens in a cache of 3,200."""
    with engine(seergate=GATE, max_num_seqs=16, num_gpu_blocks_override=100, disable_log_stats=False) as llm:
        said = answers(llm, prompts[:16], NEW)
        preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert preempted > 0
    assert [tokens[-6:] for tokens in said] == [tokens[-6:] for tokens in together[:16]]
