"""The mode of a forward pass: prompt, decode or dense. `ForwardModes` decides it; a `ForwardContext` carries it to
one layer.

Shape suffixes: B batch, S new tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from seergate.errors import SeergateError

VERIFIED_TOKENS = 32
"""At most so many drafted tokens are verified at once, each decoded as if it had come alone; more are read densely."""

ForcedMode = Literal["dense", "decode"]


class ForwardMode(NamedTuple):
    """Treatment of the new tokens of a forward pass.

    Attributes:
        decoded: this many, the newest, are decoded one by one; those before them are (part of) a prompt.
        dense: attention is the plain model's, and the method decides nothing: a pass that corrects or verifies.
    """

    decoded: int = 0
    dense: bool = False


PROMPT, DENSE = ForwardMode(), ForwardMode(dense=True)


class ForwardModes:
    """Tells prompts, decoded tokens and dense passes of one model apart.

    A single token is a decode step. Several are a prompt, read densely, unless they are drafts: assisted decoding
    declares them with `drafting`, a caller's own loop with `forced`.

    Args:
        decodes_drafts: whether the method can decode several tokens of one pass; one that evicts cannot.
        reads_leftovers: whether a last chunk of a prompt that has a single token can be read densely, likewise.

    Attributes:
        default: what passes are by default: ``"dense"`` while a correction decides when the method selects.
    """

    def __init__(self, *, decodes_drafts: bool, reads_leftovers: bool) -> None:
        self.decodes_drafts, self.reads_leftovers = decodes_drafts, reads_leftovers
        self.default: ForcedMode | None = None
        self._forced: dict[int, ForcedMode] = {}  # by thread, and so are the others
        self._prefilling: dict[int, bool] = {}  # whether the prompt that is being read was cut into chunks
        self._drafting: dict[int, tuple[Any, Any, int]] = {}  # weakly, drafter and cache; slots that the prompt takes

    @contextmanager
    def forced(self, mode: ForcedMode) -> Iterator[None]:
        """While it lasts, this thread's passes are dense, or all of their tokens are decoded, however many they are.

        Raises:
            SeergateError: for ``"decode"`` under a method that takes one token at a time.
        """
        if mode == "decode" and not self.decodes_drafts:
            raise SeergateError(
                "a method that evicts decodes one token per pass, so several cannot be forced; pass them one by one, "
                "or use seergate.score"
            )
        thread = get_ident()
        before = self._forced.get(thread)
        self._forced[thread] = mode
        try:
            yield
        finally:
            if before is None:
                del self._forced[thread]
            else:
                self._forced[thread] = before

    @contextmanager
    def prefilling(self, in_chunks: bool) -> Iterator[None]:
        """While it lasts, this thread reads a prompt, perhaps in chunks."""
        self._prefilling[get_ident()] = in_chunks
        try:
            yield
        finally:
            del self._prefilling[get_ident()]

    def drafting(self, drafter: Any, cache: Any, prompt: int) -> None:
        """As long as ``drafter`` exists, this thread's tokens for ``cache`` are drafts, after ``prompt`` slots."""
        self._drafting[get_ident()] = ref(drafter), ref(cache), prompt

    def mode(self, cache: Any, slots: int | None, new: int) -> ForwardMode:
        """The mode of a forward pass.

        Args:
            cache: where its tokens arrive; ``None`` if there is none yet.
            slots: tokens that the cache has, padding included; only looked at if ``new`` is more than 1.
            new: how many arrive.
        """
        # A compiled step asks no further where nothing is forced and no prompt is being read.
        forced = self._forced.get(get_ident(), self.default) if self._forced else self.default
        if forced == "dense":
            return DENSE
        if new == 1:
            left_over = bool(self._prefilling) and self._prefilling.get(get_ident()) and self.reads_leftovers
            return DENSE if left_over else ForwardMode(decoded=1)
        if not self.decodes_drafts:
            return PROMPT
        if forced == "decode":
            return ForwardMode(decoded=new)
        drafted = self._drafted(cache, slots or 0, new)
        return ForwardMode(decoded=drafted) if drafted <= VERIFIED_TOKENS else PROMPT

    def _drafted(self, cache: Any, slots: int, new: int) -> int:
        """Number of the newest tokens that assisted decoding has drafted, or accepted after the prompt."""
        drafter, filled, prompt = self._drafting.get(get_ident(), (None, None, 0))
        if drafter is None or filled is None or drafter() is None or filled() is not cache:
            return 0
        return max(0, min(new, slots + new - prompt))


class ForwardContext:
    """One call of one gated attention module: made before it runs, completed when its tokens join the cache.

    Args:
        take_qk: returns ``q_pre [B, H, S, D]`` and ``k_pre [B, K, S, D]``, before RoPE; ``None`` if the plain model
            runs.
        valid: bool ``[B, S]``, which new tokens are real; ``None`` if all are.
        position_ids: ``[B, S]`` or ``[1, S]``, where the model puts the new tokens; ``None`` if it did not say.
        hidden: ``[B, S, W]``, what the attention module got; ``None`` if the plain model runs.

    Attributes:
        q_pre, k_pre, k, starts, counts: set when the tokens are stored (`take`); as in `Step`.
    """

    q_pre: Tensor
    k_pre: Tensor
    k: Tensor
    starts: list[int]
    counts: list[int]

    def __init__(
        self,
        mode: ForwardMode,
        take_qk: Callable[[], tuple[Tensor, Tensor]] | None,
        valid: Tensor | None = None,
        position_ids: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        self.mode, self.take_qk, self.valid = mode, take_qk, valid
        self.position_ids, self.hidden = position_ids, hidden
        self.order = None if valid is None else torch.argsort((~valid).int(), dim=1, stable=True)

    def take(self, k: Tensor, starts: list[int], counts: list[int]) -> None:
        """Take the hooked q and k of the tokens being stored; ``k`` after RoPE; each row's real tokens first."""
        assert self.take_qk is not None
        self.q_pre, self.k_pre = (self.compact(x) for x in self.take_qk())
        self.k, self.starts, self.counts = k, starts, counts

    def first_positions(self, batch: int) -> list[int]:
        """Position that the model gives to each row's first real token."""
        if self.position_ids is None:
            return [0] * batch
        positions = self.position_ids.expand(batch, -1)
        if self.order is not None:
            positions = positions.gather(1, self.order)
        return positions[:, 0].tolist()

    def hidden_states(self) -> Tensor:
        """Input of the attention module, ``[B, S, W]``, each row's real tokens first."""
        assert self.hidden is not None
        return self.compact(self.hidden[:, None])[:, 0]

    def compact(self, x_BhSD: Tensor) -> Tensor:
        """Move each row's real tokens to the front."""
        if self.order is None:
            return x_BhSD
        index = self.order[:, None, :, None].expand(-1, x_BhSD.shape[1], -1, x_BhSD.shape[3])
        return x_BhSD.gather(2, index)
