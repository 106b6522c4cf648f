"""Whether counts look like draws from given probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

Z_ONE_IN_A_THOUSAND = 3.09


def looks_like(counts: Tensor, probabilities: Tensor) -> bool:
    """Pearson's test at one in a thousand; cells that expect fewer than five draws are put together.

    Args:
        counts: how often each outcome was drawn.
        probabilities: of the same outcomes; they sum to 1.
    """
    expected = probabilities.double().flatten() * counts.sum()
    observed = counts.double().flatten()
    order = expected.argsort()
    expected, observed = expected[order], observed[order]
    rare = int((expected.cumsum(0) < 5).sum()) + 1 if expected[0] < 5 else 0
    if rare:
        expected = torch.cat((expected[:rare].sum(0, keepdim=True), expected[rare:]))
        observed = torch.cat((observed[:rare].sum(0, keepdim=True), observed[rare:]))
    statistic = float(((observed - expected).square() / expected.clamp(min=1e-12)).sum())
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    return statistic < freedom * (1 - spread + Z_ONE_IN_A_THOUSAND * spread**0.5) ** 3  # Wilson and Hilferty
