"""Carries out the sharing of blocks: between two forward passes a cache reports its events and applies decisions.

`BlockSharing` belongs to a handle, `CacheSharing` to one cache under it. Nothing in here waits for a decision.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seergate.cache.call import ForwardContext
from seergate.cache.storage import KVBackend
from seergate.errors import SeergateError, first_line
from seergate.hf.loading import load_tokenizer
from seergate.reason.evaluator import Decision, Evaluator, Tally
from seergate.reason.method import ReasonCache
from seergate.reason.paged import CachePages, Listener, Row
from seergate.reason.worker import Worker

Prompt = tuple[tuple[int, ...], Tensor, tuple[int, ...]]
"""Numbers of the rows, ids ``[B, S]`` (each row's first), and how many of them are the row's."""


class BlockSharing:
    """State shared by the caches of one handle: token ids of the forward pass, worker, accounts.

    Attributes:
        evaluator, worker: the evaluator and the thread that calls it; ``None`` without ``reason``.
    """

    def __init__(self, model: PreTrainedModel, reason: ReasonCache | None, prefixes: bool) -> None:
        self.reason, self.prefixes, self.gone = reason, prefixes, deque[int]()
        self.evaluator: Evaluator | None = None
        self.worker = Worker(reason is not None and reason.asynchronous)
        if reason is not None:
            tokenizer = _tokenizer(model, reason)
            self.evaluator = Evaluator(reason, lambda ids: str(tokenizer.decode(ids)))
        self._ids: Tensor | None = None
        self._warned = False
        self._hook = model.get_input_embeddings().register_forward_pre_hook(self._see, with_kwargs=True)
        self.reset()

    def _see(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._ids = args[0] if args else kwargs.get("input")

    def take_ids(self) -> Tensor:
        """The ids ``[B, S]`` of the forward pass that is going on."""
        ids, self._ids = self._ids, None
        if ids is None:
            raise SeergateError("sharing of blocks compares token ids; give the model input_ids, not inputs_embeds")
        return ids

    def follow(self, pages: CachePages) -> None:
        """Share blocks of this cache too."""
        pages.listener = listener = CacheSharing(self, pages)
        if self.evaluator is not None:
            weakref.finalize(pages, self.gone.extend, listener.rows)

    def put(self, calls: list[Callable[[], None]]) -> None:
        """Hand calls of the evaluator to the worker, and say once if it has failed."""
        if self.evaluator is None:
            return
        gone = [self.gone.popleft() for _ in range(len(self.gone))]
        if gone:
            calls = [partial(self.evaluator.rows_gone, gone), *calls]
        if calls:
            self.worker.put(calls)
        if self.worker.error is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"reason_cache shares no more blocks: {first_line(self.worker.error)}", RuntimeWarning, stacklevel=2
            )

    def reset(self) -> None:
        """Reset the counters."""
        self.passes, self.savings, self.apply_seconds, self.dropped = 0, 0.0, 0.0, 0
        self.shared, self.prefix_blocks = Counter[str](), 0
        self.physical_peak = self.logical_peak = 0
        if self.evaluator is not None:
            self.evaluator.tally = Tally()

    def stats(self) -> dict[str, Any]:
        """The figures so far.

        Returns:
            ``"method"``, and under ``"sharing"``: ``amsr`` (the paper's average memory saving ratio: one minus
            physical over logical blocks of the rows, each by itself, mean over forward passes); ``physical_peak`` and
            ``logical_peak`` (blocks of a cache, all rows together); ``shared_blocks`` by kind of repeat;
            ``prefix_blocks`` (shared between rows); ``dropped`` (decisions about blocks that were gone); what the
            evaluator counted; ``seconds`` by stage, ``apply`` being the only one that holds decoding up while the
            worker has a thread of its own; ``error`` of the worker.
        """
        found = {
            "amsr": self.savings / self.passes if self.passes else 0.0,
            "physical_peak": self.physical_peak,
            "logical_peak": self.logical_peak,
            "shared_blocks": dict(self.shared),
            "prefix_blocks": self.prefix_blocks,
            "dropped": self.dropped,
            "seconds": {"apply": self.apply_seconds},
        }
        if self.reason is None or self.evaluator is None:
            return {"sharing": found}
        tally, error = self.evaluator.tally, self.worker.error
        found |= dict(tally.counts)
        found["seconds"] = {**tally.seconds, "apply": self.apply_seconds}
        found["error"] = None if error is None else first_line(error)
        reads = f"+{self.reason.reads.name}" if self.reason.reads is not None else ""
        return {"method": self.reason.name + reads, "sharing": found}

    def remove(self) -> None:
        """End the worker, and stop recording ids."""
        self._hook.remove()
        self.worker.stop()


class CacheSharing(Listener):
    """Between a cache and the worker; for the evaluator it is the `Source` of its rows."""

    def __init__(self, handle: BlockSharing, pages: CachePages) -> None:
        self.handle, self._pages = handle, weakref.ref(pages)
        self.rows: list[int] = []  # numbers of the rows that the evaluator follows here
        self.decisions: deque[Decision] = deque()
        self._calls: list[Callable[[], None]] = []  # of the forward pass that is going on, and what followed it
        self._reported: dict[int, int] = {}  # row -> how many of its first blocks the evaluator knows to be sealed
        self._prompts: list[Prompt] = []

    @property
    def pages(self) -> CachePages:
        """The pages of the cache, which exists as long as one of its parts calls this."""
        pages = self._pages()
        assert pages is not None
        return pages

    def layers(self) -> list[tuple[Tensor, Tensor]] | None:
        """Keys and values ``[pages, K, P, D]`` of every layer; ``None`` once the cache is gone."""
        pages = self._pages()
        if pages is None:
            return None
        return [(layer.key_pages, layer.value_pages) for layer in pages.layers if layer.is_allocated]

    def decide(self, decision: Decision) -> None:
        """Queue a decision; `between_passes` carries it out. Called from any thread."""
        self.decisions.append(decision)

    def between_passes(self) -> None:
        """Tell the worker what has come, carry out what was decided, count."""
        began = time.perf_counter()
        pages, store = self.pages, self.pages.store
        if self._prompts:
            self.handle.prefix_blocks += share_prefixes(pages, self._prompts.pop())
        self._tell()
        positions = {row.uid: position for position, row in enumerate(store.rows)} if self.decisions else {}
        for _ in range(len(self.decisions)):
            self._carry_out(self.decisions.popleft(), positions)
        handle, logical = self.handle, store.logical
        if logical:
            handle.passes += 1
            handle.savings += sum(row.repeats for row in store.rows) / logical
            handle.logical_peak = max(handle.logical_peak, logical)
            handle.physical_peak = max(handle.physical_peak, store.physical)
        handle.apply_seconds += time.perf_counter() - began

    def tokens_come(self, counts: Sequence[int], context: ForwardContext) -> None:
        """Note the ids of the new tokens, for the evaluator."""
        rows = tuple(row.uid for row in self.pages.store.rows)
        ids = self.handle.take_ids().to(self.pages.layers[0].device)
        found = context.compact(ids[:, None, :, None])[:, 0, :, 0]
        if self.handle.prefixes and found.shape[1] > 1 and all(row.sealed == 0 for row in self.pages.store.rows):
            self._prompts = [(rows, found, tuple(counts))]
        if self.handle.evaluator is not None:
            self.rows[:] = rows
            self._calls.append(partial(self.handle.evaluator.tokens_came, rows, found, tuple(counts)))

    def rows_cropped(self, lengths: Sequence[int]) -> None:
        """Note that rows have only their first tokens now."""
        store, evaluator = self.pages.store, self.handle.evaluator
        self._prompts = []
        if evaluator is None:
            return
        for row, length in zip(store.rows, lengths, strict=True):
            self._reported[row.uid] = min(self._reported.get(row.uid, 0), length // store.block_size)
            self._calls.append(partial(evaluator.row_cropped, row.uid, length))

    def rows_forked(self, forks: dict[int, int]) -> None:
        """Note forks (fork -> row, by uid)."""
        self._prompts, evaluator = [], self.handle.evaluator
        if evaluator is None:
            return
        self._calls += [partial(evaluator.row_forked, row, fork) for fork, row in forks.items()]
        there = [row.uid for row in self.pages.store.rows]
        gone = tuple(set(self.rows) - set(there))
        if gone:
            self._calls.append(partial(evaluator.rows_gone, gone))
        for row in gone:
            self._reported.pop(row, None)
        self.rows[:] = there

    @contextmanager
    def adopting(self, other: Listener) -> Iterator[None]:
        """Take over the rows of another cache, with what is known of them, while their pages move here."""
        if not isinstance(other, CacheSharing):
            yield
            return
        if other._prompts:
            self.handle.prefix_blocks += share_prefixes(other.pages, other._prompts.pop())
        other._tell(at_once=True)
        first = len(self.pages.store.rows)
        yield
        if self.handle.evaluator is None:
            return
        for row in self.pages.store.rows[first:]:
            self._calls.append(self._report(self.handle.evaluator, row, 0))
        other.rows[:] = []
        self.rows[:] = [row.uid for row in self.pages.store.rows]

    def resumed(self, backend: KVBackend) -> None:
        """Leave the cache to another handle; refused if similar blocks were shared, as only this one knows with what
        they were compared.
        """
        sharing = getattr(backend, "sharing", None)
        if sharing is self.handle:
            return
        if self.handle.reason is not None:
            raise SeergateError(
                f"another handle of {self.handle.reason.name!r} has shared blocks of this cache, and knows what they "
                "were compared with; start a new cache"
            )
        self.pages.listener = Listener()
        if sharing is not None:
            sharing.follow(self.pages)

    def _report(self, evaluator: Evaluator, row: Row, first: int) -> Callable[[], None]:
        """Tells the evaluator which blocks of a row are sealed, from ``first`` on."""
        serials = self.pages.store.serials
        known = tuple((block, serials[block]) for block in row.table[first : row.sealed])
        self._reported[row.uid] = first + len(known)
        return partial(evaluator.blocks_sealed, row.uid, self, first, known)

    def _tell(self, at_once: bool = False) -> None:
        """Report sealed blocks, then events, as a step is examined when its blocks are known; then the blocks once
        more, as events may have dropped them from the evaluator.

        A thread gets the report when a block has been sealed, not at every pass, as waking it takes time from
        decoding.
        """
        evaluator = self.handle.evaluator
        if evaluator is None:
            return
        sealed = [row for row in self.pages.store.rows if row.sealed > self._reported.get(row.uid, 0)]
        if self.handle.worker.threaded and not sealed and not at_once:
            return
        reports = [self._report(evaluator, row, self._reported.get(row.uid, 0)) for row in sealed]
        happened, self._calls = self._calls, []
        self.handle.put([*reports, *happened, *reports])

    def _carry_out(self, decision: Decision, positions: dict[int, int]) -> None:
        store = self.pages.store
        position = positions.get(decision.row)
        if position is None:
            self.handle.dropped += 1
            return
        row = store.rows[position]
        # what becomes of the decision is reported: the evaluator takes it for carried out
        self._reported[row.uid] = min(self._reported.get(row.uid, 0), decision.newer)
        if (
            max(decision.newer, decision.older) >= row.sealed
            or store.serials[row.table[decision.newer]] != decision.newer_serial
            or store.serials[row.table[decision.older]] != decision.older_serial
        ):
            self.handle.dropped += 1
            return
        self.pages.remap(position, decision.newer, row.table[decision.older], like=decision.older)
        self.handle.shared[decision.kind] += 1


def share_prefixes(pages: CachePages, prompt: Prompt) -> int:
    """Let each full page be that of the first row that begins with the same tokens up to its end.

    `num_return_sequences` and repeated sampling put the same prompt into several rows. Pages are shared only if they
    are equal to the last bit, so no output changes: the same row computed at another place of the batch may round
    differently. Returns how many pages were given back.
    """
    (uids, ids, counts), store, size = prompt, pages.store, pages.store.block_size
    if tuple(row.uid for row in store.rows) != uids:
        return 0
    known: dict[tuple[int, ...], int] = {}  # page before it and tokens -> page: a page's is its whole prefix
    shared = 0
    for position, (tokens, count) in enumerate(zip(ids.tolist(), counts, strict=True)):
        row, physical = store.rows[position], -1
        for block in range(min(count // size, row.sealed)):
            own = row.table[block]
            physical = known.setdefault((physical, *tokens[block * size : (block + 1) * size]), own)
            if physical == own:
                continue
            if not _equal(pages, own, physical):
                break
            pages.remap(position, block, physical, like=None)
            shared += 1
    return shared


def _equal(pages: CachePages, a: int, b: int) -> bool:
    return all(
        torch.equal(buffer[a], buffer[b])
        for layer in pages.layers
        if layer.is_allocated
        for buffer in (layer.key_pages, layer.value_pages)
    )


def _tokenizer(model: PreTrainedModel, reason: ReasonCache) -> Any:
    if reason.tokenizer is not None:
        return reason.tokenizer
    try:
        return load_tokenizer(model.name_or_path)
    except Exception as error:
        raise SeergateError(
            f"{reason.name} compares texts and needs the model's tokenizer, and none could be loaded from "
            f"{model.name_or_path!r}; give tokenizer="
        ) from error
