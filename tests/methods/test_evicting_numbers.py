"""Worked examples of each evictor's rule."""

import math

import pytest
import torch

from seergate import methods
from seergate.methods.controls import random_bits
from seergate.methods.evicting import best
from seergate.methods.lazy_eviction import recurrence_score
from seergate.methods.raas import recency
from seergate.methods.scoring import pooled
from tests.support.evictors import attention
from tests.support.steps import prompted, spec, step


def logits_for(rows):
    """Queries and keys ``[B=1, heads, T, D]`` of one KV head whose attention is ``rows[head][query][key]``: with unit
    vectors as keys, a query is the logarithm of its row.
    """
    total = len(rows[0][-1])
    keys = torch.eye(total)[None, None]
    q = torch.full((1, len(rows), len(rows[0]), total), -50.0)
    for head, queries in enumerate(rows):
        for i, row in enumerate(queries):
            q[0, head, i, : len(row)] = torch.tensor(row).log()
    return q, keys


def test_best_keeps_the_newer_of_equals_in_order():
    scores = torch.tensor([[[1.0, 3.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]]])
    assert best(scores, [2]).tolist() == [[[2, 3], [3, 4]]]
    both = best(torch.cat((scores, scores)), [2, 4])
    assert both[0, :, :2].tolist() == [[2, 3], [3, 4]] and both[1].tolist() == [[1, 2, 3, 4], [1, 2, 3, 4]]


def test_h2o_by_hand():
    """Rows [1], [.6, .4], [.2, .5, .3], [.1, .3, .2, .4] sum to [1.9, 1.2, .5, .4]; one heavy, two recent: 1 goes."""
    q, keys = logits_for([[[1.0], [0.6, 0.4], [0.2, 0.5, 0.3], [0.1, 0.3, 0.2, 0.4]]])
    state, last = prompted(methods.H2O(token_budget=3, recent_tokens=2), q, keys)
    torch.testing.assert_close(state.rows["mass"][0, 0, :4], torch.tensor([1.9, 1.2, 0.5, 0.4]))
    assert state.rows["mass"].sum().item() == pytest.approx(4)
    assert state.select_kept(last).index.tolist() == [[[0, 2, 3]]]
    state, last = prompted(methods.H2O(token_budget=2, recent_tokens=2), q, keys)
    assert state.select_kept(last).index.tolist() == [[[2, 3]]], "without heavy hitters it is a sliding window"
    state = methods.H2O().new_state(spec(keys, 1))
    state.append(step(q[:, :, :1], keys[:, :, :1], decoded=0))
    assert state.rows["mass"][..., 0].tolist() == [[1]], "a prompt of one token that is not decoded"


def test_tova_by_hand():
    """Two heads [.5, .1, .1, .3] and [.1, .2, .6, .1] have the mean [.3, .15, .35, .2]; the least leaves."""
    q, keys = logits_for([[[0.5, 0.1, 0.1, 0.3]], [[0.1, 0.2, 0.6, 0.1]]])
    for protect in (True, False):
        state, last = prompted(methods.TOVA(token_budget=3, protect_current=protect), q, keys)
        assert state.select_kept(last).index.tolist() == [[[0, 2, 3]]]
    weakest = logits_for([[[0.5, 0.2, 0.2, 0.1]]])
    for protect, kept in ((True, [0, 2, 3]), (False, [0, 1, 2])):
        state, last = prompted(methods.TOVA(token_budget=3, protect_current=protect), *weakest)
        assert state.select_kept(last).index.tolist() == [[kept]], "in the paper the current token may go at once"


@pytest.mark.parametrize("kernel", [None, 1, 3])
def test_of_equal_tokens_the_oldest_leaves(kernel):
    method = methods.TOVA(token_budget=3)
    if kernel:
        method = methods.SnapKV(token_budget=3, window=1, interval=1, kernel=kernel)
    state, last = prompted(method, torch.zeros(1, 4, 5, 8), torch.ones(1, 2, 5, 8))
    assert state.select_kept(last).index.tolist() == [[[2, 3, 4]] * 2]


def test_recurrence_scores_by_hand():
    """At t = 16: never active; (TS 10, MRI 3); (14, 8); (15, 1); the order of eviction."""
    elapsed, mri = torch.tensor([16.0, 6.0, 2.0, 1.0]).double(), torch.tensor([0.0, 3.0, 8.0, 1.0]).double()
    scores = recurrence_score(elapsed, mri)
    expected = torch.tensor([0.0, 0.333258, 0.447223, 1.238408]).double()
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-6)
    without_h2, expected = recurrence_score(elapsed, mri, False)[2:], torch.tensor([0.4454, 0.238408]).double()
    torch.testing.assert_close(without_h2, expected, rtol=0, atol=2e-6)


