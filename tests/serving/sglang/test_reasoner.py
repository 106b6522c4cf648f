"""The tiny reasoner inside SGLang says what it says inside transformers, with the same gates and without any."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from seergate import GateBank
from tests.serving.sglang.conftest import answers, engine
from tests.support.reasoner import GATES, REASONER, questions, reference_tokens

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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("settings", "page", "options"),
    [
        ({"gates": GATES, "token_budget": 128}, 32, {}),
        ({"gates": GATES, "budget_share": 0.3, "budget_min": 96}, 32, {}),
        ({"gates": GATES, "threshold": 0.02}, 16, {"chunked_prefill_size": 64}),
        ({"gates": f"{REASONER}/gates", "token_budget": 64}, 8, {"disable_radix_cache": True}),
        ({"gates": GATES, "token_budget": 128, "anchors": [0, 2]}, 32, {}),
        ({"method": "quest", "token_budget": 128, "dense_layers": []}, 32, {"disable_overlap_schedule": True}),
    ],
    ids=["gates", "a share", "pages and chunks", "blocks of 8", "anchors", "quest"],
)
def test_tokens_are_those_of_transformers(model: Any, prompts: Any, settings: Any, page: int, options: Any) -> None:
    given = {name: value for name, value in settings.items() if name not in ("gates", "method")}
    if "gates" in settings:
        want = reference_tokens(model, prompts, NEW, GateBank.from_pretrained(settings["gates"]), **given)
    else:
        given = {"dense_layers": (), **given}
        want = reference_tokens(model, prompts, NEW, settings["method"], block_size=page, **given)
    assert want != reference_tokens(model, prompts, NEW, "dense"), "what is not read is missed"
    with engine(settings, page, **options) as llm:
        for ids, answer in zip(prompts, want, strict=True):
            assert answers(llm, [ids], NEW)[0] == [answer]
        together, infos = answers(llm, prompts, NEW)
        assert together == want
        cached = [info["cached_tokens"] for info in infos]
        assert all(cached) != bool(options.get("disable_radix_cache")), "prompts that were asked before are cached"


@pytest.mark.timeout(600)
def test_requests_that_are_retracted_go_on(model: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang computes their caches anew, densely. This answer is the dense one, so it does not depend on that."""
    ids, bank = prompts[1], GateBank.from_pretrained(GATES)
    want = reference_tokens(model, [ids], NEW, bank, token_budget=192)
    assert want == reference_tokens(model, [ids], NEW, "dense")
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")  # at every third step, as where memory is full
    with engine({"gates": GATES, "token_budget": 192}) as llm:
        together, infos = answers(llm, [ids] * 3, NEW, stop=True)
    assert sum(info["num_retractions"] for info in infos) > 0
    assert together == want * 3


@pytest.mark.timeout(600)
def test_a_budget_for_everything_is_dense_attention(model: Any, prompts: Any) -> None:
    with engine({"gates": GATES, "token_budget": 4096}) as llm:
        assert answers(llm, prompts, NEW)[0] == reference_tokens(model, prompts, NEW, "dense")


@pytest.mark.timeout(600)
def test_statistics_are_counts_of_tokens(prompts: Any) -> None:
    budget = 128
    with engine({"gates": GATES, "token_budget": budget}) as llm:
        (tokens,), _ = answers(llm, prompts[:1], NEW)
        (state,) = llm.get_server_info()["internal_states"]
    lengths = [len(prompts[0]) + step for step in range(1, len(tokens))]  # the first token is the prompt's
    for layer in state["seergate"]["layers"].values():
        assert layer["tokens_held"] == 2 * sum(lengths)
        assert layer["tokens_read"] == 2 * sum(budget - 32 + (length - 1) % 32 + 1 for length in lengths)
        assert layer["density"] == layer["tokens_read"] / layer["tokens_held"] < 1
    assert len(state["seergate"]["layers"]) == 4
    assert state["seergate"]["summary_bytes"] == 4 * (8192 // 32 + 1) * 2 * 128 * 4  # SGLang's first page is padding
