"""Drafts in vLLM: each verified token is a row of its own, and no answer changes."""

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from seergate.methods import make_method
from seergate.serving.vllm import attention
from seergate.serving.vllm.attention import plan_of
from tests.serving.vllm.conftest import answers, engine
from tests.serving.vllm.test_gpu_parts import builder
from tests.support.reasoner import GATES, questions

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
DRAFTED = {"speculative_config": NGRAM, "async_scheduling": False, "disable_log_stats": False}
SIZE = 32


def batch(lengths: Sequence[int], queries: Sequence[int], prompts: list[bool], table: Tensor) -> Any:
    """A batch as vLLM describes it: tokens of each request, how many are computed now, and which are prompts."""
    starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
        is_prefilling=torch.tensor(prompts),
    )


def test_each_token_that_is_verified_is_a_row() -> None:
    """Of requests that close a block, cross the budget, have one token, are prompts, or are recomputed."""
    table = torch.arange(60, dtype=torch.int32).view(6, 10)
    common = batch([130, 40, 66, 100, 200, 300], [3, 5, 4, 1, 10, 2], [row in (1, 5) for row in range(6)], table)
    method = make_method("quest", token_budget=2 * SIZE, block_size=SIZE)
    plan = plan_of(SimpleNamespace(block_table=table), common, method, SIZE, drafts=3)
    assert plan.tokens_R.tolist() == [0, 1, 2, 10, 11, 12]
    assert plan.rows.host == plan.rows.tensor.tolist() == [128, 129, 130, 65, 66, 100]
    assert plan.rows.table_RNr[:, :, 0].tolist() == [[*range(row, row + 5)] for row in (0, 0, 0, 20, 20, 30)]
    assert plan.closed_Cr.tolist() == [[3], [21], [45]] and plan.starts_C.tolist() == [96, 32, 160]
    assert plan.held == 128 + 129 + 130 + 63 + 64 + 65 + 66 + 100 and plan.read_all == 63 + 64
    metadata = builder(method, SIZE, drafts=3).build(0, common)
    assert metadata.plan.sparse_B.tolist() == [0, 3]
    assert metadata.plan.dense.seq_lens.tolist() == [3, 40, 66, 1, 200, 300]
    undrafted = plan_of(SimpleNamespace(block_table=table), common, method, SIZE)
    assert undrafted.tokens_R.tolist() == [12] and undrafted.held == 100


GATE = {"gates": GATES, "token_budget": 128}
RULES = {
    "gate": GATE,
    "anchors": GATE | {"anchors": [0, 2]},
    "threshold": {"gates": GATES, "threshold": 0.02},
    "quest": {"method": "quest", "token_budget": 128, "dense_layers": [0]},
}


@pytest.mark.parametrize("rule", RULES)
def test_drafts_change_no_token(rule: str) -> None:
    same_with_drafts(RULES[rule], questions(12, 16, 20, 14, 18), 300)


def same_with_drafts(rule: dict[str, Any], prompts: list[list[int]], tokens: int) -> None:
    """Three requests at a time, so that steps that verify tokens also have prompts."""
    steps, plan_of = [], attention.plan_of

    def noted(metadata: Any, common: Any, *rest: Any) -> attention.Plan:
        plan, queries = plan_of(metadata, common, *rest), common.query_start_loc_cpu.diff()
        verifies = bool(((queries > 1) & ~common.is_prefilling).any())
        steps.append((verifies, bool(common.is_prefilling.any()), len(plan.rows) > common.num_reqs))
        return plan

    with engine(seergate=rule, max_num_seqs=3) as llm:
        undrafted = answers(llm, prompts, tokens)
        del llm  # its end takes vLLM's process groups with it
    with pytest.MonkeyPatch.context() as patch, engine(seergate=rule, max_num_seqs=3, **DRAFTED) as llm:
        patch.setattr(attention, "plan_of", noted)
        assert answers(llm, prompts, tokens) == undrafted
        (stats,) = llm.collective_rpc("seergate_stats")
        counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        del llm
    assert all(layer["density"] < 0.8 for layer in stats["layers"].values())
    assert any(verifies and prefills for verifies, prefills, _ in steps) and any(sparse for *_, sparse in steps)
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < counts["vllm:spec_decode_num_draft_tokens"]
