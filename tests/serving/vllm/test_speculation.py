"""Drafts in vLLM: a verified token reads what it reads alone, and rejected ones leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from seergate.methods import SelectingMethod, make_method
from seergate.serving.common.rope import Unrotation
from seergate.serving.common.scoring import GateScores, QuestScores, Scores
from seergate.serving.vllm import attention
from seergate.serving.vllm.attention import SparseAttention, plan_of
from tests.serving.vllm.conftest import GATES, answers, engine, gated_layers
from tests.serving.vllm.flash import attended, use_kernels
from tests.serving.vllm.test_gpu_parts import (
    D,
    FlashImpl,
    G,
    K,
    Rotary,
    builder,
    cache_in,
    gate,
    gated_layer,
    memory_of,
)
from tests.support.reasoner import questions

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
DRAFTED = {"speculative_config": NGRAM, "async_scheduling": False, "disable_log_stats": False}
SIZE, NEW = 32, 300

# ------------------------------------------------------------------------------------------------------ one step


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


class Dense:
    """Attention of vLLM's, in PyTorch."""

    def forward(
        self, layer: Any, query: Tensor, key: Any, value: Any, cache: Tensor, metadata: Any, output: Any
    ) -> None:
        keys, values = cache.transpose(1, 2).split(D, -1)
        for row, (first, end) in enumerate(pairwise(metadata.query_start_loc.tolist())):
            given = metadata.block_table[row : row + 1], metadata.seq_lens[row : row + 1], D**-0.5
            output[first:end] = attended(query[first:end][None], keys, values, *given)[0]


class Impl(FlashImpl, Dense):  # type: ignore[misc] # of vLLM's signature
    pass


