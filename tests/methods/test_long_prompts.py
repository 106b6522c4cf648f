"""A prompt that the budget has no room for: one warning that describes what happens to it, and the same happens."""

import warnings

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import methods
from seergate.eval import MethodSpec, RunOptions, evaluate, make_task
from seergate.methods import LongPromptWarning
from tests.support import evaluation as support
from tests.support.evictors import EVICTORS, C, model_of
from tests.support.models import left_padded, prompt

AT_ONCE = f"{C} of its tokens stay, the others leave at once"
CASES = {
    # row of the table: tokens of the prompt, what is said, and residents after so many generated tokens
    "h2o": (40, AT_ONCE, {0: C, 9: C}),
    "tova": (40, AT_ONCE, {0: C, 9: C}),
    "snapkv": (40, AT_ONCE, {0: C, 7: C + 7, 8: C}),
    "r_kv": (40, AT_ONCE, {0: C, 7: C + 7, 8: C}),
    "h2o and gate": (40, AT_ONCE, {0: C, 9: C}),
    "streaming_llm": (40, "generated tokens see its first 3 tokens and the newest 21 of all", {0: C - 1, 8: C - 1}),
    "lazy_eviction": (40, f"it stays until 7 tokens are generated, and then {C} of all", {0: 40, 6: 46, 7: C}),
    "random_evict": (40, "it stays, and 6 generated tokens beside it, 46 in all", {0: 40, 11: 51, 12: 46}),
    "tri_attention": (40, "it stays, and 6 generated tokens beside it, 46 in all", {0: 40, 11: 51, 12: 46}),
    "random_evict reservoir": (20, "it stays, and 6 generated tokens beside it, 26 in all", {0: 20, 12: 26}),
    "raas evictable": (
        40,
        f"it stays until a token is generated, and then at most {C} of all tokens",
        {0: 40, 1: C - 3},
    ),
    "raas extra": (40, f"it stays beside the budget, {40 + C} tokens in all", {0: 40, 24: 64, 25: 61}),
    "raas": (40, "it stays, and the page of 4 generated tokens that is being filled beside it", {0: 40, 8: 44, 9: 41}),
}


def residents(model, method, length, steps):
    """Residents of a row after its prompt and after each further token."""
    cache, counts = DynamicCache(), []
    with seergate.attached(model, method), torch.inference_mode():
        model(input_ids=prompt(length), past_key_values=cache)
        counts.append(cache.layers[0].rows.resident[0])
        for step in range(steps):
            model(input_ids=prompt(1, step), past_key_values=cache)
            counts.append(cache.layers[0].rows.resident[0])
    return counts


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_once_what_is_done_and_it_is_done(name):
    length, sentence, expected = CASES[name]
    model = model_of(4)
    method = EVICTORS[name].method(model)
    named = name.split(" ")[0]
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        counts = residents(model, method, length, max(expected))
        residents(model, method, length + 1, 1)  # another prompt under the same method
    messages = [str(warning.message) for warning in records if warning.category is LongPromptWarning]
    assert len(messages) == 1 and sentence in messages[0]
    assert messages[0].startswith(f"{named}: a prompt has {length} tokens and token_budget is {C}; ")
    assert {step: counts[step] for step in expected} == expected


def test_a_prompt_may_stay_beside_any_budget():
    model = model_of(4)
    method = methods.TOVA(token_budget=C, prompt="extra")
    with pytest.warns(LongPromptWarning, match=f"it stays, and {C} generated tokens beside it, {30 + C} in all"):
        assert residents(model, method, 30, C + 5)[-1] == 30 + C


@pytest.mark.parametrize("name", EVICTORS)
def test_nothing_is_said_if_there_is_room(name):
    """Methods without a budget never warn; nor do methods that keep the prompt if generated tokens have their room."""
    model = model_of(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LongPromptWarning)
        residents(model, EVICTORS[name].method(model), 18, 1)
        if name in ("rpc", "kv4bit"):
            residents(model, EVICTORS[name].method(model), 60, 1)


def test_one_long_row_of_a_batch_is_enough():
    model = model_of(4)
    with (
        pytest.warns(LongPromptWarning, match="tova: a prompt has 40 tokens") as records,
        seergate.attached(model, "tova", token_budget=C),
    ):
        model.generate(**left_padded([prompt(9, 1), prompt(40, 2), prompt(30, 3)]), max_new_tokens=3)
    assert sum(warning.category is LongPromptWarning for warning in records) == 1


def test_an_evaluation_says_it_once_per_setting(tmp_path):
    task = make_task("chain_sum", problems=3, variables=5)
    for spec in (MethodSpec("tova", 4), MethodSpec("random_evict", 8)):
        with pytest.warns(LongPromptWarning, match=f"{spec.name}: a prompt has") as records:
            options = RunOptions(max_new_tokens=4, batch_size=1)
            evaluate(support.model(), support.tokenizer(), task, spec, tmp_path / spec.name, options)
        assert sum(warning.category is LongPromptWarning for warning in records) == 1
