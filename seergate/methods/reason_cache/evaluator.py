"""Decides for `ReasonCache` which blocks are shared, from the events of a cache. Has neither threads nor a cache.

Rows are identified by the uid that the cache gave them. The evaluator knows only what events have reported, and may
lag behind the cache; a decision therefore names its blocks by serial number, and the cache drops decisions about
blocks that it has freed. A decision counts as applied until the cache reports its outcome.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from seergate.methods.reason_cache.distance import Block, PercentileThreshold, block_distances
from seergate.methods.reason_cache.method import RandomSharing, ReasonCache
from seergate.methods.reason_cache.steps import ReasoningStep, Segmenter, adaptive_threshold, similarity


@dataclass(frozen=True)
class Decision:
    """Map a row's logical block ``newer`` to the physical block of its logical block ``older``.

    Attributes:
        row: uid of the row.
        newer_serial, older_serial: serial numbers of the physical blocks that were compared.
    """

    row: int
    newer: int
    older: int
    newer_serial: int
    older_serial: int


@dataclass
class _Row:
    """State of a row. ``segmenter`` is ``None`` before the first tokens, ``pages`` before the first full block.
    ``pages`` returns the row's `SharedPages`, or ``None`` once they are gone.
    """

    threshold: PercentileThreshold
    segmenter: Segmenter | None = None
    pages: Callable[[], Any] | None = None
    blocks: list[Block] = field(default_factory=list)


class Evaluator:
    """Receives the events of rows, and appends decisions to the ``decisions`` of their pages; ``decode`` turns token
    ids into text.

    Attributes:
        counts: ``steps``, ``similar_steps`` (pairs above the threshold), ``same_structure`` (those with equal formal
            content), ``measured_blocks`` (pairs of blocks), ``decisions``.
    """

    def __init__(self, method: ReasonCache, decode: Callable[[list[int]], str]) -> None:
        self.method, self._decode = method, decode
        self._rows: dict[int, _Row] = {}
        self.reset()

    def reset(self) -> None:
        """Reset the counters."""
        self.counts = Counter[str]()

    def tokens_came(self, rows: Sequence[int], ids: Tensor, counts: Sequence[int]) -> None:
        """Process new tokens of rows, given by uid: ``ids [B, S]``, of which the first ``counts[b]`` are row b's."""
        for uid, tokens, count in zip(rows, ids.tolist(), counts, strict=True):
            row, first = self._row(uid), 0
            if row.segmenter is None:
                first = 0 if self.method.include_prompt else count
                row.segmenter = Segmenter(self._decode, self.method.border, first)
            ended = row.segmenter.feed(tokens[first:count])
            for index in range(len(row.segmenter.steps) - len(ended), len(row.segmenter.steps)):
                self._look_back(uid, row, row.segmenter.steps, index)
                self._give_way()

    def blocks_sealed(self, uid: int, pages: Callable[[], Any], first: int, blocks: Sequence[Block]) -> None:
        """Record that a row's logical blocks from ``first`` on are full and written in every layer."""
        row = self._row(uid)
        row.pages = pages
        row.blocks[first:] = blocks

    def row_forked(self, uid: int, fork: int) -> None:
        """Copy the state of a row for its fork."""
        row = self._row(uid)
        threshold = replace(row.threshold, seen=list(row.threshold.seen))
        segmenter = None if row.segmenter is None else row.segmenter.copy()
        self._rows[fork] = replace(row, threshold=threshold, segmenter=segmenter, blocks=list(row.blocks))

    def row_cropped(self, uid: int, length: int, blocks: int) -> None:
        """Crop the state of a row to its first ``length`` tokens and ``blocks`` full blocks."""
        row = self._row(uid)
        if row.segmenter is not None:
            row.segmenter.crop(length)
        del row.blocks[blocks:]

    def rows_gone(self, rows: Sequence[int]) -> None:
        """Drop the state of rows that have ended."""
        for uid in rows:
            self._rows.pop(uid, None)

    def _row(self, uid: int) -> _Row:
        if uid not in self._rows:
            self._rows[uid] = _Row(PercentileThreshold(self.method.percentile, self.method.warm_up))
        return self._rows[uid]

    def _give_way(self) -> None:
        """Yield to the decoding thread, as Python runs one thread at a time."""
        if self.method.asynchronous:
            time.sleep(0)

    def _look_back(self, uid: int, row: _Row, steps: list[ReasoningStep], index: int) -> None:
        """Compare a step that has just ended with all earlier ones, and decide which of its blocks to share."""
        self.counts["steps"] += 1
        pages = None if row.pages is None else row.pages()
        if not index or pages is None or not (layers := pages.buffers()):
            return
        candidates = self._similar_steps(steps, index)
        if not candidates:
            return
        chosen = self._near_blocks(row, layers, steps[index], [steps[i] for i in candidates], pages.block_size)
        if isinstance(self.method, RandomSharing):
            chosen = self._any_blocks(row, len(chosen), -(-steps[0].start // pages.block_size), index)
        for newer, older in chosen:
            self.counts["decisions"] += 1
            serials = row.blocks[newer][1], row.blocks[older][1]
            row.blocks[newer] = row.blocks[older]
            pages.decisions.append(Decision(uid, newer, older, *serials))

    def _similar_steps(self, steps: list[ReasoningStep], index: int) -> list[int]:
        """Earlier steps that pass both parts of stage 1, the most similar first."""
        step = steps[index]
        scores = [similarity(step, earlier) for earlier in steps[:index]]
        threshold = adaptive_threshold(scores, self.method.strict, self.method.soft)
        similar = sorted((i for i in range(index) if scores[i] > threshold), key=lambda i: (-scores[i], -i))
        self.counts["similar_steps"] += len(similar)
        self._give_way()
        if self.method.structural_check:
            similar = [i for i in similar if steps[i].formal == step.formal]
        self.counts["same_structure"] += len(similar)
        return similar[: self.method.max_candidates]

    def _near_blocks(
        self,
        row: _Row,
        layers: list[tuple[Tensor, Tensor]],
        step: ReasoningStep,
        candidates: list[ReasoningStep],
        size: int,
    ) -> list[tuple[int, int]]:
        """Stage 2: (newer, older) logical blocks that are near enough, each newer one with the nearest older one. The
        i-th whole block of the step is compared with the i-th of each candidate.
        """
        new = step.whole_blocks(size)
        pairs = [pair for earlier in candidates for pair in zip(new, earlier.whole_blocks(size), strict=False)]
        pairs = [(a, b) for a, b in pairs if a < len(row.blocks) and row.blocks[a] != row.blocks[b]]
        distances = block_distances(layers, [(row.blocks[a][0], row.blocks[b][0]) for a, b in pairs])
        self.counts["measured_blocks"] += len(pairs)
        near: dict[int, tuple[float, int]] = {}
        for (newer, older), distance, admitted in zip(pairs, distances, row.threshold.admit(distances), strict=True):
            if admitted and (newer not in near or distance < near[newer][0]):
                near[newer] = (distance, older)
        return [(newer, older) for newer, (_, older) in near.items()]

    def _any_blocks(self, row: _Row, number: int, first: int, index: int) -> list[tuple[int, int]]:
        """Draw up to ``number`` unshared blocks of the reasoning, each with a random earlier block.

        ``first`` is the reasoning's first whole block.
        """
        assert isinstance(self.method, RandomSharing)
        draw, users = random.Random(f"{self.method.seed}/{index}/{len(row.blocks)}"), Counter(row.blocks)
        single = [i for i, block in enumerate(row.blocks) if users[block] == 1 and i > first]
        chosen = []
        for newer in draw.sample(single, min(number, len(single))):
            older = draw.randrange(first, newer)
            if row.blocks[older] != row.blocks[newer]:
                chosen.append((newer, older))
        return chosen
