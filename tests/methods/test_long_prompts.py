"""A prompt that the budget has no room for: one warning, and what docs/which_method.md says happens."""

import warnings

import pytest

import seergate
from seergate import methods
from seergate.eval import MethodSpec, RunOptions, evaluate, make_task
from seergate.methods import LongPromptWarning
from tests.support import evaluation as support
from tests.support.decoding import forced_run
from tests.support.evictors import EVICTORS, C, model_of
from tests.support.models import left_padded, prompt

LENGTH = 40
"""Tokens of the prompt."""
CASES = {
    # row of the table -> residents after so many generated tokens
    "h2o": {0: C, 9: C},
    "tova": {0: C, 9: C},
    "snapkv": {0: C, 7: C + 7, 8: C},
    "r_kv": {0: C, 7: C + 7, 8: C},
    "h2o and gate": {0: C, 9: C},
    "streaming_llm": {0: C - 1, 8: C - 1},
    "lazy_eviction": {0: LENGTH, 6: LENGTH + 6, 7: C},
    "random_evict": {0: LENGTH, 11: LENGTH + 11, 12: LENGTH + 6},
    "tri_attention": {0: LENGTH, 11: LENGTH + 11, 12: LENGTH + 6},
    "raas evictable": {0: LENGTH, 1: C - 3},
    "raas extra": {0: LENGTH, 24: LENGTH + 24, 25: LENGTH + 21},
    "raas": {0: LENGTH, 8: LENGTH + 4, 9: LENGTH + 1},
}


def residents(model, method, length, steps):
    """Residents of a row after its prompt and after each further token."""
    counts = []

    def note(step, cache, handle):
        counts.append(cache.layers[0].rows.resident[0])

    forced_run(model, method, [prompt(length)], prompt(steps, 1), each=note)
    return counts


@pytest.mark.parametrize("name", CASES)
def test_a_long_prompt_is_said_once_and_treated_as_documented(name):
    expected, model = CASES[name], model_of(4)
    method = EVICTORS[name].method(model)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        counts = residents(model, method, LENGTH, max(expected))
        residents(model, method, LENGTH + 1, 1)  # another prompt under the same method
    (message,) = (str(warning.message) for warning in records if warning.category is LongPromptWarning)
    told = f"{name.split(' ')[0]}: a prompt has {LENGTH} tokens and token_budget is {C}; docs/which_method.md says"
    assert message.startswith(told)
    assert {step: counts[step] for step in expected} == expected


def test_a_prompt_may_stay_beside_any_budget():
    model = model_of(4)
    method = methods.TOVA(token_budget=C, prompt="extra")
    with pytest.warns(LongPromptWarning, match="tova: a prompt has 30 tokens"):
        assert residents(model, method, 30, C + 5)[-1] == 30 + C


@pytest.mark.parametrize("name", EVICTORS)
def test_nothing_is_said_if_there_is_room(name):
    """Methods without a budget never warn."""
    model = model_of(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LongPromptWarning)
        residents(model, EVICTORS[name].method(model), C, 1)
        if name in ("rpc", "kv4bit"):
            residents(model, EVICTORS[name].method(model), 60, 1)


def test_one_long_row_of_a_batch_is_enough():
    model, rows = model_of(4), left_padded([prompt(9, 1), prompt(40, 2), prompt(30, 3)])
    said = pytest.warns(LongPromptWarning, match="tova: a prompt has 40 tokens")
    with said as records, seergate.attached(model, "tova", token_budget=C):
        model.generate(**rows, max_new_tokens=3)
    assert sum(warning.category is LongPromptWarning for warning in records) == 1


def test_an_evaluation_says_it_once_per_setting(tmp_path):
    task = make_task("chain_sum", problems=3, variables=5)
    for spec in (MethodSpec("tova", 4), MethodSpec("random_evict", 8)):
        with pytest.warns(LongPromptWarning, match=f"{spec.name}: a prompt has") as records:
            options = RunOptions(max_new_tokens=4, batch_size=1)
            evaluate(support.model(), support.tokenizer(), task, spec, tmp_path / spec.name, options)
        assert sum(warning.category is LongPromptWarning for warning in records) == 1