class Server:
    """Two layers, requests with pages of their own, and the queries of all of their tokens."""

    def __init__(self, method: SelectingMethod, scoring: list[Scores], anchored: bool, page: int, drafts: int) -> None:
        self.page, self.made, draw = page, builder(method, page, drafts=drafts), torch.Generator().manual_seed(0)
        self.table = 1 + torch.randperm(4 * 512 // page, generator=draw).int().view(4, -1)
        self.queries = torch.randn(4, 512, K * G, D, generator=draw)
        self.layers, self.caches = [], []
        for each in scoring:
            memory = memory_of(1 + self.table.numel(), page, each.width, draw)
            self.caches.append(cache_in(memory, page, each.width))
            self.layers.append(Impl())
            vars(self.layers[-1]).update(vars(gated_layer(method, each)))
            self.layers[-1].anchor = self.layers[0] if anchored else self.layers[-1]

    def step(self, requests: dict[int, tuple[int, int]], prompts: tuple[int, ...] = ()) -> list[Tensor]:
        """The outputs ``[layers, tokens, H, D]`` of each request, from its length and its number of new tokens."""
        lengths, queries = zip(*requests.values(), strict=True)
        prefills = [row in prompts for row in requests]
        metadata = self.made.build(0, batch(lengths, queries, prefills, self.table[[*requests]]))
        query = torch.cat([self.queries[row, length - new : length] for row, (length, new) in requests.items()])
        outputs = torch.full((len(self.layers), *query.shape), torch.nan)
        for layer, cache, output in zip(self.layers, self.caches, outputs, strict=True):
            layer.forward(None, query, query, query, cache, metadata, output)
        return list(outputs.split(queries, 1))

    def replace(self, row: int, first: int) -> None:
        """Have other tokens from a position on: their queries, keys and values."""
        self.queries[row, first:] *= -1
        for cache in self.caches:
            for at in range(first, 512):
                cache[self.table[row, at // self.page], :, at % self.page] *= -1

    def counted(self) -> list[list[int]]:
        return [[int(layer.counts.read), int(layer.counts.held)] for layer in self.layers]


SCORES: dict[str, Callable[[], Scores]] = {
    "gate": lambda: GateScores(gate(SIZE), Unrotation(Rotary(512))),
    "quest": lambda: QuestScores(D, torch.float32, "max", 1.0),
}
RULES = {"budget": {"token_budget": 64}, "share": {"budget_share": 0.3}, "top_p": {"top_p": 0.4}}


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize(
    ("kind", "rule", "anchored"),
    [("gate", "budget", False), ("gate", "top_p", True), ("quest", "share", False), ("quest", "budget", True)],
)
@torch.no_grad()
def test_a_verified_token_reads_what_it_reads_alone(
    kind: str, rule: str, anchored: bool, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request 0 closes a block twice, first with rejected drafts; 1 crosses the budget; 2 is a prompt."""
    use_kernels(monkeypatch)
    method = make_method("quest", block_size=SIZE, **RULES[rule])
    scoring = [SCORES[kind]() for _ in range(2)]
    verifying, single = (Server(method, scoring, anchored, page, drafts) for drafts in (3, 0))
    for server in verifying, single:
        server.step({0: (158, 158), 1: (62, 62), 2: (250, 250), 3: (191, 191)}, prompts=(0, 1, 2, 3))

    first = verifying.step({0: (162, 4), 1: (66, 4), 2: (270, 20), 3: (194, 3)}, prompts=(2,))
    want = [single.step({row: (length, 1)})[0] for row, length in [(0, 159), *((1, 63 + i) for i in range(4))]]
    want += single.step({2: (270, 20)}, prompts=(2,))
    want += [single.step({3: (192 + i, 1)})[0] for i in range(3)]
    for server in verifying, single:
        server.replace(0, 159)
    second = verifying.step({0: (163, 4), 3: (198, 4)})
    want += [single.step({row: (length + i, 1)})[0] for row, length in ((0, 160), (3, 195)) for i in range(4)]
    outputs = torch.cat([first[0][:, :1], *first[1:], *second], 1)
    torch.testing.assert_close(outputs, torch.cat(want, 1), rtol=0, atol=1e-5)
    for (read, tokens_held), (read_single, tokens_held_single) in zip(
        verifying.counted(), single.counted(), strict=True
    ):
        assert tokens_held - tokens_held_single == K * (160 + 161 + 162)  # the rejected tokens
        assert 0 < read - read_single < tokens_held - tokens_held_single and read < 0.8 * tokens_held


# --------------------------------------------------------------------------------------------------- inside vLLM


@pytest.mark.parametrize(
    "rule",
    [
        {"gates": GATES, "token_budget": 128},
        {"gates": GATES, "token_budget": 128, "anchors": [0, 2]},
        {"gates": GATES, "threshold": 0.02},
        {"method": "quest", "token_budget": 128, "dense_layers": [0]},
    ],
    ids=["gate", "anchors", "threshold", "quest"],
)
def test_drafts_change_no_token(rule: dict[str, Any]) -> None:
    same_with_drafts(rule, questions(12, 16, 20, 14, 18), NEW)


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
        accepted, drafted = drafts_of(llm)
        del llm
    assert all(layer["density"] < 0.8 for layer in stats["layers"].values())
    assert any(verifies and prefills for verifies, prefills, _ in steps) and any(sparse for *_, sparse in steps)
    assert 0 < accepted < drafted


def drafts_of(llm: Any) -> tuple[int, int]:
    """How many drafted tokens were right, and how many there were."""
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return tuple(counts[f"vllm:spec_decode_num_{name}_tokens"] for name in ("accepted", "draft"))


def test_drafts_that_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step, complete blocks have the compressed keys of their tokens; reading all is dense attention."""
    plain, verified, checked = SparseAttention.forward, [], []

    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, **rest: Any
    ) -> Any:
        output = plain(self, layer, query, key, value, cache, metadata, **rest)
        if metadata is not None:
            verified.append(metadata.max_query_len in (2, 3, 4) and len(metadata.plan.rows) > len(metadata.seq_lens))
            for length, pages in zip(metadata.seq_lens.tolist(), metadata.block_table.long(), strict=True):
                closed = pages[: length // SIZE]
                if len(closed):
                    keys = self._keys(self.pages[cache], closed[:, None])
                    want = self.scoring.summary(keys, torch.arange(len(closed)) * SIZE)
                    torch.testing.assert_close(self.pages[cache].summary_PKW[closed], want, rtol=1e-4, atol=1e-4)
                    checked.append(len(closed))
        return output

    prompts = questions(12, 20)
    with engine() as llm:
        dense = answers(llm, prompts, NEW)
        del llm  # its end takes vLLM's process groups with it
    monkeypatch.setattr(SparseAttention, "forward", forward)
    rule = {"gates": GATES, "threshold": 1e-30}
    with engine(seergate=rule, **DRAFTED) as llm:
        assert answers(llm, prompts, NEW) == dense
        accepted, drafted = drafts_of(llm)
        assert gated_layers(llm)
    assert any(verified) and max(checked) > 4
    assert 0 < accepted < drafted
