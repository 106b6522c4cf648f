"""The mode of a forward pass: prompt, decode or dense. `ForwardModes` decides it; a `ForwardContext` carries it to
one layer.

Shape suffixes: B batch, S new tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from seergate.errors import SeergateError
from seergate.ops.rows import RowLengths

VERIFIED_TOKENS = 32
"""Maximum number of drafted tokens per pass that are decoded one by one; more are read densely, like a prompt."""

TWO_THREADS = (
    "two threads run this model at once, and the attached method can serve one request at a time; "
    "hold a lock around generate, or put the requests into one batch"
)


class ForwardMode(NamedTuple):
    """How a forward pass treats its new tokens.

    Attributes:
        decoded: number of newest tokens that are decoded; the tokens before them are prefill. A method places them
            as if they had come one by one.
        dense: whether attention is the plain model's, as in a pass that rectifies.
    """

    decoded: int = 0
    dense: bool = False


PROMPT, DENSE = ForwardMode(), ForwardMode(dense=True)


class ForwardModes:
    """Decides whether a forward pass of one model is a prefill, a decode step or a dense pass.

    By default one token is a decode step and several are a prefill. Rectification, `seergate.score` and custom loops
    override this with `forced`, the hooks of ``generate`` with `prefilling` and `drafting`.

    Args:
        decodes_drafts: whether the method can decode several tokens in one pass; evicting methods cannot.

    Attributes:
        phase: mode of all passes, whatever their length: ``"dense"`` reads them as a prompt, ``"decode"`` decodes
            them.
        in_chunks: whether a prompt is being prefilled in chunks, whatever their length.
        agreed: weak reference to the mask that was read last, if it hides nothing; ``None`` otherwise.
        rows: weak reference to the newest lengths of rows, which layers of the same lengths share.
        newest: positions of the pass's only new tokens; ``None`` before the first layer of a pass.
        thread: the thread that has set a mode; passes of other threads are refused meanwhile. ``None`` if none has.
    """

    def __init__(self, *, decodes_drafts: bool) -> None:
        self.decodes_drafts = decodes_drafts
        self.phase: Literal["dense", "decode"] | None = None
        self.in_chunks = False
        self.agreed: ref[Tensor] | None = None
        self.rows: ref[RowLengths] | None = None
        self.newest: Tensor | None = None
        self.thread: int | None = None
        self._drafting: tuple[Any, Any, int] | None = None  # weak references to drafter and cache; slots of the prompt
        self._generating: tuple[Any, Any] | None = None  # the same to `generate`'s configuration and cache

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have no part in a running ``generate``; weak references cannot be pickled."""
        return {**vars(self), "agreed": None, "rows": None, "newest": None, "_drafting": None, "_generating": None}

    @contextmanager
    def _during(self, **state: Any) -> Iterator[None]:
        if self.thread not in (None, get_ident()):
            raise SeergateError(TWO_THREADS)
        state["thread"] = get_ident()
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(before)

    def forced(self, mode: Literal["dense", "decode"]) -> AbstractContextManager[None]:
        """Make all passes in a ``with`` block dense, or decode all of their tokens one by one.

        Raises:
            SeergateError: for ``"decode"`` under a method that evicts.
        """
        if mode == "decode" and not self.decodes_drafts:
            raise SeergateError(
                "a method that evicts decodes one token per pass, so several cannot be forced; pass them one by one, "
                "or use seergate.score"
            )
        return self._during(phase=mode)

    def prefilling(self, in_chunks: bool) -> AbstractContextManager[None]:
        """Mark the passes in a ``with`` block as prefill, ``in_chunks`` or in one piece."""
        return self._during(in_chunks=in_chunks)

    def drafting(self, drafter: Any, cache: Any, prompt: int) -> None:
        """Treat the tokens of ``cache`` after the first ``prompt`` slots as drafts, as long as ``drafter`` exists."""
        self._drafting = ref(drafter), ref(cache), prompt

    def generating(self, configuration: Any, cache: Any) -> None:
        """Note that a call of ``generate`` fills ``cache`` as long as its ``configuration`` exists."""
        self._generating = ref(configuration), ref(cache)

    def generates(self, cache: Any) -> bool:
        """Whether ``generate`` is filling this cache."""
        configuration, filled = self._generating or (lambda: None, lambda: None)
        return configuration() is not None and filled() is cache

    def mode(self, cache: Any, slots: int, new: int) -> ForwardMode:
        """Return the mode of a pass that adds ``new`` tokens to a cache of ``slots`` slots, padding included;
        ``slots`` is ignored if ``new`` is 1.
        """
        if self.phase == "dense":
            return DENSE
        return ForwardMode(0 if self.in_chunks else 1 if new == 1 else self._decoded(cache, slots, new))

    def _decoded(self, cache: Any, slots: int, new: int) -> int:
        """Number of the newest of several tokens that are decoded."""
        if not self.decodes_drafts:
            return 0
        if self.phase == "decode":
            return new
        drafter, filled, prompt = self._drafting or (lambda: None, lambda: None, 0)
        if drafter() is None or filled() is not cache:
            return 0
        drafted = max(0, min(new, slots + new - prompt))  # drafted or accepted tokens after the prompt
        return drafted if drafted <= VERIFIED_TOKENS else 0


