"""What evicting methods are made of: which residents stay, per row and KV head, and what is remembered of each.

Shape suffixes: see `seergate.methods.base`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seergate.methods.base import LayerSpec, LayerState, Method, Step


class LongPromptWarning(UserWarning):
    """What an evicting method does with a prompt that its budget has no room for."""


@dataclass(kw_only=True)
class EvictingMethod(Method):
    """Drops tokens from the cache for good. What stays is decided per KV head, or one set for all of a layer's heads,
    but never per query head, whose separate sets would take G times the memory.
    """

    _has_warned = False  # without an annotation, so that it is no option

    def warn_of_prompt(self, tokens: int, budget: int, done: str) -> None:
        """Warn, once per method object, that a prompt of so many tokens meets a smaller budget, and what is done."""
        if not self._has_warned:
            self._has_warned = True
            said = f"{self.name}: a prompt has {tokens} tokens and token_budget is {budget}; {done}"
            warnings.warn(said, LongPromptWarning, stacklevel=2)


@dataclass(frozen=True)
class Eviction:
    """Which residents of some rows stay.

    Attributes:
        rows: the rows in which something is evicted.
        index: int64 ``[len(rows), K, kept]``, ascending; the residents that stay.
        lengths: how many of them count, per row of ``rows``; the rest is padding.
    """

    rows: list[int]
    index: Tensor
    lengths: list[int]


class EvictingState(LayerState, ABC):
    """State of an `EvictingMethod`.

    Attributes:
        per_token: names of the tensors ``rows[name] [B, K, T, ...]`` that have one entry per resident.
        prompts: per row, tokens of the prompt.
        decoded: per row, tokens since then, the current one included.
    """

    per_token: tuple[str, ...] = ()

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.prompts, self.decoded = [0] * spec.batch, [0] * spec.batch

    def append(self, step: Step) -> None:
        """See `LayerState`. The first tokens of a row are its prompt."""
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            if start == 0:
                self.prompts[row] = count
                self.saw_prompt(count)
            else:
                self.decoded[row] += count

    def saw_prompt(self, tokens: int) -> None:
        """A prompt of so many tokens has come: the place to warn of one that is longer than the budget."""

    def seen(self, row: int) -> int:
        """Tokens of a row so far, evicted ones included."""
        return self.prompts[row] + self.decoded[row]

    def tokens_read(self, step: Step) -> Sequence[float]:
        """Per row, how many residents `attend` reads, mean over KV heads."""
        return step.ends

    def score_bytes(self, step: Step) -> list[int]:
        """Per row, bytes that a decode step reads beside the keys and values of `tokens_read` tokens, all heads
        together; less than none where it keeps some of these in fewer bytes than the cache would. What an eviction
        reads now and then is not counted.
        """
        return [0] * len(step.starts)

    def attend(self, step: Step) -> Tensor | None:
        """The attention output ``[B, H, D]`` of a decode step, or ``None`` for ordinary attention to all residents."""
        return None

    @abstractmethod
    def most_resident(self) -> int:
        """How many tokens a row may hold at most until the next eviction, once its prompt has been compressed. The
        cache allocates no more than this.
        """

    @abstractmethod
    def keep(self, step: Step) -> Eviction | None:
        """After attention: which residents stay, or ``None`` for all."""

    def moved(self, eviction: Eviction, capacity: int) -> None:
        """Follow the cache, which has just carried out an eviction and has room for ``capacity`` tokens now."""
        for name in self.per_token:
            compact(self.rows[name], eviction)
            self.rows[name] = trimmed(self.rows[name], capacity)

    def select_rows(self, index: Tensor) -> None:
        """See `LayerState`."""
        super().select_rows(index)
        chosen = index.tolist()
        self.prompts = [self.prompts[row] for row in chosen]
        self.decoded = [self.decoded[row] for row in chosen]

    def entries(self, name: str, held: Any, seen: Any, block_size: int) -> Any:
        """See `LayerState`."""
        return held if name in self.per_token else super().entries(name, held, seen, block_size)

    def append_rows(self, other: LayerState) -> None:
        """See `LayerState`."""
        assert isinstance(other, EvictingState)
        super().append_rows(other)
        self.prompts, self.decoded = self.prompts + other.prompts, self.decoded + other.decoded

    def room(self, name: str, tokens: int) -> Tensor:
        """The per-token tensor ``rows[name]``, with at least this many entries; new ones are zero."""
        return self.grown(name, tokens, limit=self.most_resident())


def trimmed(buffer: Tensor, capacity: int) -> Tensor:
    """``buffer [B, K, T, ...]`` with at most ``capacity`` entries, the memory of the others given back."""
    return buffer if buffer.shape[2] <= capacity else buffer[:, :, :capacity].clone()


def compact(buffer: Tensor, eviction: Eviction) -> None:
    """Move what stays to the front of ``buffer [B, K, T, ...]``, in place."""
    rows = torch.tensor(eviction.rows, device=buffer.device)[:, None, None]
    heads = torch.arange(buffer.shape[1], device=buffer.device)[:, None]
    slots = torch.arange(eviction.index.shape[2], device=buffer.device)
    buffer[rows, heads, slots] = buffer[rows, heads, eviction.index]
