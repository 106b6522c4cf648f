"""Applies the block sharing of `ReasonCache` between two forward passes.

`BlockSharing` belongs to a handle, `SharedPages` to one cache under it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from seergate.cache.block_store import Copies
from seergate.cache.forward import ForwardContext
from seergate.cache.pages import CachePages
from seergate.cache.storage import KVBackend
from seergate.errors import SeergateError, first_line
from seergate.methods.reason_cache.evaluator import Evaluator
from seergate.methods.reason_cache.method import ReasonCache
from seergate.pretrained import load_tokenizer


class BlockSharing:
    """State shared by the caches of one handle: token ids of the forward pass, counters, and the evaluator.

    Attributes:
        error: the error that has ended sharing, in words, if any.
    """

    def __init__(self, model: PreTrainedModel, reason: ReasonCache) -> None:
        tokenizer = _tokenizer(model, reason)
        self.evaluator = Evaluator(reason, lambda ids: str(tokenizer.decode(ids)))
        self.error: str | None = None
        self._ids: Tensor | None = None
        self._hook = model.get_input_embeddings().register_forward_pre_hook(self._see, with_kwargs=True)
        self.reset()

    def _see(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._ids = args[0] if args else kwargs.get("input")

    def take_ids(self, tokens: int) -> Tensor:
        """Return and clear the ids ``[B, tokens]`` of the current pass. Raises `SeergateError` if there are none."""
        ids, self._ids = self._ids, None
        if ids is None or ids.shape[1] != tokens:  # of another call of the embeddings
            raise SeergateError("sharing of blocks compares token ids; give the model input_ids, not inputs_embeds")
        return ids

    def attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the work of sharing. An error does not end decoding, as sharing only saves memory: one warning
        names it, and later calls do nothing.
        """
        if self.error is not None:
            return
        try:
            work()
        except Exception as error:
            self.error = first_line(error)
            warnings.warn(f"reason_cache shares no more blocks: {self.error}", RuntimeWarning, stacklevel=2)

    def reset(self) -> None:
        """Reset the counters."""
        self.passes, self.savings, self.shared = 0, 0.0, 0
        self.physical_peak = self.logical_peak = 0
        self.evaluator.reset()

    def stats(self) -> dict[str, Any]:
        """Return the figures so far.

        Returns:
            ``"method"``, and under ``"sharing"``: ``amsr`` (the paper's average memory saving ratio: one minus
            physical over logical blocks of the rows, each by itself, mean over forward passes); ``physical_peak`` and
            ``logical_peak`` (blocks of a cache, all rows together); ``shared_blocks``; the evaluator's counts; the
            ``error`` that has ended sharing.
        """
        reason = self.evaluator.method
        figures = {
            "amsr": self.savings / self.passes if self.passes else 0.0,
            "physical_peak": self.physical_peak,
            "logical_peak": self.logical_peak,
            "shared_blocks": self.shared,
            **self.evaluator.counts,
            "error": self.error,
        }
        reads = f"+{reason.reads.name}" if reason.reads is not None else ""
        return {"method": reason.name + reads, "sharing": figures}

    def remove(self) -> None:
        """Stop recording ids."""
        self._hook.remove()


class SharedPages(CachePages):
    """Pages of a cache whose rows may share their own pages. Each row's ``reasoning`` is what the evaluator knows of
    it.
    """

    def __init__(self, sharing: BlockSharing, block_size: int, limit: int | None) -> None:
        super().__init__(block_size, limit)
        self.sharing = sharing

    def advance(self, counts: Sequence[int], context: ForwardContext) -> Copies:
        """Make room for new tokens, and record their ids."""
        if context.q_pre is None:  # then the plain model runs
            return super().advance(counts, context)
        ids = self.sharing.take_ids(context.q_pre.shape[2]).to(self.layers[0].device)  # may refuse the pass
        copies = super().advance(counts, context)
        compact_ids = context.compact(ids[:, None, :, None])[:, 0, :, 0]
        self.sharing.attempt(lambda: self._read(compact_ids, counts, context.mode.decoded))
        return copies

    def between_passes(self) -> None:
        """Share blocks of the steps that have ended, and update the counters."""
        super().between_passes()
        decided = list[tuple[int, int, int]]()
        self.sharing.attempt(lambda: decided.extend(self._decisions()))
        for decision in decided:  # an error here is the caller's, as layers would disagree about a block
            self.remap(*decision)
            self.sharing.shared += 1
        if logical := self.logical:
            self.sharing.passes += 1
            self.sharing.savings += sum(row.repeats for row in self.rows) / logical
            self.sharing.logical_peak = max(self.sharing.logical_peak, logical)
            self.sharing.physical_peak = max(self.sharing.physical_peak, self.physical)

    def crop(self, lengths: Sequence[int]) -> None:
        super().crop(lengths)
        for row, length in zip(self.rows, lengths, strict=True):
            if row.reasoning is not None:
                row.reasoning.crop(length)

    def select(self, index: Sequence[int]) -> None:
        super().select(index)
        for row in self.rows:
            if row.reasoning is not None:
                row.reasoning = row.reasoning.copy()

    def resumed(self, backend: KVBackend) -> None:
        """Raise `SeergateError` if this is another handle, which shares blocks by other options or not at all."""
        if getattr(backend, "sharing", None) is not self.sharing:
            raise SeergateError(
                f"another handle of {self.sharing.evaluator.method.name!r} has shared blocks of this cache; start a "
                "new cache"
            )

    def _read(self, ids: Tensor, counts: Sequence[int], decoded: int) -> None:
        """Give the evaluator the first ``counts[b]`` of each row's ids ``[B, S]``, which have joined the row."""
        for row, new, count in zip(self.rows, ids.tolist(), counts, strict=True):
            row.reasoning = self.sharing.evaluator.tokens_came(row.reasoning, row.length - count, new[:count], decoded)

    def _decisions(self) -> Iterator[tuple[int, int, int]]:
        """Row, newer and older block of each pair to be shared now, in order."""
        for position, row in enumerate(self.rows):
            if row.reasoning is None or not row.reasoning.unexamined:
                continue
            blocks = row.table[: row.sealed]
            for newer, older in self.sharing.evaluator.to_share(row.reasoning, blocks, self.buffers()):
                yield position, newer, older


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
