"""The tiny reasoner inside vLLM against the same gates inside transformers."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from seergate import GateBank
from seergate.methods import make_method
from seergate.serving.vllm.attention import fits_graphs
from seergate.serving.vllm.worker import rank_gate
from tests.serving.vllm.conftest import answers, engine, gated_layers
from tests.support.reasoner import GATES, REASONER, questions, reference_tokens

BUDGET = 160


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with engine(seergate={"gates": GATES, "token_budget": BUDGET}) as llm:
        yield llm


def test_blocks_and_tokens_are_those_of_transformers(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.Tensor] = []
    kind = type(gated_layers(llm)[0].impl.method)
    plain = kind.choose

    def choose(*arguments: Any) -> Any:
        selection = plain(*arguments)
        chosen.append(selection.indices)
        return selection

    monkeypatch.setattr(kind, "choose", choose)
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32)
    for ids in questions(20, 20, 24):
        chosen.clear()
        (served,) = answers(llm, [ids], 600)
        blocks = list(chosen)
        chosen.clear()
        (tokens,) = reference_tokens(model, [ids], 600, GateBank.from_pretrained(GATES), token_budget=BUDGET)
        assert served == tokens
        assert len(blocks) == len(chosen) == 4 * (len(tokens) - 1)
        assert all(torch.equal(a, b) for a, b in zip(blocks, chosen, strict=True))


def test_gates_follow_the_model_to_its_device() -> None:
    part = rank_gate(GateBank.from_pretrained(GATES).gate(0), 2, torch.device("meta"), torch.bfloat16)
    assert {tensor.device.type for tensor in (*part.parameters(), *part.buffers())} == {"meta"}
    assert {tensor.dtype for tensor in part.parameters()} == {torch.bfloat16}  # that of the cache


@pytest.mark.usefixtures("on_gpu")
def test_graphs_hold_what_a_budget_alone_decides() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=16384 * 16))
    for rule in ({"token_budget": 64}, {"budget_share": 0.1, "budget_max": 2048}):
        assert fits_graphs(make_method("quest", block_size=16, **rule), config)
    for rule in ({"dense_below": 512}, {"top_p": 0.9}):
        assert not fits_graphs(make_method("quest", block_size=16, **rule), config)
    config.model_config.max_model_len += 1
    assert not fits_graphs(make_method("quest", block_size=16, token_budget=64), config), "too many blocks"


def test_statistics_are_counts_of_tokens(llm: Any) -> None:
    (before,) = llm.collective_rpc("seergate_stats")
    (ids,) = questions(20)
    (tokens,) = answers(llm, [ids], 40)
    (after,) = llm.collective_rpc("seergate_stats")
    # of the rows that decode; the first token is read off
    lengths = [len(ids) + step for step in range(1, len(tokens))]
    for layer in range(4):
        old, new = before["layers"][layer], after["layers"][layer]
        assert new["tokens_held"] - old["tokens_held"] == 2 * sum(lengths)
        assert new["tokens_read"] - old["tokens_read"] == 2 * sum(
            BUDGET - 32 + (length - 1) % 32 + 1 for length in lengths
        )
    pages = len(gated_layers(llm)[0].kv_cache)
    assert after["summary_bytes"] == 4 * pages * 2 * 128 * 4


SHARE, ANCHORS = {"budget_share": 0.3, "budget_min": 96}, {"token_budget": 160, "anchors": (0, 2)}


@pytest.mark.parametrize("rule", [SHARE, ANCHORS, {"threshold": 0.02, "anchors": (0,)}], ids=str)
def test_rules_are_those_of_transformers(rule: dict[str, Any]) -> None:
    """Rows of different lengths in one batch, each with its own share; layers that read what others chose."""
    prompts = questions(20, 8, 24)
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32)
    expected = reference_tokens(model, prompts, 100, GateBank.from_pretrained(GATES), **rule)
    with engine(seergate={"gates": GATES, **rule}) as llm:
        assert answers(llm, prompts, 100) == expected
        (stats,) = llm.collective_rpc("seergate_stats")
        assert all(layer["density"] < 1 for layer in stats["layers"].values())


def test_an_engine_that_is_gone_leaves_no_cache_behind() -> None:
    with engine(seergate={"gates": GATES, "token_budget": BUDGET}) as llm:
        answers(llm, questions(12), 40)
        cache = weakref.ref(gated_layers(llm)[0].kv_cache)
        del llm
    gc.collect()
    assert cache() is None
