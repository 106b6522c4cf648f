"""Applies the block sharing of `ReasonCache`: between two forward passes a cache reports its events and applies
decisions.

`BlockSharing` belongs to a handle, `SharedPages` to one cache under it. Nothing in here waits for a decision.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from seergate.cache.forward import ForwardContext
from seergate.cache.pages import BlockStore, CachePages, Copies, Row
from seergate.cache.storage import KVBackend
from seergate.errors import SeergateError, first_line
from seergate.methods.reason_cache.evaluator import Decision, Evaluator
from seergate.methods.reason_cache.method import ReasonCache
from seergate.methods.reason_cache.worker import Worker
from seergate.pretrained import load_tokenizer


class BlockSharing:
    """State shared by the caches of one handle: token ids of the forward pass, counters, the evaluator, and the worker
    that calls it.
    """

    def __init__(self, model: PreTrainedModel, reason: ReasonCache) -> None:
        self.gone = deque[int]()
        self.worker = Worker(reason.asynchronous)
        tokenizer = _tokenizer(model, reason)
        self.evaluator = Evaluator(reason, lambda ids: str(tokenizer.decode(ids)))
        self._ids: Tensor | None = None
        self._warned = False
        self._hook = model.get_input_embeddings().register_forward_pre_hook(self._see, with_kwargs=True)
        self.reset()

    def _see(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._ids = args[0] if args else kwargs.get("input")

    def take_ids(self) -> Tensor:
        """Return and clear the ids ``[B, S]`` of the current pass. Raises `SeergateError` if there are none."""
        ids, self._ids = self._ids, None
        if ids is None:
            raise SeergateError("sharing of blocks compares token ids; give the model input_ids, not inputs_embeds")
        return ids

    def put(self, calls: list[Callable[[], None]]) -> None:
        """Submit calls of the evaluator to the worker, and warn once if the worker has failed."""
        if gone := [self.gone.popleft() for _ in range(len(self.gone))]:
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
        self.passes, self.savings, self.shared, self.dropped = 0, 0.0, 0, 0
        self.physical_peak = self.logical_peak = 0
        self.evaluator.reset()

    def stats(self) -> dict[str, Any]:
        """Return the figures so far.

        Returns:
            ``"method"``, and under ``"sharing"``: ``amsr`` (the paper's average memory saving ratio: one minus
            physical over logical blocks of the rows, each by itself, mean over forward passes); ``physical_peak`` and
            ``logical_peak`` (blocks of a cache, all rows together); ``shared_blocks``; ``dropped`` (decisions about
            blocks that were gone); the evaluator's counts; ``error`` of the worker.
        """
        reason, error = self.evaluator.method, self.worker.error
        figures = {
            "amsr": self.savings / self.passes if self.passes else 0.0,
            "physical_peak": self.physical_peak,
            "logical_peak": self.logical_peak,
            "shared_blocks": self.shared,
            "dropped": self.dropped,
            **self.evaluator.counts,
            "error": None if error is None else first_line(error),
        }
        reads = f"+{reason.reads.name}" if reason.reads is not None else ""
        return {"method": reason.name + reads, "sharing": figures}

    def remove(self) -> None:
        """Stop the worker, and stop recording ids."""
        self._hook.remove()
        self.worker.stop()


class SharedPages(CachePages):
    """Pages of a cache whose rows may share them. Any thread may append to ``decisions``, which are applied between
    forward passes.
    """

    def __init__(self, sharing: BlockSharing, block_size: int, limit: int | None, numbers: Iterator[int]) -> None:
        super().__init__(block_size, limit, numbers)
        self.decisions: deque[Decision] = deque()
        self._reference = weakref.ref(self)
        self._calls: list[Callable[[], None]] = []  # of the current forward pass, and what followed it
        self._reported: dict[int, int] = {}  # row -> number of first blocks that were reported as sealed
        self.sharing, self.evaluator = sharing, sharing.evaluator
        weakref.finalize(self, sharing.gone.extend, self._reported)

    def advance(self, counts: Sequence[int], context: ForwardContext) -> Copies:
        """Make room for new tokens, and record their ids."""
        copies = super().advance(counts, context)
        if context.q_pre is None:  # then the plain model runs
            return copies
        rows = tuple(row.uid for row in self.rows)
        ids = self.sharing.take_ids().to(self.layers[0].device)
        compact_ids = context.compact(ids[:, None, :, None])[:, 0, :, 0]
        self._follow(rows)
        self._calls.append(partial(self.evaluator.tokens_came, rows, compact_ids, tuple(counts)))
        return copies

    def between_passes(self) -> None:
        """Report events to the worker, apply decisions, and update the counters."""
        super().between_passes()
        self._catch_up()
        positions = {row.uid: position for position, row in enumerate(self.rows)} if self.decisions else {}
        for _ in range(len(self.decisions)):
            self._carry_out(self.decisions.popleft(), positions)
        if logical := self.logical:
            self.sharing.passes += 1
            self.sharing.savings += sum(row.repeats for row in self.rows) / logical
            self.sharing.logical_peak = max(self.sharing.logical_peak, logical)
            self.sharing.physical_peak = max(self.sharing.physical_peak, self.physical)

    def crop(self, lengths: Sequence[int]) -> None:
        super().crop(lengths)
        for row, length in zip(self.rows, lengths, strict=True):
            blocks = length // self.block_size
            self._reported[row.uid] = min(self._reported.get(row.uid, 0), blocks)
            self._calls.append(partial(self.evaluator.row_cropped, row.uid, length, blocks))

    def select(self, index: Sequence[int]) -> dict[int, int]:
        forks = super().select(index)
        self._calls += [partial(self.evaluator.row_forked, row, fork) for fork, row in forks.items()]
        there = [row.uid for row in self.rows]
        if gone := tuple(self._reported.keys() - there):
            self._calls.append(partial(self.evaluator.rows_gone, gone))
        for row in gone:
            del self._reported[row]
        self._follow(there)
        return forks

    def adopt(self, other: BlockStore) -> Copies:
        """Append another store's rows, and report them to this handle's evaluator."""
        if not isinstance(other, SharedPages):
            return super().adopt(other)
        other.seal()
        other._catch_up(at_once=True)
        first = len(self.rows)
        copies = super().adopt(other)
        self._calls += [self._report(row, 0) for row in self.rows[first:]]
        other._reported.clear()
        return copies

    def resumed(self, backend: KVBackend) -> None:
        """Raise `SeergateError` if this is another handle: only the own one knows what blocks were compared with."""
        if getattr(backend, "sharing", None) is not self.sharing:
            raise SeergateError(
                f"another handle of {self.evaluator.method.name!r} has shared blocks of this cache, and knows what "
                "they were compared with; start a new cache"
            )

    def _follow(self, rows: Sequence[int]) -> None:
        for uid in rows:
            self._reported.setdefault(uid, 0)

    def _report(self, row: Row, first: int) -> Callable[[], None]:
        """Return a call that tells the evaluator which blocks of a row are sealed, from ``first`` on."""
        sealed_blocks = tuple((block, self.serials[block]) for block in row.table[first : row.sealed])
        self._reported[row.uid] = first + len(sealed_blocks)
        return partial(self.evaluator.blocks_sealed, row.uid, self._reference, first, sealed_blocks)

    def _catch_up(self, at_once: bool = False) -> None:
        """Report to the evaluator sealed blocks, then events, as a step is examined only if its blocks are known; then
        the blocks again, as events may have dropped them.

        A worker with a thread gets reports only when a block has been sealed, as waking the thread delays decoding.
        """
        sealed = [row for row in self.rows if row.sealed > self._reported.get(row.uid, 0)]
        if self.sharing.worker.threaded and not sealed and not at_once:
            return
        reports = [self._report(row, self._reported.get(row.uid, 0)) for row in sealed]
        happened, self._calls = self._calls, []
        self.sharing.put([*reports, *happened, *reports])

    def _carry_out(self, decision: Decision, positions: dict[int, int]) -> None:
        position = positions.get(decision.row)
        if position is None:
            self.sharing.dropped += 1
            return
        row = self.rows[position]
        # report the outcome: the evaluator counts the decision as applied
        self._reported[row.uid] = min(self._reported.get(row.uid, 0), decision.newer)
        if (
            max(decision.newer, decision.older) >= row.sealed
            or self.serials[row.table[decision.newer]] != decision.newer_serial
            or self.serials[row.table[decision.older]] != decision.older_serial
        ):
            self.sharing.dropped += 1
            return
        self.remap(position, decision.newer, decision.older)
        self.sharing.shared += 1


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
