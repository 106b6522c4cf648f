"""Reasoning steps of a growing text: their borders, and the similarity of two steps."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from seergate.methods.reason_cache.structure import Tree, formal_content

BLANK_LINE = r"\n[ \t\r]*\n"
TAIL = 64
"""Number of characters before a token that are searched with it, as a border between steps may span tokens."""


@dataclass
class ReasoningStep:
    """One step of the reasoning.

    Attributes:
        start: index of the first token in the row.
        ids: the step's token ids.
        text: decoded from the tokens.
        in_code: whether it begins inside a code fence that an earlier step opened.
        counts, norm: number of occurrences of each token id, and the Euclidean norm of these counts.
    """

    start: int
    ids: list[int]
    text: str
    in_code: bool = False
    counts: Counter[int] = field(init=False, repr=False)
    norm: float = field(init=False)

    def __post_init__(self) -> None:
        self.counts = Counter(self.ids)
        self.norm = math.sqrt(sum(n * n for n in self.counts.values()))

    @cached_property
    def formal(self) -> Tree | None:
        """The step's `formal_content`."""
        return formal_content(self.text, self.in_code)

    @property
    def end(self) -> int:
        """Index of the token after the step's last."""
        return self.start + len(self.ids)

    def whole_blocks(self, block_size: int) -> range:
        """Indices of the blocks that lie entirely in the step."""
        first = -(-self.start // block_size)
        return range(first, max(first, self.end // block_size))


def similarity(a: ReasoningStep, b: ReasoningStep) -> float:
    """Cosine of the token counts, times the shorter text's length over the longer one's (ReasonCache, IV-A1).

    Lengths are in characters. 0 for a step without text.
    """
    longer = max(len(a.text), len(b.text))
    if not longer or not a.norm or not b.norm:
        return 0.0
    few, many = sorted((a.counts, b.counts), key=len)
    dot = sum(n * many.get(token, 0) for token, n in few.items())
    return dot / (a.norm * b.norm) * min(len(a.text), len(b.text)) / longer


def adaptive_threshold(similarities: Sequence[float], strict: float, soft: float) -> float:
    """``strict - (strict - soft) * mean``: lenient where the whole text repeats itself (ReasonCache, IV-A1)."""
    mean = sum(similarities) / len(similarities) if similarities else 0.0
    return strict - (strict - soft) * mean


class Segmenter:
    """Cuts a row's tokens into steps as they arrive.

    A step ends with the token that completes a border, a regular expression. A border that follows another one with
    only white space between ends no step. The first step begins after ``start`` tokens (the prompt).
    """

    def __init__(self, decode: Callable[[list[int]], str], border: str = BLANK_LINE, start: int = 0) -> None:
        self._decode, self._border, self._start = decode, re.compile(border), start
        self._pieces: dict[int, str] = {}
        self.steps: list[ReasoningStep] = []
        self._restart([])

    def _restart(self, ids: list[int]) -> None:
        self._open: list[int] = []
        self._tail, self._has_text = "", False
        self.feed(ids)

    @property
    def has_begun(self) -> bool:
        """Whether a token has come."""
        return bool(self.steps or self._open)

    @property
    def _begin(self) -> int:
        return self.steps[-1].end if self.steps else self._start

    def feed(self, ids: Sequence[int]) -> list[ReasoningStep]:
        """Add new tokens; return the steps that they complete."""
        ended = []
        for token in ids:
            if token not in self._pieces:
                self._pieces[token] = self._decode([token])
            piece = self._pieces[token]
            self._open.append(token)
            recent = self._tail + piece if self._has_text else piece.lstrip()
            self._has_text = bool(recent)
            if self._border.search(recent):
                ended.append(self._end())
            else:
                self._tail = recent[-TAIL:]
        return ended

    def _end(self) -> ReasoningStep:
        begin, in_code = self._begin, False
        if self.steps:
            last = self.steps[-1]
            in_code = last.in_code ^ bool(last.text.count("```") % 2)
        step = ReasoningStep(begin, self._open, self._decode(self._open), in_code)
        self.steps.append(step)
        self._open, self._tail, self._has_text = [], "", False
        return step

    def crop(self, length: int) -> None:
        """Remove the tokens from ``length`` on. A step that loses a token is open again."""
        while self.steps and self.steps[-1].end > length:
            self._open = self.steps.pop().ids
        if length < self._start:
            self._start, self._open = length, []
        self._restart(self._open[: max(0, length - self._begin)])

    def copy(self) -> Segmenter:
        """An independent copy."""
        twin = copy.copy(self)
        twin.steps, twin._open = list(self.steps), list(self._open)
        return twin
