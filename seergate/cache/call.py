"""What a forward pass is: a prompt, tokens that are decoded, or a dense pass. `Passes` decides it, and nothing else; a
`Call` takes it to one layer.

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

VERIFIED_TOKENS = 32
"""At most so many drafted tokens are verified at once, each decoded as if it had come alone; more are read densely."""

Forced = Literal["dense", "decode"]


class Mode(NamedTuple):
    """What is done with the new tokens of a pass.

    Attributes:
        decoded: this many, the newest, are decoded one by one; those before them are (part of) a prompt.
        dense: attention is the plain model's, and the method decides nothing: a pass that corrects or verifies.
    """

    decoded: int = 0
    dense: bool = False


PROMPT, DENSE = Mode(), Mode(dense=True)


class Passes:
    """Tells prompts, decoded tokens and dense passes of one model apart.

    A token that comes alone is decoded; several at once are a prompt, and read densely, unless they are known to be
    drafts. Assisted decoding says so (`drafting`), and so does `forced`.

    Args:
        decodes_drafts: whether the method can decode several tokens of one pass; one that evicts cannot.
        reads_leftovers: whether a last chunk of a prompt that has a single token can be read densely, likewise.

    Attributes:
        default: what passes are by default: ``"dense"`` while a correction decides when the method selects.
    """

    def __init__(self, *, decodes_drafts: bool, reads_leftovers: bool) -> None:
        self.decodes_drafts, self.reads_leftovers = decodes_drafts, reads_leftovers
        self.default: Forced | None = None
        self._forced: dict[int, Forced] = {}  # by thread, and so are the others
        self._reading: dict[int, bool] = {}  # whether the prompt that is being read was cut into chunks
        self._drafting: dict[int, tuple[Any, Any, int]] = {}  # weakly, drafter and cache; slots that the prompt takes

    @contextmanager
    def forced(self, mode: Forced) -> Iterator[None]:
        """While it lasts, this thread's passes are dense, or all of their tokens are decoded."""
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
    def reading(self, in_chunks: bool) -> Iterator[None]:
        """While it lasts, this thread reads a prompt, perhaps in chunks."""
        self._reading[get_ident()] = in_chunks
        try:
            yield
        finally:
            del self._reading[get_ident()]

    def drafting(self, drafter: Any, cache: Any, prompt: int) -> None:
        """As long as ``drafter`` exists, this thread's tokens for ``cache`` are drafts, after ``prompt`` slots."""
        self._drafting[get_ident()] = ref(drafter), ref(cache), prompt

    def mode(self, cache: Any, slots: int | None, new: int) -> Mode:
        """What a pass is.

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
            left_over = bool(self._reading) and self._reading.get(get_ident()) and self.reads_leftovers
            return DENSE if left_over else Mode(decoded=1)
        if not self.decodes_drafts:
            return PROMPT
        drafted = new if forced == "decode" else self._drafted(cache, slots or 0, new)
        return Mode(decoded=drafted) if drafted <= VERIFIED_TOKENS else PROMPT

    def _drafted(self, cache: Any, slots: int, new: int) -> int:
        """How many of the newest tokens assisted decoding has drafted, or accepted after the prompt."""
        drafter, filled, prompt = self._drafting.get(get_ident(), (None, None, 0))
        if drafter is None or filled is None or drafter() is None or filled() is not cache:
            return 0
        return max(0, min(new, slots + new - prompt))


class Call:
    """One call of one gated attention module: made before it runs, completed when its tokens join the cache.

    Args:
        taps: returns ``q_pre [B, H, S, D]`` and ``k_pre [B, K, S, D]``, before RoPE; ``None`` if the plain model runs.
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
        mode: Mode,
        taps: Callable[[], tuple[Tensor, Tensor]] | None,
        valid: Tensor | None = None,
        position_ids: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        self.mode, self.taps, self.valid, self.position_ids, self.hidden = mode, taps, valid, position_ids, hidden
        self.order = None if valid is None else torch.argsort((~valid).int(), dim=1, stable=True)

    def take(self, k: Tensor, starts: list[int], counts: list[int]) -> None:
        """Take what was tapped, for tokens that are being stored: after RoPE ``k``, each row's real tokens first."""
        assert self.taps is not None
        self.q_pre, self.k_pre = (self.compact(x) for x in self.taps())
        self.k, self.starts, self.counts = k, starts, counts

    def first_positions(self, batch: int) -> list[int]:
        """Where the model puts each row's first real token."""
        if self.position_ids is None:
            return [0] * batch
        positions = self.position_ids.expand(batch, -1)
        if self.order is not None:
            positions = positions.gather(1, self.order)
        return positions[:, 0].tolist()

    def hidden_states(self) -> Tensor:
        """What the attention module got, ``[B, S, W]``, each row's real tokens first."""
        assert self.hidden is not None
        return self.compact(self.hidden[:, None])[:, 0]

    def compact(self, x_BhSD: Tensor) -> Tensor:
        """Move each row's real tokens to the front."""
        if self.order is None:
            return x_BhSD
        index = self.order[:, None, :, None].expand(-1, x_BhSD.shape[1], -1, x_BhSD.shape[3])
        return x_BhSD.gather(2, index)
