"""The rules of speculative decoding: which drafted tokens stay, and how many are drafted."""

from __future__ import annotations

import pytest
import torch

from seergate.decode.speculation import (
    LONGEST_DRAFT,
    PROBE_EVERY,
    DraftLength,
    accept_greedy,
    accept_sampled,
    best_length,
    expected_speedup,
    expected_tokens,
)
from tests.support.chi_square import looks_like

DRAWS = 20_000
P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.2, 0.1])


def test_the_chi_square_test_tells_distributions_apart():
    drawn = torch.multinomial(P.expand(DRAWS, -1), 1).flatten().bincount(minlength=3)
    assert looks_like(drawn, P)
    assert not looks_like(drawn, torch.tensor([0.52, 0.29, 0.19]))
    assert not looks_like(drawn, Q)


def test_greedy_drafts_stay_up_to_the_first_mistake():
    drafted = torch.tensor([[5, 6, 7], [5, 9, 7], [1, 6, 7]])
    targets = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    tokens, accepted = accept_greedy(drafted, targets)
    assert accepted.tolist() == [3, 1, 0]
    assert [row[: n + 1].tolist() for row, n in zip(tokens, accepted, strict=True)] == [[5, 6, 7, 8], [5, 6], [5]]
    tokens, accepted = accept_greedy(drafted[:, :0], targets[:, :1])
    assert accepted.tolist() == [0, 0, 0] and tokens.tolist() == [[5]] * 3


def test_sampled_drafts_worked_out_by_hand():
    """p = (.5, .3, .2), q = (.7, .2, .1): token 0 is kept with .5 / .7, the others always; what replaces a rejected
    one is drawn from (0, .5, .5)."""
    drafted = torch.multinomial(Q.expand(DRAWS, -1), 1)
    target = P.expand(DRAWS, 2, -1)
    tokens, accepted = accept_sampled(drafted, Q.expand(DRAWS, 1, -1), target)
    kept = accepted.bool()
    zero = drafted[:, 0] == 0
    assert float(kept.float().mean()) == pytest.approx(0.8, abs=0.01)
    assert float(kept[zero].float().mean()) == pytest.approx(5 / 7, abs=0.015)
    assert kept[~zero].all()
    assert looks_like(tokens[~kept, 0].bincount(minlength=3), torch.tensor([0.0, 0.5, 0.5]))
    assert torch.equal(tokens[kept, 0], drafted[kept, 0])
    assert looks_like(tokens[:, 0].bincount(minlength=3), P)
    assert looks_like(tokens[kept, 1].bincount(minlength=3), P)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("drafter", ["near", "far", "the same", "never right"])
def test_what_comes_out_is_distributed_like_the_target(drafter, length):
    """Chains whose next token depends on the last: 20,000 rows, each with its own rejections, four tokens deep."""
    states = 4
    target = torch.rand(states, states).square() + 0.02
    other = {
        "near": target + 0.05 * torch.rand(states, states),
        "far": torch.rand(states, states) ** 3,
        "the same": target.clone(),
        "never right": torch.eye(states) * (torch.arange(states) == 3),
    }[drafter]
    target = target / target.sum(1, keepdim=True)
    if drafter == "never right":  # it always drafts what is impossible
        target[:, 3] = 0
        target, other = target / target.sum(1, keepdim=True), torch.eye(states)[3].expand(states, -1)
    other = other / other.sum(1, keepdim=True)
    last, lengths = torch.zeros(DRAWS, dtype=torch.long), torch.zeros(DRAWS, dtype=torch.long)
    text = torch.full((DRAWS, 4 + length + 1), -1)
    while int(lengths.min()) < 4:
        guesses = [last]
        for _ in range(length):
            guesses.append(torch.multinomial(other[guesses[-1]], 1)[:, 0])
        drafted = torch.stack(guesses[1:], 1)
        tokens, accepted = accept_sampled(
            drafted, other[torch.stack(guesses[:-1], 1)], target[torch.stack(guesses, 1)]
        )
        for i in range(length + 1):
            rows = ((accepted >= i) & (lengths < 4)).nonzero()[:, 0]
            text[rows, lengths[rows]] = tokens[rows, i]
            lengths[rows] += 1
        last = text[torch.arange(DRAWS), lengths - 1]
    joint = target[0][:, None] * target  # of the first two tokens
    pairs = text[:, 0] * states + text[:, 1]
    assert looks_like(pairs.bincount(minlength=states**2), joint)
    fourth = torch.linalg.matrix_power(target, 4)[0]
    assert looks_like(text[:, 3].bincount(minlength=states), fourth)


