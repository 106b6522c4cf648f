"""Answers do not depend on vLLM's scheduling: batches, chunks of prompts, cached prefixes, preemption.

A preempted row is recomputed densely, so only its solution is compared, elsewhere all tokens.
"""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from seergate.methods import make_method
from seergate.serving.vllm import attention
from tests.serving.vllm.conftest import answers, engine
from tests.support.reasoner import GATES, questions

GATE = {"gates": GATES, "token_budget": 256}
SIZES = random.Random(1).choices(range(12, 29), k=64)
NEW = 420


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return questions(*SIZES)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with engine(seergate=GATE, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def together(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """All of the prompts at once: 16 rows, each replaced by the next when it ends."""
    return answers(llm, prompts, NEW)


def test_64_ragged_requests_at_once(llm: Any, prompts: list[list[int]], together: list[list[int]]) -> None:
    assert together[:8] == [answers(llm, [ids], NEW)[0] for ids in prompts[:8]]
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


def test_steps_of_fixed_shapes(prompts: Any, together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph would hold, run as it is."""
    monkeypatch.setattr(attention, "fits_graphs", lambda method, vllm_config: True)
    planned = mock.Mock(wraps=attention.plan_of_decodes)
    monkeypatch.setattr(attention, "plan_of_decodes", planned)
    with engine(seergate=GATE, max_num_seqs=16) as llm:
        (tokens,) = answers(llm, prompts[:1], NEW)
        (stats,) = llm.collective_rpc("seergate_stats")
        assert answers(llm, prompts[:16], NEW) == together[:16]
    assert planned.called
    lengths = [len(prompts[0]) + step for step in range(1, len(tokens))]
    for layer in stats["layers"].values():  # of two KV heads
        assert layer["tokens_held"] == 2 * sum(lengths)
        assert layer["tokens_read"] == 2 * sum(min(length, 256 - 32 + (length - 1) % 32 + 1) for length in lengths)


def test_rows_that_pad_a_graph_are_not_counted() -> None:
    table = torch.tensor([[3, 4, 5], [6, 7, 4], [0, 0, 0]], dtype=torch.int32)
    metadata = SimpleNamespace(seq_lens=torch.tensor([70, 64, 0], dtype=torch.int32), block_table=table)
    plan = attention.plan_of_decodes(metadata, make_method("quest", token_budget=128, block_size=64), page=32)
    assert plan.rows.table_RNr.tolist() == [[[3, 4], [5, 5]], [[6, 7], [4, 4]], [[0, 0], [0, 0]]]
    assert plan.closed_Cr.tolist() == [[0, 0], [6, 7], [0, 0]] and plan.starts_C.tolist() == [64, 0, 0]
    assert plan.rows.tensor.tolist() == [70, 64, 1] and plan.held == 134 and plan.read_all == -1


def test_preemption(prompts: list[list[int]], together: list[list[int]]) -> None:
    """Sixteen rows of up to 786 tokens in a cache of 3,200."""
    with engine(seergate=GATE, max_num_seqs=16, num_gpu_blocks_override=100, disable_log_stats=False) as llm:
        sequences = answers(llm, prompts[:16], NEW)
        preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert preempted > 0
    assert [tokens[-6:] for tokens in sequences] == [tokens[-6:] for tokens in together[:16]]
