"""The mode of a forward pass: prompt, decode or dense. `ForwardModes` decides it; a `ForwardContext` is one layer's
part of the pass.

Shape suffixes: B batch, S new tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from seergate.checks import check_one_of
from seergate.errors import SeergateError
from seergate.ops.rows import RowLengths

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The keyword for the KV cache in transformers: ``cache`` since 5.24, ``past_key_values`` before. Also the field of a
model's output and the key in ``model_kwargs``."""

VERIFIED_TOKENS = 32
"""Tokens per pass that `seergate.score` decodes, and at most with rectification."""

TWO_THREADS = (
    "two threads run this model at once, and the attached method can serve one request at a time; "
    "hold a lock around generate, or put the requests into one batch"
)

DRAFTS = "assisted decoding takes rejected tokens back, which a method that evicts cannot; leave one of them out"


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache from a forward pass's keyword arguments, under either name; ``None`` without one."""
    return kwargs.get(cache_keyword(kwargs))


def cache_keyword(kwargs: Mapping[str, Any]) -> str:
    """Return the keyword under which a forward pass got its cache."""
    return "cache" if kwargs.get("past_key_values") is None else "past_key_values"


class ForwardMode(NamedTuple):
    """How a forward pass treats its new tokens.

    Attributes:
        decoded: number of newest tokens that are decoded; the tokens before them are prefill. A method places them
            as if they had come one by one.
        dense: whether every token attends to all before it and the method only sees the new tokens, as in a pass that
            rectifies.
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
        prompt_end: slots of the cache at the end of that prompt; evictions wait for it.
        agreed: weak reference to the mask that was read last, if it hides nothing; ``None`` otherwise.
        rows: weak reference to the newest lengths of rows, which layers of the same lengths share.
        slots: slots of the cache before the pass; ``None`` if its first gated layer is compiled.
        newest: positions of the pass's only new tokens; ``None`` before the first layer of a pass.
        selections: anchor layer -> its selection for each decoded token of the pass, until its last reader has run.
        thread: the thread that has set a mode; passes of other threads are refused meanwhile. ``None`` if none has.
    """

    def __init__(self, *, decodes_drafts: bool) -> None:
        self.decodes_drafts = decodes_drafts
        self.phase: Literal["dense", "decode"] | None = None
        self.in_chunks, self.prompt_end = False, 0
        self.agreed: ref[Tensor] | None = None
        self.rows: ref[RowLengths] | None = None
        self.slots: int | None = None
        self.newest: Tensor | None = None
        self.selections: dict[int, list[Any]] = {}
        self.thread: int | None = None
        self.generate_threads: list[int] = []  # in which `generate` runs
        # weak references to drafter and cache, slots of the prompt, thread
        self._drafting: tuple[Any, Any, int, int] | None = None
        self._generating: tuple[Any, Any, int] | None = None  # the same to `generate`'s configuration and cache

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have no part in a running ``generate``; weak references cannot be pickled."""
        kept = {**vars(self), "selections": {}, "generate_threads": []}
        return kept | dict.fromkeys(("agreed", "rows", "newest", "_drafting", "_generating"))

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
            SeergateError: under a method that evicts.
            ValueError: for another mode.
        """
        check_one_of("mode", mode, ("dense", "decode"))
        if not self.decodes_drafts:
            raise SeergateError(
                f"a method that evicts decodes one token per pass, so {mode!r} cannot be forced; pass tokens one by "
                "one, or use seergate.score"
            )
        return self._during(phase=mode)

    def prefilling(self, in_chunks: bool, prompt_end: int = 0) -> AbstractContextManager[None]:
        """Mark the passes in a ``with`` block as prefill, ``in_chunks`` or in one piece, of a prompt that ends at slot
        ``prompt_end`` of the cache.
        """
        return self._during(in_chunks=in_chunks, prompt_end=prompt_end)

    def drafting(self, drafter: Any, cache: Any, prompt: int) -> None:
        """Treat the tokens of ``cache`` after the first ``prompt`` slots as drafts, as long as ``drafter`` exists."""
        self._drafting = ref(drafter), ref(cache), prompt, get_ident()

    def reads_prompt(self, cache: Any) -> None:
        """Forget the drafts of a cache, if an assisted ``generate`` that failed still exists in its traceback."""
        if self._drafting is not None and self._drafting[1]() is cache:
            self._drafting = None

    def generating(self, configuration: Any, cache: Any) -> None:
        """Note that a call of ``generate`` fills ``cache`` as long as its ``configuration`` exists."""
        self._generating = ref(configuration), ref(cache), get_ident()

    @contextmanager
    def one_generate(self) -> Iterator[None]:
        """Forget at the end of a call of ``generate`` what it noted, also if it fails."""
        thread, before = get_ident(), {"_drafting": self._drafting, "_generating": self._generating}
        self.generate_threads.append(thread)
        try:
            yield
        finally:
            self.generate_threads.remove(thread)
            for name, earlier in before.items():  # a further turn in another thread may have begun already
                if (note := getattr(self, name)) is not None and note[-1] == thread:
                    setattr(self, name, earlier)

    def begin(self, slots: int | None) -> None:
        """Called by the first gated layer of a pass, with its slots: forget what the pass before shared."""
        self.slots, self.newest, self.selections = slots, None, {}

    def generates(self, cache: Any) -> bool:
        """Whether ``generate`` is filling this cache."""
        return self._generating is not None and _is_filling(*self._generating[:2], cache)

    def mode(self, cache: Any, slots: int, new: int) -> ForwardMode:
        """Return the mode of a pass that adds ``new`` tokens to a cache of ``slots`` slots, padding included;
        ``slots`` is ignored if ``new`` is 1.
        """
        if self.phase == "dense":
            return DENSE
        return ForwardMode(0 if self.in_chunks else 1 if new == 1 else self._decoded(cache, slots, new))

    def _decoded(self, cache: Any, slots: int, new: int) -> int:
        """Number of the newest of several tokens that are decoded."""
        drafting = self._drafting is not None and _is_filling(*self._drafting[:2], cache)
        if not self.decodes_drafts:
            if drafting:
                raise SeergateError(DRAFTS)
            return 0
        if self.phase == "decode":
            return new
        if self._drafting is None or not drafting:
            return 0
        prompt = self._drafting[2]
        return max(0, min(new, slots + new - prompt))  # drafted or accepted tokens after the prompt


