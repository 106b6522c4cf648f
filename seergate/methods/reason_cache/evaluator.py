"""Decides for `ReasonCache` which blocks of a row are shared. It is given tokens and blocks, and has no cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from seergate.methods.reason_cache.distance import PercentileThreshold, block_distances
from seergate.methods.reason_cache.method import RandomSharing, ReasonCache
from seergate.methods.reason_cache.steps import ReasoningStep, Segmenter, adaptive_threshold, similarity


@dataclass
class Reasoning:
    """What is known of a row. The first ``examined`` steps have been compared with the steps before them."""

    threshold: PercentileThreshold
    segmenter: Segmenter
    examined: int = 0

    @property
    def unexamined(self) -> range:
        """Indices of the steps that have ended since blocks were last shared."""
        return range(self.examined, len(self.segmenter.steps))

    def crop(self, length: int) -> None:
        """Forget the row's tokens from ``length`` on."""
        self.segmenter.crop(length)
        self.examined = min(self.examined, len(self.segmenter.steps))

    def copy(self) -> Reasoning:
        """An independent copy, for a fork of the row."""
        threshold = replace(self.threshold, seen=list(self.threshold.seen))
        return replace(self, threshold=threshold, segmenter=self.segmenter.copy())


class Evaluator:
    """Compares the steps of rows; ``decode`` turns token ids into text.

    Attributes:
        counts: ``steps``, ``similar_steps`` (pairs above the threshold), ``same_structure`` (those with equal formal
            content), ``measured_blocks`` (pairs of blocks).
    """

    def __init__(self, method: ReasonCache, decode: Callable[[list[int]], str]) -> None:
        self.method, self._decode = method, decode
        self.reset()

    def reset(self) -> None:
        """Reset the counters."""
        self.counts = Counter[str]()

    def tokens_came(self, reasoning: Reasoning | None, length: int, ids: Sequence[int], decoded: int = 1) -> Reasoning:
        """Add a row's new tokens to what is known of it; return the latter.

        Args:
            reasoning: ``None`` for the first tokens of a row, which are of its prompt.
            length: tokens of the row before the new ones.
            ids: the new ones.
            decoded: number of newest tokens that are decoded; 0 in a further chunk of the prompt.
        """
        if reasoning is None or not (decoded or reasoning.segmenter.has_begun):
            skipped = 0 if self.method.include_prompt else len(ids)
            segmenter = Segmenter(self._decode, self.method.border, length + skipped)
            reasoning = Reasoning(PercentileThreshold(self.method.percentile, self.method.warm_up), segmenter)
            ids = ids[skipped:]
        reasoning.segmenter.feed(ids)
        return reasoning

    def to_share(
        self, reasoning: Reasoning, blocks: Sequence[int], layers: Sequence[tuple[Tensor, Tensor]]
    ) -> list[tuple[int, int]]:
        """Compare a row's unexamined steps with all earlier ones, and decide which of their blocks to share.

        Args:
            reasoning: what is known of the row.
            blocks: physical block of each logical block of the row that is full and written in every layer.
            layers: keys and values ``[pages, K, page, D]`` of each layer.

        Returns:
            Pairs (newer, older) of logical blocks. Each newer one is to be mapped to the physical block that the older
            one has once the pairs before have been applied.
        """
        blocks, pairs = list(blocks), []
        for index in reasoning.unexamined:
            self.counts["steps"] += 1
            chosen = self._look_back(reasoning, index, blocks, layers) if index and blocks else []
            for newer, older in chosen:
                blocks[newer] = blocks[older]
            pairs += chosen
        reasoning.examined = len(reasoning.segmenter.steps)
        return pairs

    def _look_back(
        self, reasoning: Reasoning, index: int, blocks: list[int], layers: Sequence[tuple[Tensor, Tensor]]
    ) -> list[tuple[int, int]]:
        """Compare a step with all earlier ones; return its pairs of blocks."""
        steps, size = reasoning.segmenter.steps, layers[0][0].shape[2]
        candidates = self._similar_steps(steps, index)
        if not candidates:
            return []
        chosen = self._near_blocks(reasoning.threshold, blocks, layers, steps[index], candidates)
        if isinstance(self.method, RandomSharing):
            chosen = self._any_blocks(blocks, len(chosen), -(-steps[0].start // size), index)
        return chosen

    def _similar_steps(self, steps: list[ReasoningStep], index: int) -> list[ReasoningStep]:
        """Earlier steps that pass both parts of stage 1, the most similar first."""
        step = steps[index]
        scores = [similarity(step, earlier) for earlier in steps[:index]]
        threshold = adaptive_threshold(scores, self.method.strict, self.method.soft)
        similar = sorted((i for i in range(index) if scores[i] > threshold), key=lambda i: (-scores[i], -i))
        self.counts["similar_steps"] += len(similar)
        if self.method.structural_check:
            similar = [i for i in similar if steps[i].formal == step.formal]
        self.counts["same_structure"] += len(similar)
        return [steps[i] for i in similar[: self.method.max_candidates]]

    def _near_blocks(
        self,
        threshold: PercentileThreshold,
        blocks: list[int],
        layers: Sequence[tuple[Tensor, Tensor]],
        step: ReasoningStep,
        candidates: list[ReasoningStep],
    ) -> list[tuple[int, int]]:
        """Stage 2: (newer, older) logical blocks that are near enough, each newer one with the nearest older one. The
        i-th whole block of the step is compared with the i-th of each candidate.
        """
        size = layers[0][0].shape[2]
        new = step.whole_blocks(size)
        pairs = [pair for earlier in candidates for pair in zip(new, earlier.whole_blocks(size), strict=False)]
        pairs = [(a, b) for a, b in pairs if a < len(blocks) and blocks[a] != blocks[b]]
        distances = block_distances(layers, [(blocks[a], blocks[b]) for a, b in pairs])
        self.counts["measured_blocks"] += len(pairs)
        near: dict[int, tuple[float, int]] = {}
        for (newer, older), distance, admitted in zip(pairs, distances, threshold.admit(distances), strict=True):
            if admitted and (newer not in near or distance < near[newer][0]):
                near[newer] = (distance, older)
        return [(newer, older) for newer, (_, older) in near.items()]

    def _any_blocks(self, blocks: list[int], number: int, first: int, index: int) -> list[tuple[int, int]]:
        """Draw up to ``number`` unshared blocks of the reasoning, each with a random earlier block.

        ``first`` is the reasoning's first whole block.
        """
        assert isinstance(self.method, RandomSharing)
        draw, users = random.Random(f"{self.method.seed}/{index}/{len(blocks)}"), Counter(blocks)
        single = [i for i, block in enumerate(blocks) if users[block] == 1 and i > first]
        newest = draw.sample(single, min(number, len(single)))
        return [(newer, draw.randrange(first, newer)) for newer in newest]
