"""Where a paper and its code differ, the option that does as the other: by hand, against simulations."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import seergate
from seergate import methods
from seergate.eval.method_text import read_method
from seergate.methods.lazy_eviction import recurrence_score
from seergate.methods.quest import union
from seergate.ops import Selection
from tests.methods.test_evicting import ROWS, against_simulation, forced_tokens
from tests.support import naive, naive_views
from tests.support.decoding import forced_run
from tests.support.evictors import EVICTORS, C, Evictor, attention, model_of
from tests.support.models import prompt
from tests.support.steps import fed, spec, step


@pytest.mark.parametrize(
    ("variant", "default"),
    [
        ("streaming_llm original", "streaming_llm"),
        ("lazy_eviction full", "lazy_eviction"),
        ("lazy_eviction without H1", "lazy_eviction"),
        ("snapkv by group", "snapkv"),
        ("raas extra", "raas"),
        ("raas of the budget", "raas extra"),
        ("raas evictable", "raas"),
        ("rpc newest twice", "rpc"),
    ],
)
def test_a_variant_is_not_its_default(variant, default):
    """What the shared tests hold to the variant's simulation must not agree with the default's, too."""
    model, forced = model_of(4, torch.float64), forced_tokens(50)
    one, other = (forced_run(model, EVICTORS[name].method(model), ROWS, forced)[0] for name in (variant, default))
    assert (one - other).abs().amax((1, 2)).min() > 1e-3, "in every row"


@pytest.mark.parametrize(
    ("budget", "least", "read"), [(16, 1, [0, 4]), (8, 3, [0, 2, 4]), (16, 3, [0, 2, 4]), (32, 3, [0, 2, 3, 4])]
)
def test_quest_reads_a_minimum_of_pages(budget, least, read):
    """Pages with the bounds 5, 1, 4, 2 and a current one: the best two beside it, however small the budget."""
    keys = torch.tensor([5.0, 1.0, 4.0, 2.0, 0.0]).repeat_interleave(8)[None, None, :39, None].expand(-1, 2, -1, 4)
    q = torch.full((1, 8, 4), 0.25)
    method = methods.Quest(token_budget=budget, block_size=8, dense_layers=(), min_pages=least)
    state, last = fed(method, q, keys, [39])
    assert method.select(state, last).indices.tolist() == [[read] * 2]
    assert method.token_budget == budget and method.nominal == str(budget)
    assert method.covered_tokens == 8 * max(budget // 8, least)


@pytest.mark.parametrize("group", [1, 4, 5])
def test_query_heads_that_choose_pages_apart_against_a_simulation(group):
    """In a ragged batch, and with what is read counted as the union of a group's pages."""
    model, forced = model_of(group, torch.float64), forced_tokens(30)
    method = methods.Quest(token_budget=C, block_size=4, dense_layers=(), group_reduction="separate")
    logits, _, _ = forced_run(model, method, ROWS, forced)
    together, _, _ = forced_run(model, replace(method, group_reduction="max"), ROWS, forced)
    for row, ids in enumerate(ROWS):
        with naive.Simulation(model, naive_views.Quest(C, 4)) as simulation, torch.inference_mode():
            torch.testing.assert_close(logits[row], simulation.logits(ids, forced[row]), rtol=1e-4, atol=1e-4)
        apart = (logits[row] - together[row]).abs().max()
        assert apart == 0 if group == 1 else apart > 1e-3


def test_what_query_heads_that_choose_apart_read():
    """Two query heads choose two of three pages each: all three are read; a head's recall counts its own two."""
    chosen = union(Selection(torch.tensor([[[0, 4], [2, 4], [1, 4], [1, 4]]]).int(), torch.full((1, 4), 2).int()), 2)
    assert chosen.indices.tolist() == [[[0, 2, 4], [1, 4, -1]]] and chosen.counts.tolist() == [[3, 2]]
    density, recall = {}, {}
    for how in ("max", "separate"):
        method = methods.Quest(token_budget=16, block_size=8, dense_layers=(), group_reduction=how)
        with seergate.attached(model_of(4), method, measure_recall=True) as handle:
            handle.model.generate(input_ids=prompt(100), max_new_tokens=20)
            density[how], recall[how] = handle.stats()["density"], handle.stats()["recall_per_layer"]
    assert density["max"] < density["separate"] < 4 * density["max"]
    assert sum(recall["separate"]) > sum(recall["max"]), "each head reads what it rates highest"


