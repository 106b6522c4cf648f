"""Distance between the keys and values of two blocks, and the threshold up to which blocks share (ReasonCache, section
IV-A2).

Shape suffixes: N pairs of blocks, K KV heads, P tokens of a block, D head dimension, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


def block_distances(layers: Sequence[tuple[Tensor, Tensor]], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """``(1 / L) sum over layers of (|Ka - Kb| + |Va - Vb|) / (2 d h)`` of each pair of pages, in float64: d tokens per
    page, h KV heads, Frobenius norms over a page. ``layers``: keys and values ``[pages, K, P, D]`` of each layer.
    """
    if not pairs:
        return []
    left, right = torch.tensor(pairs, device="cpu").unbind(1)
    total_N = torch.zeros(len(pairs), dtype=torch.float64, device="cpu")
    for pages in (pages for layer in layers for pages in layer):
        a, b = (pages[index.to(pages.device)].flatten(1).double() for index in (left, right))
        total_N += (a - b).norm(dim=1).cpu()
    _, heads, tokens, _ = layers[0][0].shape
    return (total_N / (2 * tokens * heads * len(layers))).tolist()


@dataclass
class PercentileThreshold:
    """Percentile-based adaptive threshold on distances, from all distances seen so far (IV-A2).

    Attributes:
        percentile: 0..100. At 0 no block shares.
        warm_up: number of first distances that are only collected.
        seen: all distances so far.
    """

    percentile: float
    warm_up: int
    seen: list[float] = field(default_factory=list)

    def admit(self, distances: Sequence[float]) -> list[bool]:
        """Add distances to those seen; return for each if it is within the percentile of all, false in warm-up."""
        warm = len(self.seen) >= self.warm_up
        self.seen += distances
        if not warm or not self.seen or self.percentile == 0:
            return [False] * len(distances)
        limit = float(np.percentile(self.seen, self.percentile))
        return [distance <= limit for distance in distances]
