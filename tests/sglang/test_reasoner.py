"""The tiny reasoner inside SGLang says what it says inside transformers, with the same gates and without any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import seergate
from seergate import GateBank, GateConfig, SeergateError
from seergate.sglang.backend import check_page, check_server
from tests.models import tiny_model
from tests.reasoner import REASONER, questions
from tests.sglang.conftest import answers, engine

NEW = 60


@pytest.fixture(scope="module")
def model() -> Any:
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of different lengths; the last two begin alike."""
    ids = questions(12, 20)
    return [*ids, ids[1][:-40]]


def said(model: Any, prompts: list[list[int]], *method: Any, **options: Any) -> list[list[int]]:
    """What transformers answers, one prompt at a time."""
    with seergate.attached(model, *method, **options):
        every = [model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False) for ids in prompts]
    return [each[0, len(ids) :].tolist() for each, ids in zip(every, prompts, strict=True)]


def gates(name: str) -> str:
    return f"{REASONER}/{name}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("settings", "page", "options"),
    [
        ({"gates": gates("gates-32"), "token_budget": 128}, 32, {}),
        ({"gates": gates("gates-32"), "budget_share": 0.3, "budget_min": 96}, 32, {}),
        ({"gates": gates("gates-32"), "threshold": 0.02}, 16, {"chunked_prefill_size": 64}),
        ({"gates": gates("gates"), "token_budget": 64}, 8, {"disable_radix_cache": True}),
        ({"method": "quest", "token_budget": 128, "dense_layers": []}, 32, {"disable_overlap_schedule": True}),
        ({"method": "oracle", "token_budget": 64}, 32, {"max_total_tokens": 1024, "schedule_conservativeness": 0.0}),
    ],
    ids=["gates", "a share", "pages and chunks", "blocks of 8", "quest", "oracle, little memory"],
)
def test_tokens_are_those_of_transformers(model: Any, prompts: Any, settings: Any, page: int, options: Any) -> None:
    given = {name: value for name, value in settings.items() if name not in ("gates", "method")}
    if "gates" in settings:
        want = said(model, prompts, GateBank.from_pretrained(settings["gates"]), **given)
    else:
        want = said(model, prompts, settings["method"], block_size=page, **{"dense_layers": (), **given})
    assert want != said(model, prompts, "dense"), "what is not read is missed"
    with engine(settings, page, **options) as llm:
        for ids, answer in zip(prompts, want, strict=True):
            assert answers(llm, [ids], NEW)[0] == [answer]
        together, infos = answers(llm, prompts, NEW)
        assert together == want
        cached = [info["cached_tokens"] for info in infos]
        assert all(cached) != bool(options.get("disable_radix_cache")), "prompts that were asked before are cached"


@pytest.mark.timeout(600)
def test_a_budget_for_everything_is_dense_attention(model: Any, prompts: Any) -> None:
    with engine({"gates": gates("gates-32"), "token_budget": 4096}) as llm:
        assert answers(llm, prompts, NEW)[0] == said(model, prompts, "dense")


@pytest.mark.parametrize(
    ("config", "page", "sentence"),
    [
        (GateConfig(block_size=32), 64, "--page-size is 64; it must be the gates' block of 32 tokens, or divide it"),
        (GateConfig(block_size=32), 1, "--page-size is 1; it must be"),
        (GateConfig(block_size=32, gate_dim=16, scorer="msa"), 32, "these gates have the scorer 'msa'"),
        (GateConfig(block_size=32, scorer="fast_kvzip"), 32, "these gates have the scorer 'fast_kvzip'"),
        (None, 1, "--page-size is 1; it is the block of this method"),
    ],
)
def test_pages_that_do_not_fit(config: Any, page: int, sentence: str) -> None:
    bank = None if config is None else GateBank.for_model(tiny_model("qwen3"), config)
    with pytest.raises(SeergateError, match=sentence):
        check_page(bank, page)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"tp_size": 2}, "tp_size is 2"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is 'fp8_e5m2'"),
        ({"speculative_algorithm": "EAGLE"}, "drafts are verified"),
        ({"device": "cuda"}, "it runs on 'cuda'"),
    ],
)
def test_servers_that_are_refused(changed: dict[str, Any], sentence: str) -> None:
    given = {"tp_size": 1, "kv_cache_dtype": "auto", "speculative_algorithm": None, "device": "cpu", **changed}
    with pytest.raises(SeergateError, match=sentence):
        check_server(SimpleNamespace(**given), given["device"])