def _is_filling(owner: Any, filled: Any, cache: Any) -> bool:
    """Whether what ``owner`` refers to still exists and ``filled`` refers to this cache, both weakly."""
    return cache is not None and owner() is not None and filled() is cache


class ForwardContext:
    """One gated layer's part of a forward pass.

    Args:
        valid: bool ``[B, S]``, which new tokens are real; ``None`` if all are.
        position_ids: ``[B, S]`` or ``[1, S]``, positions of the new tokens; ``None`` if the model passes none.
        hidden: ``[B, S, W]``, input of the attention module; ``None`` if the plain model runs.
        on_host: false in a compiled step, where only the device knows the lengths.
        passes: the handle's modes, which share lengths between layers; ``None`` if the plain model runs.

    Attributes:
        q_pre, k_pre: ``[B, H, S, D]`` and ``[B, K, S, D]``, queries and keys before RoPE, each row's real tokens
            first; ``None`` until they are computed (`take`), and if the plain model runs.
        k, starts, counts, rows: set when the tokens are stored; as in `Step`. ``rows`` is ``None`` before.
    """

    q_pre: Tensor | None = None
    k_pre: Tensor | None = None
    k: Tensor
    starts: list[int]
    counts: list[int]
    rows: RowLengths | None = None

    def __init__(
        self,
        mode: ForwardMode,
        valid: Tensor | None = None,
        position_ids: Tensor | None = None,
        hidden: Tensor | None = None,
        on_host: bool = True,
        passes: ForwardModes | None = None,
    ) -> None:
        self.mode, self.valid, self.on_host, self.passes = mode, valid, on_host, passes
        self.position_ids, self.hidden = position_ids, hidden
        self.order = None if valid is None else torch.argsort((~valid).int(), dim=1, stable=True)

    def take(self, q_pre: Tensor, k_pre: Tensor) -> None:
        """Set queries and keys before RoPE, of all new tokens."""
        self.q_pre, self.k_pre = self.compact(q_pre), self.compact(k_pre)

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
