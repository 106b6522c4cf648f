"""Distance between the keys and values of two blocks, and the threshold up to which blocks share (ReasonCache, section
IV-A2).

Shape suffixes: N pairs of blocks, K KV heads, P tokens of a block, D head dimension, L layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

Block = tuple[int, int]
"""A physical block: its index, and a serial number that changes when the index is used again."""

CACHED_NORMS = 65536
"""Blocks whose norms are remembered, the most recently used ones."""

RESOLUTION = 1e-12
"""Squared distances below this share of the squared norms are rounding errors of float64, and count as 0."""


class BlockDistances:
    """``(1 / L) sum over layers of (|Ka - Kb| + |Va - Vb|) / (2 d h)``, with d tokens per block and h KV heads.

    Norms are Frobenius norms over a block, squared distances come from ``|a|^2 + |b|^2 - 2 ab`` in float64, and the
    squared norms are kept for later.
    """

    def __init__(self, cached: int = CACHED_NORMS) -> None:
        self._norms: OrderedDict[int, Tensor] = OrderedDict()  # serial -> [L, 2]
        self._cached = cached

    @torch.no_grad()
    def __call__(self, layers: Sequence[tuple[Tensor, Tensor]], pairs: Sequence[tuple[Block, Block]]) -> list[float]:
        """The distance of each pair.

        Args:
            layers: keys and values ``[pages, K, P, D]`` of every layer.
            pairs: pairs of blocks of these pages.
        """
        if not pairs:
            return []
        norms = self._squared_norms(layers, [block for pair in pairs for block in pair])
        left, right = ([pair[side][0] for pair in pairs] for side in (0, 1))
        total = torch.zeros(len(pairs), dtype=torch.float64)
        for layer, buffers in enumerate(layers):
            for which, pages in enumerate(buffers):
                dots_N = (_flat(pages, left) * _flat(pages, right)).sum(1).cpu()
                both_N = torch.stack([norms[a][layer, which] + norms[b][layer, which] for (_, a), (_, b) in pairs])
                squared_N = both_N - 2 * dots_N
                total += torch.where(squared_N <= RESOLUTION * both_N, 0.0, squared_N).sqrt()
        _, heads, tokens, _ = layers[0][0].shape
        return (total / (2 * tokens * heads * len(layers))).tolist()

    def _squared_norms(self, layers: Sequence[tuple[Tensor, Tensor]], blocks: Iterable[Block]) -> dict[int, Tensor]:
        """Squared norms ``[L, 2]`` by serial number."""
        wanted = {serial: index for index, serial in blocks}
        new = {serial: index for serial, index in wanted.items() if serial not in self._norms}
        if new:
            index = list(new.values())
            squares = [torch.stack([_flat(x, index).square().sum(1).cpu() for x in layer]) for layer in layers]
            for serial, norms in zip(new, torch.stack(squares).unbind(2), strict=True):
                self._norms[serial] = norms
        found = {serial: self._norms[serial] for serial in wanted}
        for serial in wanted:
            self._norms.move_to_end(serial)
        while len(self._norms) > self._cached:
            self._norms.popitem(last=False)
        return found


def _flat(pages: Tensor, index: list[int]) -> Tensor:
    return pages[torch.tensor(index, device=pages.device)].flatten(1).double()


class PercentileThreshold:
    """Percentile-based adaptive threshold on distances, from all distances seen so far (IV-A2).

    Args:
        percentile: 0..100. At 0 no block shares.
        warm_up: number of first distances that are only collected.
    """

    def __init__(self, percentile: float, warm_up: int) -> None:
        self.percentile, self.warm_up = percentile, warm_up
        self.seen: list[float] = []

    def admit(self, distances: Sequence[float]) -> list[bool]:
        """For each distance, whether it is within the percentile of those seen, itself included; false during warm-up.

        All of them are added to the distances seen.
        """
        warm = len(self.seen) >= self.warm_up
        self.seen += distances
        if not warm or not self.seen or self.percentile == 0:
            return [False] * len(distances)
        limit = float(np.percentile(self.seen, self.percentile))
        return [distance <= limit for distance in distances]

    def copy(self) -> PercentileThreshold:
        """An independent copy."""
        twin = PercentileThreshold(self.percentile, self.warm_up)
        twin.seen = list(self.seen)
        return twin
