"""Generation with continuous batching: when a sample ends, the next one takes its place at once.

Reasoning lengths have long tails. In a static batch most rows soon wait for the longest one; here a finished row is
delivered and replaced in the same step. The rows of the cache have independent lengths (`seergate.cache.rows`), so
only prompts that are prefilled together are padded. Models with layers that do not support this (sliding windows,
linear attention) run in static batches whose finished rows are dropped.

A sample's tokens do not depend on its neighbours: selections are made per row, and each sample has its own random
generator. (Matrix products of different sizes round differently, which can change the choice between two tokens that
are nearly tied: rare in float32, common in bfloat16.) With dynamic and LongRoPE scaling the frequencies depend on the
longest row and on the length at which a key was cached. Rows so long that the frequencies change are refused.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from seergate.cache.paging import Paging
from seergate.checks import check_count
from seergate.decode.stats import DecodeStats
from seergate.errors import SeergateError
from seergate.eval.generation.batch import Batch, shares_prefix
from seergate.eval.generation.batch_memory import estimated_batch, is_out_of_memory, needing_memory, sample_bytes
from seergate.eval.generation.costs import RowStats
from seergate.eval.generation.samples import Generation, Job, Request, ends_in_stop
from seergate.eval.sampling import SampledRow, TokenChooser
from seergate.eval.tasks.prompts import end_ids
from seergate.models.attach import Handle


class _Row(SampledRow):
    """A sample that is being generated."""

    def __init__(self, request: Request, limit: int) -> None:
        super().__init__(list(request.ids), request.seed)
        self.request, self.limit, self.seconds = request, limit, 0.0
        self.reply_logprob: float | None = None

    def ended(self, ends: Collection[int], tokenizer: PreTrainedTokenizerBase) -> bool:
        """True if the last token was the answer's last."""
        last = self.tokens[-1] in ends or len(self.tokens) >= self.limit
        return last or ends_in_stop(self.tokens, self.request.stop, tokenizer)