class ForwardContext:
    """Context of one call of a gated attention module: created before it runs, completed when its tokens are stored.

    Args:
        take_qk: returns ``q_pre [B, H, S, D]`` and ``k_pre [B, K, S, D]``, before RoPE; ``None`` if the plain model
            runs.
        valid: bool ``[B, S]``, which new tokens are real; ``None`` if all are.
        position_ids: ``[B, S]`` or ``[1, S]``, positions of the new tokens; ``None`` if the model passes none.
        hidden: ``[B, S, W]``, input of the attention module; ``None`` if the plain model runs.
        on_host: false in a compiled step, where only the device knows the lengths.
        passes: the handle's modes, which share lengths between layers; ``None`` if the plain model runs.

    Attributes:
        q_pre, k_pre, k, starts, counts, rows: set when the tokens are stored (`take`); as in `Step`.
    """

    q_pre: Tensor
    k_pre: Tensor
    k: Tensor
    starts: list[int]
    counts: list[int]
    rows: RowLengths

    def __init__(
        self,
        mode: ForwardMode,
        take_qk: Callable[[], tuple[Tensor, Tensor]] | None,
        valid: Tensor | None = None,
        position_ids: Tensor | None = None,
        hidden: Tensor | None = None,
        on_host: bool = True,
        passes: ForwardModes | None = None,
    ) -> None:
        self.mode, self.take_qk, self.valid, self.on_host, self.passes = mode, take_qk, valid, on_host, passes
        self.position_ids, self.hidden = position_ids, hidden
        self.order = None if valid is None else torch.argsort((~valid).int(), dim=1, stable=True)

    def take(self, k: Tensor, starts: list[int], counts: list[int]) -> None:
        """Record q and k before RoPE, and ``k`` after RoPE, of the tokens being stored; real tokens of a row first."""
        assert self.take_qk is not None
        self.q_pre, self.k_pre = (self.compact(x) for x in self.take_qk())
        self.k, self.starts, self.counts = k, starts, counts

    def positions(self, batch: int) -> Tensor | None:
        """Positions that the model gives to the new tokens, ``[B, S]``, each row's real tokens first; of one new token
        in an eager step ``[B]``, a copy that layers share, since the caller may change the positions in place.
        """
        if self.position_ids is None:
            return None
        if self.on_host and self.passes is not None and self.position_ids.shape[1] == 1 and self.order is None:
            if self.passes.newest is None:
                newest = self.position_ids[:, 0]
                self.passes.newest = newest.clone() if len(newest) == batch else newest.repeat(batch)
            return self.passes.newest
        positions = self.position_ids.expand(batch, -1)
        return positions if self.order is None else positions.gather(1, self.order)

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