def test_the_full_range_of_h1_by_hand():
    """Never active; 6 steps since the last activation and MRI 3; 2 and 8; 1 and 1; used right now."""
    elapsed, mri = torch.tensor([16.0, 6.0, 2.0, 1.0, 0.0]).double(), torch.tensor([0.0, 3.0, 8.0, 1.0, 8.0]).double()
    h1 = torch.tensor([0.0, 0.238406, 0.875647, 0.537883, 1.0]).double()
    h2 = torch.tensor([0.0, 0.238406, 0.001822, 1.0, 0.001822]).double()
    for parts, expected in (((True, "full"), h1 + h2), ((False, "full"), h1), ((True, None), h2)):
        torch.testing.assert_close(recurrence_score(elapsed, mri, *parts), expected, rtol=0, atol=5e-6)
    # A token that is not due yet (1 of 8 steps), and one that is late by as long again but comes often (4 of 2 steps):
    # .4901 + .0018 and .0949 + .5379, or without the cap .9376 + .0018 and .2384 + .5379.
    elapsed, mri = torch.tensor([1.0, 4.0]).double(), torch.tensor([8.0, 2.0]).double()
    for h1, scores in (("capped", [0.49195, 0.63273]), ("full", [0.93940, 0.77629])):
        expected = torch.tensor(scores).double()
        torch.testing.assert_close(recurrence_score(elapsed, mri, True, h1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("selector", "kept"), [("distinct", 1), ("newest_twice", 2)])
def test_the_newest_selector_twice_by_hand(selector, kept):
    """A prompt of one token, four more, a window of two: of tokens 1 and 2 one stays. The window's queries give them
    (.9, .1) and (.4, .6): together 1.3 and .7, or the newest twice .8 and 1.2.
    """
    keys = torch.zeros(1, 1, 5, 2)
    keys[0, 0, 1:3] = torch.eye(2)
    given = {3: [0.9, 0.1], 4: [0.4, 0.6]}
    method = methods.RPC(interval=2, window=2, ratio=2, kernel=1, selector=selector)
    state = method.new_state(spec(keys, 1))
    for t in range(5):
        last = step(torch.tensor(given.get(t, [0.5, 0.5])).log()[None, None], keys[:, :, : t + 1])
        state.append(last)
        eviction = state.select_kept(last)
    assert eviction.index.tolist() == [[[0, kept, 3, 4]]]


def raas_step(method, prompt_tokens, given):
    """A state after a prompt and one more token, whose query has these bounds for the pages, of one token each."""
    keys = torch.eye(len(given))[None, None]
    state, first = fed(method, torch.zeros(1, 1, len(given)), keys[:, :, :prompt_tokens], [prompt_tokens])
    assert state.select_kept(first) is None
    last = step(torch.tensor(given)[None, None], keys)
    state.append(last)
    attention(state, last)
    return state, last


@pytest.mark.parametrize(("share_of", "used"), [("resident", [0, 1, 1, 0, 1, 1]), ("budget", [0, 1, 0, 0, 0, 1])])
def test_which_share_raas_stamps_by_hand(share_of, used):
    """Five pages of a prompt and the open one, a budget of two: half of six is three, half of two is one."""
    method = methods.RaaS(token_budget=2, block_size=1, share_of=share_of, prompt="extra")
    state, _ = raas_step(method, 5, [0.1, 0.9, 0.5, 0.3, 0.4, 0.2])
    assert state.rows["used"][0, 0, :6].tolist() == used


def test_raas_takes_the_share_as_written():
    """29 % of 100 pages are 29, though the float 0.29 is less than 29 / 100."""
    state, _ = raas_step(methods.RaaS(share=0.29, block_size=1, prompt="extra"), 99, list(range(100, 0, -1)))
    assert state.rows["used"][0, 0, :100].tolist() == [1] * 29 + [0] * 70 + [1]
    assert raas_step(methods.RaaS(share=1 / 3), 1, [0, 0])[0]._used(120) == 40


def test_a_prompt_that_raas_may_evict_by_hand():
    """Three pages of a prompt in a cache of three, and a fourth page: of 0, 1 and 2 those are used that the query
    finds best, 1 and 2, so 0 leaves. Of five pages those stay that are best of the used ones, beside the new one.
    """
    method = methods.RaaS(token_budget=3, block_size=1, prompt="evictable")
    state, last = raas_step(method, 3, [0.1, 0.5, 0.3, 0.0])
    assert state.rows["used"][0, 0, :4].tolist() == [0, 1, 1, 1]
    assert state.select_kept(last).index.tolist() == [[[1, 2, 3]]]
    state, last = raas_step(methods.RaaS(token_budget=3, block_size=1, prompt="extra"), 3, [0.1, 0.5, 0.3, 0.0])
    assert state.select_kept(last) is None, "beside the budget it stays"
    with pytest.warns(methods.LongPromptWarning, match="raas: a prompt has 5 tokens and token_budget is 3"):
        state, last = raas_step(method, 5, [0.1, 0.7, 0.3, 0.5, 0.6, 0.0])
    assert state.rows["used"][0, 0, :6].tolist() == [0, 1, 0, 1, 1, 1]
    assert state.select_kept(last).index.tolist() == [[[1, 4, 5]]]


@pytest.mark.parametrize("group", [1, 4, 5])
def test_snapkv_of_the_prompt_only(group, monkeypatch):
    """Nothing that is generated leaves. (Not in the table of evictors, of which all evict generated tokens.)"""
    row = Evictor(
        lambda m: methods.SnapKV(token_budget=C, window=6, interval=8, kernel=5, compress="prompt"),
        lambda m: naive.SnapKV(C, interval=10**9, recent=6, periodic=True),
        lambda n, t: min(n, C) + t,
    )
    monkeypatch.setitem(EVICTORS, "snapkv prompt", row)
    against_simulation("snapkv prompt", group, 50)
    model, slots = model_of(group), []

    def note(_, cache, handle):
        slots.append(cache.layers[0].keys.shape[2])

    method, rows = row.method(model), [prompt(400), prompt(9)]
    _, cache, _ = forced_run(model, method, rows, forced_tokens(40, 2), each=note)
    assert cache.layers[0].rows.resident == [C + 40, 9 + 40]
    assert slots[0] < 400, "the room for the prompt is given back"


DOCUMENT = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
WRITTEN = sorted(set(re.findall(r"`([a-z0-9_]+:[a-z0-9_:=+.]+)`", DOCUMENT)))


@pytest.mark.parametrize("text", WRITTEN)
def test_what_the_document_writes_is_no_default(text):
    """Every option there exists, may have that value, and has another one by default."""
    name, options = read_method(text)
    method, plain = methods.make_method(name, **options), methods.make_method(name)
    for option, value in options.items():
        assert getattr(method, option) == value != getattr(plain, option)