class Engine:
    """Generates samples, and halves the batch size whenever memory runs out. The samples then restart from their
    prompts and seeds, because a dense prefill of their generated tokens would give other keys and values than the
    sparse decode steps did.

    Args:
        handle: the job's method, attached to a model in eval mode.
        on_finished: called with every sample when it ends.
        sharing: number of processes that share the device's memory.
    """

    def __init__(
        self,
        handle: Handle,
        tokenizer: PreTrainedTokenizerBase,
        job: Job,
        on_finished: Callable[[Generation], None],
        sharing: int = 1,
    ) -> None:
        if job.batch_size is None:
            with needing_memory(f"the longest prompt, of {len(job.prompt)} tokens, was read"):
                each = sample_bytes(handle.model, job.prompt, job.longest)
            self.batch_size = estimated_batch(handle.model.device, each, sharing)
        else:
            check_count("batch_size", job.batch_size, 1)
            self.batch_size = job.batch_size
        self.handle, self.tokenizer, self.limit, self.on_finished = handle, tokenizer, job.limit, on_finished
        self.choose = TokenChooser(job.sampling)
        self.ends = end_ids(handle.model, tokenizer)
        self.waiting = deque[Request]()
        self.rows = list[_Row]()
        self.prefix = job.prefix if shares_prefix(handle) else ()
        self._restart()

    def run(self, requests: Iterable[Request]) -> None:
        """Generate all samples.

        Raises:
            SeergateError: if not even one sample fits into memory, or one gets too long for the frequencies of the
                model's RoPE (`check_angles`).
        """
        self.waiting = deque(requests)
        self._restart()
        try:
            while self.step():
                pass
        finally:
            self.handle.count_with(DecodeStats)
            self.handle.reset_stats()
            self.batch.prefilled = None

    @torch.inference_mode()
    def step(self) -> bool:
        """Prefill waiting samples if there is room, else decode one token per row; false if no sample is left."""
        arriving = list[_Row]()
        while self.waiting and self.batch.joinable and len(self.rows) + len(arriving) < self.batch_size:
            request = self.waiting.popleft()
            arriving.append(_Row(request, self.limit.of(len(request.ids))))
        together = len(self.rows) + len(arriving)
        if not together:
            return False
        try:
            self._advance(arriving)
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the except block nothing references the frames of the failed forward pass and their tensors.
        self._back_off(together)
        return True

    def _back_off(self, together: int) -> None:
        """Halve the batch after memory ran out with ``together`` rows, which restart before waiting ones."""
        if together == 1 and self.prefix:
            self.prefix = ()  # it takes the memory of another row
        elif together == 1 and self.rows:
            tokens = len(self.rows[0].prompt) + len(self.rows[0].tokens)
            raise SeergateError(f"not even one sample fits into memory, which ran out at {tokens} tokens")
        self.batch_size = max(1, together // 2)
        self.waiting.extendleft(row.request for row in reversed(self.rows))
        self._restart()

    def _restart(self) -> None:
        """Drop all rows, free their memory and reset the statistics."""
        self.batch, self.rows = Batch(self.handle.model, self.prefix), []
        self.handle.reset_stats()
        self.stats = self.handle.count_with(RowStats)
        gc.collect()
        if self.batch.device.type == "cuda":
            torch.cuda.empty_cache()

    def _advance(self, arriving: list[_Row]) -> None:
        """Prefill new rows, or decode one token of every row; deliver the samples that have ended."""
        began = time.perf_counter()
        if arriving:
            moved, first = arriving, len(self.rows)
            self.rows = [*self.rows, *arriving]  # before the prefill: if it fails, they restart too
            asked = any(row.request.reply for row in arriving) and self.handle.storage.tag != Paging.tag
            look = self._measure_replies if asked else None  # on a copy of the cache, which pages do not allow
            logits = self.batch.add([row.prompt for row in arriving], look)
            self.stats.add_rows(len(arriving))
        else:
            logits = self.batch.step([row.tokens[-1] for row in self.rows])
            moved, first = self.rows, 0
            if (ratios := self.handle.storage.saving_ratios(self.batch.cache.layers)) is not None:
                self.stats.note_savings(ratios)
        for row, token in zip(moved, self.choose(logits, moved), strict=True):
            row.tokens.append(token)
        spent = (time.perf_counter() - began) / len(moved)
        for row in moved:
            row.seconds += spent
        self._retire({first + i for i, row in enumerate(moved) if row.ended(self.ends, self.tokenizer)})

    def _measure_replies(self, batch: Batch, logits: Tensor) -> None:
        rows = self.rows[-len(batch) :]
        self.handle.count_with(DecodeStats)  # decoding replies is not part of the samples' costs
        try:
            sums = batch.log_probabilities(logits, [row.request.reply for row in rows])
        finally:
            self.handle.stats_ = self.stats
        for row, logprob in zip(rows, sums, strict=True):
            row.reply_logprob = logprob if row.request.reply else None

    def _retire(self, ended: set[int]) -> None:
        if not ended:
            return
        finished = []
        for i in sorted(ended):
            row = self.rows[i]
            reply = {} if row.reply_logprob is None else {"reply_logprob": row.reply_logprob}
            costs = self.stats.of(i) | reply
            finished.append(Generation.of(row.request, row.tokens, self.ends, self.tokenizer, row.seconds, costs))
        remaining = [i for i in range(len(self.rows)) if i not in ended]
        # Dropping rows copies the others, which may run out of memory. Finished samples must have left `rows` by
        # then, or they would be generated and delivered again.
        self.rows = [self.rows[i] for i in remaining]
        for generation in finished:
            with needing_memory("a finished sample was taken in"):  # backing off would lose the sample
                self.on_finished(generation)
        self.batch.keep(remaining)
        self.stats.keep_rows(remaining)
