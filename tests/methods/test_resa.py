"""ReSA's selection: by hand, and against loops."""

import math
from dataclasses import replace

import pytest
import torch

from seergate import methods
from tests.support.steps import fed


def test_the_bound_for_the_mean_query_by_hand():
    """Keys (1, 1), (2, -1), (0, 3): largest (2, 3), smallest (0, -1). Queries (3, -2) and (-1, -2) have the mean
    (1, -2), whose bound is 2 + 2; the mean of their own bounds, 8 and 2, is 5."""
    keys = torch.tensor([[[[1.0, 1.0], [2.0, -1.0], [0.0, 3.0]]]])
    q = torch.tensor([[[3.0, -2.0], [-1.0, -2.0]]])
    state, last = fed(methods.ReSA(token_budget=64, block_size=3), q, keys, [3])
    assert state.scores(last)[..., 0].tolist() == [[4.0]]
    quest, last = fed(methods.Quest(token_budget=64, block_size=3, group_reduction="mean"), q, keys, [3])
    assert quest.scores(last)[..., 0].tolist() == [[5.0]]


def test_defaults():
    assert methods.ReSA().nominal == "256 or 10 %" and methods.ReSA().rectify_every == 32


@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
def test_rows_of_any_length_against_loops(group):
    size, share, budget, lengths = 4, 0.3, 12, [1, 4, 30, 63, 100]
    keys, q = torch.randn(5, 2, 100, 6), torch.randn(5, 2 * group, 6)
    method = methods.ReSA(token_budget=budget, share=share, block_size=size)
    state, last = fed(method, q, keys, [100])
    last = replace(last, starts=[n - 1 for n in lengths], counts=[1] * 5, lengths=torch.tensor(lengths))
    # rows are cropped to their lengths, so that bounds of open blocks hold no later keys
    state.crop([100] * 5, lengths, lambda row, first, end: keys[row : row + 1, :, first:end], lambda row: 0)
    selection = method.select(state, last)
    for row, length in enumerate(lengths):
        blocks = math.ceil(length / size)
        count = min(blocks, max(budget // size, math.ceil(blocks * share)))
        for head in range(2):
            mean = q[row, head * group : (head + 1) * group].mean(0)
            parts = [keys[row, head, block * size : (block + 1) * size] for block in range(blocks - 1)]
            bounds = [float(torch.maximum(mean * part.amax(0), mean * part.amin(0)).sum()) for part in parts]
            best = sorted(range(blocks - 1), key=lambda b: -bounds[b])[: count - 1]
            assert [b for b in selection.indices[row, head].tolist() if b >= 0] == sorted([*best, blocks - 1])
            assert selection.counts[row, head] == count