def test_the_cost_model_worked_out_by_hand():
    """A geometric sum; with 5 % of the keys and values read, drafts of 8 and .9 accepted, 1.4 / 6.126 are read per
    token. Weights alone are read 9 / 6.126 times."""
    for acceptance, length, tokens in ((0.9, 4, 4.0951), (0.9, 8, 6.1258), (0.95, 4, 4.5244), (0.95, 8, 7.3951)):
        assert expected_tokens(acceptance, length) == pytest.approx(tokens, abs=1e-4)
    assert expected_tokens(1.0, 5) == 6
    assert 1 / expected_speedup(0.9, 8, 1.0, 0.05) == pytest.approx(0.2285, abs=1e-4)
    assert 1 / expected_speedup(0.95, 8, 1.0, 0.05) == pytest.approx(0.1893, abs=1e-4)
    assert 1 / expected_speedup(0.9, 8, 1.0, 1.0) == pytest.approx(1.469, abs=1e-3)
    assert expected_speedup(0.5, 0, 1.0, 0.1) == 1
    # four tokens drafted at .3 each, five verified at 1 + 4 * .2: 3.0 instead of 4.0951
    assert expected_speedup(0.9, 4, 10.0, 3.0, per_token=0.2) == pytest.approx(4.0951 / 3.0, abs=1e-4)
    assert expected_speedup(0.5, 0, 1.0, 0.1, per_token=0.2) == 1
    assert best_length(0.9, 1.0, 0.3, 16, per_token=0.2) < best_length(0.9, 1.0, 0.3, 16)


def test_the_best_length():
    assert best_length(0.9, 1.0, 1.0, 16) == 0, "a draft that reads as much as a dense pass saves nothing"
    assert best_length(0.0, 1.0, 0.01, 16) == 0
    lengths = [best_length(acceptance, 1.0, 0.05, 16) for acceptance in (0.3, 0.6, 0.9, 0.99)]
    assert lengths == sorted(lengths) and lengths[0] >= 1 and lengths[-1] == 16
    for acceptance, draft in ((0.7, 0.1), (0.9, 0.3), (0.5, 0.02)):
        best = best_length(acceptance, 1.0, draft, 16)
        speedups = [expected_speedup(acceptance, n, 1.0, draft) for n in range(17)]
        assert speedups[best] == max(speedups)


def test_the_length_follows_what_is_accepted():
    length = DraftLength(None, longest=64)
    assert 0 < length.choose(1.0, 0.05) <= LONGEST_DRAFT
    for _ in range(30):
        length.verified(4, 4)
    assert length.acceptance > 0.95 and length.choose(1.0, 0.05) == LONGEST_DRAFT
    for _ in range(60):
        length.verified(4, 0)
    assert length.acceptance < 0.02
    chosen = [length.choose(1.0, 0.2) for _ in range(2 * PROBE_EVERY + 2)]
    assert chosen.count(1) == 2 and chosen.count(0) == len(chosen) - 2, "tried again now and then"
    assert DraftLength(None, longest=8).choose(1.0, 0.001) <= 8
    assert [DraftLength(5, longest=8).choose(1.0, 1.0) for _ in range(3)] == [5, 5, 5]
    nothing_to_gain = DraftLength(None, longest=8)
    assert [nothing_to_gain.choose(1.0, 1.0) for _ in range(PROBE_EVERY)] == [0] * PROBE_EVERY
