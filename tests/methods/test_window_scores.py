"""What SnapKV and R-KV score by, attention of an observation window and redundancy: worked examples, and loops."""

import pytest
import torch
from torch.nn.functional import pad

from seergate import methods
from seergate.methods.scoring import reduced
from seergate.methods.snapkv import redundancy, window_scores
from tests.support.steps import prompted, step


def unseen_window(keys, queries):
    """One more dimension, in which the last keys, as many as there are queries, repel every query."""
    window = queries.shape[2]
    keys, queries = pad(keys, (0, 1)), pad(queries, (0, 1), value=1.0)
    keys[:, :, keys.shape[2] - window :, -1] = -100.0
    return keys, queries


def of_group(q, keys, reduction):
    """The attention that a window gives tokens, one number per KV head."""
    return reduced(window_scores(q, keys, step(q[:, :, 0], keys), reduction == "max_logits"), reduction, 1)


def test_the_two_ways_to_reduce_a_group_by_hand():
    """Logits [2, 0, 0] and [0, 0, 3] of two heads: the softmax of the larger ones, and the mean of both softmaxes."""
    queries = torch.tensor([[[[2.0, 0, 0]], [[0.0, 0, 3]]]])
    keys, q = unseen_window(pad(torch.eye(3), (0, 0, 0, 1))[None, None], queries)
    expected = {"max_logits": [0.259, 0.035, 0.705], "mean": [0.416, 0.076, 0.508], "max": [0.787, 0.107, 0.909]}
    for reduction, numbers in expected.items():
        scores = of_group(q, keys, reduction)
        torch.testing.assert_close(scores, torch.tensor([numbers]), rtol=0, atol=6e-4)


@pytest.mark.parametrize("method", [methods.SnapKV, methods.RKV])
def test_a_window_of_everything_keeps_everything(method):
    for length in (1, 7, 8, 9):
        keys, q = torch.randn(1, 2, length, 6), torch.randn(1, 4, length, 6)
        state, last = prompted(method(token_budget=8, window=8, interval=1), q, keys)
        kept = state.select_kept(last)
        assert kept is None if length < 9 else kept.index.tolist() == [[[*range(1, 9)]] * 2], "the oldest leaves"


def test_redundancy_by_hand():
    """Unit keys with similarities .8, .6 and 0: each spares its newest look-alike, the mean is over columns."""
    keys = torch.tensor([[[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]])
    penalties = redundancy(keys, 0.5, 1)
    torch.testing.assert_close(penalties, torch.tensor([[0.394967, 0.302516, 0.302516]]), rtol=0, atol=1e-6)
    without_look_alikes = (torch.tensor([[0.8, 1.4, 0.6]]) / 3).softmax(-1)  # none are alike above .9: all count
    torch.testing.assert_close(redundancy(keys, 0.9, 1), without_look_alikes)
    assert redundancy(torch.eye(4)[None], 0.5, 1).tolist() == [[0.25] * 4]
    twin = torch.cat((torch.eye(4), torch.eye(4)[:1]))[None]
    assert redundancy(twin, 0.5, 1)[0].argmax() == 0, "of two equal keys the older has the penalty"
    torch.testing.assert_close(redundancy(torch.randn(3, 300, 8), 0.5, 1).sum(-1), torch.ones(3))


@pytest.mark.parametrize("spared", [0, 1, 2])
def test_redundancy_against_loops(spared):
    """More keys than a tile has rows."""
    keys = torch.randn(1, 150, 6, dtype=torch.float64)
    similarity = torch.nn.functional.cosine_similarity(keys[0][:, None], keys[0][None], dim=-1)
    alone = 0
    for i in range(150):
        similarity[i, i] = 0
        alike = [j for j in range(150) if similarity[i, j] > 0.8]
        alone += not alike
        for j in alike[len(alike) - min(spared, len(alike)) :]:
            similarity[i, j] = 0
    assert 10 < alone < 140
    torch.testing.assert_close(redundancy(keys, 0.8, spared)[0], similarity.mean(0).softmax(0))