def test_recurrence_intervals_by_hand():
    """Activations at 1, 5, 6 and 14 of a prompt token give MRI 1, 4, 4, 8; a token active at birth has MRI 1; times
    beyond 2048, where half precision has no integers, are exact.
    """
    method = methods.LazyEviction(token_budget=4000, window=3000, alpha=0.3)
    keys, history = torch.zeros(1, 1, 2100, 2), {}
    keys[:, :, 0, 0] = 40.0
    state = method.new_state(spec(keys, 1))
    for t in range(2100):
        active = t in (1, 5, 6, 14, 2090)
        q = torch.tensor([[[1.0 if active else -1.0, 0.0]]])
        part = keys[:, :, : t + 1].clone()
        if t == 7:  # born now and at once the most attended
            q, part[:, :, 7, 1] = torch.tensor([[[-1.0, 1.0]]]), 40.0
        last = step(q, part)
        last.starts = [t]
        state.append(last)
        attention(state, last)
        history[t] = state.rows["mri"][0, 0, 0].item(), state.rows["active"][0, 0, 0].item()
        if t == 7:
            assert (state.rows["active"][0, 0, 7].item(), state.rows["mri"][0, 0, 7].item()) == (7, 1)
    assert [history[t] for t in (1, 5, 6, 14, 16)] == [(1, 1), (4, 5), (4, 6), (8, 14), (8, 14)]
    assert history[2099] == (2076, 2090)


def test_average_pooling_counts_the_padding():
    scores = torch.tensor([[[7.0, 0, 0, 0, 0, 0, 0, 14]]])
    assert pooled(scores, 7, "avg").tolist() == [[[1, 1, 1, 1, 2, 2, 2, 2]]]


def test_raas_by_hand():
    """Pages of one token, three of them evictable, no prompt, r = .5. Scores a .7, b .3: stamps a2 b2 (b is new);
    .1, .2, .7: c3; .4, .1, .2, .3: a and d are used, stamps a4 b2 c3 d4, and b leaves.
    """
    method = methods.RaaS(token_budget=3, block_size=1)
    scores, keys = [[1.0], [0.7, 0.3], [0.1, 0.2, 0.7], [0.4, 0.1, 0.2, 0.3]], torch.eye(4)
    state = method.new_state(spec(keys[None, None], 1))
    stamps, evictions = [], []
    for t, given in enumerate(scores):
        q = torch.nn.functional.pad(torch.tensor(given), (0, 3 - t))
        last = step(q[None, None], keys[None, None, : t + 1])
        state.append(last)
        if t == 0:
            state.prompts, state.decoded = [0], [1]
        attention(state, last)
        stamps.append(state.rows["used"][0, 0, : t + 1].tolist())
        evictions.append(state.select_kept(last))
    assert stamps == [[1], [2, 2], [2, 2, 3], [4, 2, 3, 4]]
    assert evictions[:3] == [None] * 3 and evictions[3].index.tolist() == [[[0, 2, 3]]]


def test_recency_orders_by_use_then_score_then_age():
    used = torch.tensor([[[4, 2, 3, 4, 2]]], dtype=torch.int32)
    bounds = torch.tensor([[[0.4, 0.1, 0.2, 0.3, 0.1]]])
    assert recency(used, bounds).argsort(-1).tolist() == [[[1, 4, 2, 3, 0]]]


def test_random_eviction_is_uniform_and_repeats():
    """Of 40 tokens 10 stay: each survives with probability 1/4, in each head, independently of the other head."""
    index, kept, both = torch.arange(40).expand(2, -1), torch.zeros(2, 40), 0
    for seed in range(1000):
        numbers = random_bits(index, seed, 3, 17)
        chosen = best(numbers[None], [10])[0]
        assert torch.equal(random_bits(index, seed, 3, 17), numbers)
        kept.scatter_add_(1, chosen, torch.ones(2, 10))
        both += len(set(chosen[0].tolist()) & set(chosen[1].tolist()))
    deviation = math.sqrt(0.25 * 0.75 / 1000)
    assert (kept / 1000 - 0.25).abs().max() < 4.5 * deviation
    assert both / 1000 == pytest.approx(2.5, abs=0.15)
