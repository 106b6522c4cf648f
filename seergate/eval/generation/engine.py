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

import copy
import gc
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from seergate.cache.batching import join_rows, keep_rows, rows_are_independent
from seergate.cache.forward import CACHE
from seergate.cache.layer import GatedLayer
from seergate.cache.paging import Paging
from seergate.cache.storage import KVBackend
from seergate.checks import check_count, check_counts
from seergate.decode.stats import DecodeStats
from seergate.errors import SeergateError
from seergate.eval.generation.batch_memory import estimated_batch, is_out_of_memory, needing_memory
from seergate.eval.generation.costs import RowStats
from seergate.eval.sampling import SampledRow, Sampling, TokenChooser
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks.prompts import end_ids
from seergate.methods.evicting import CompressingMethod, CompressingState
from seergate.models.attach import Handle, handle_of
from seergate.models.families import check_angles, text_config

SHARED_TOKENS = 256
"""Shorter prefixes are prefilled with each prompt."""


@dataclass(frozen=True)
class Request:
    """One sample to be generated: its prompt as text and as tokens, and the seed of its random numbers. ``key``
    identifies it to the caller; ``reply`` holds the tokens of a right answer, whose log-probability is measured;
    ``stop`` holds texts that end the answer, which is cut before the first of them.
    """

    key: Any
    prompt: str
    ids: tuple[int, ...]
    seed: int = 0
    reply: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limit:
    """Maximum length of a sample.

    Attributes:
        max_new_tokens: limit of the answer alone; ``None`` for no such limit.
        max_total_tokens: limit of prompt and answer together; ``None`` for no such limit.

    Raises:
        ValueError: if a limit is below 1, or neither is given.
    """

    max_new_tokens: int | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, optional=True, max_new_tokens=1, max_total_tokens=1)
        if self.max_new_tokens is None and self.max_total_tokens is None:
            raise ValueError("neither max_new_tokens nor max_total_tokens is given; one of them must be")

    def of(self, prompt_tokens: int) -> int:
        """Maximum number of new tokens after a prompt of this length; 0 or less if there is no room."""
        total = None if self.max_total_tokens is None else self.max_total_tokens - prompt_tokens
        return min(limit for limit in (self.max_new_tokens, total) if limit is not None)

    def __str__(self) -> str:
        """The limit in words."""
        limits = {"new tokens": self.max_new_tokens, "tokens, prompt included": self.max_total_tokens}
        return "at most " + " and ".join(f"{limit} {what}" for what, limit in limits.items() if limit is not None)


@dataclass(frozen=True)
class Generation:
    """A finished sample.

    Attributes:
        completion: the generated text, without the end token.
        token_ids: the generated tokens, the end token included if there is one.
        finish_reason: ``"stop"`` (the end token or a stop text came) or ``"length"`` (the limit came first).
        seconds: its share of the wall-clock time; the time of each step is divided equally among its rows.
        costs: `RowStats.of`, empty if a server generated it; and ``reply_logprob`` if the request has a reply.
    """

    request: Request
    completion: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float
    costs: dict[str, Any]

    @classmethod
    def of(
        cls,
        request: Request,
        tokens: Sequence[int],
        ends: Collection[int],
        tokenizer: PreTrainedTokenizerBase,
        seconds: float,
        costs: dict[str, Any],
    ) -> Generation:
        """Make the sample from a request's generated tokens, which end with a token of ``ends`` or at the limit. They
        are cut behind the token that completes a text of ``request.stop``, if one does.
        """
        count = (i for i in range(1, len(tokens) + 1) if ends_in_stop(tokens[:i], request.stop, tokenizer))
        cut = next(count, None) if request.stop else None
        tokens, stopped = tokens[:cut], cut is not None or tokens[-1] in ends
        ended = tokens[-1] in ends
        text = text_of(tokens[:-1] if ended else tokens, tokenizer)
        text = text[: min((text.index(each) for each in request.stop if each in text), default=None)]
        return cls(request, text, tuple(tokens), "stop" if stopped else "length", seconds, costs)

    @property
    def n_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)


def text_of(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of tokens, with the space at its beginning that decoders like Llama 2's leave out."""
    text = str(tokenizer.decode(tokens, skip_special_tokens=False))
    # models may have more tokens than their tokenizer, which has no piece for them
    pieces = "".join(piece or "" for piece in tokenizer.convert_ids_to_tokens([int(token) for token in tokens]))
    spaces = len(pieces) - len(pieces.lstrip("\u2581"))
    return text if text.startswith(" " * spaces) else f" {text}"


def ends_in_stop(tokens: Sequence[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if one of the texts ``stop`` is complete with the last of the tokens, or has just been."""
    # a text of n bytes takes at most n tokens
    return bool(stop) and any(
        text in tokenizer.decode(tokens[-max(len(each.encode()) for each in stop) :]) for text in stop
    )


class Batch:
    """Rows that decode together, under the method that is attached to the model: their cache and forward passes.

    Args:
        prefix: tokens with which every prompt begins, and after which each has two more at least (`common_prefix`);
            they are prefilled once. The handle must allow that (`shares_prefix`).
    """

    def __init__(self, model: PreTrainedModel, prefix: Sequence[int] = ()) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.device = model.get_input_embeddings().weight.device
        self.prefix = list(prefix)
        self.prefilled: Cache | None = None  # one row with the prefix, after the first prompts
        self.lengths: list[int] = []  # tokens in the cache
        self.mask: Tensor | None = None  # [rows, slots]; kept only for caches whose rows share their slots

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def joinable(self) -> bool:
        """True if rows may join while others are being decoded."""
        return not self.lengths or rows_are_independent(self.cache)

    def add(self, prompts: Sequence[Sequence[int]], look: Callable[[Batch, Tensor], None] | None = None) -> Tensor:
        """Prefill prompts and append their rows to the batch.

        Args:
            prompts: token ids of each.
            look: called with a separate batch, which holds a copy of the new rows, and with their logits.

        Returns:
            Logits ``[len(prompts), V]`` of each row's next token.

        Raises:
            SeergateError: if a prompt is too long for the frequencies of the model's RoPE (`check_angles`).
        """
        before, width = len(self.prefix), max(map(len, prompts))
        assert all(list(ids[:before]) == self.prefix and len(ids) > before + bool(before) for ids in prompts)
        check_angles(text_config(self.model), width, "a prompt")
        # padding is masked: any token will do
        rows = [[0] * (width - len(ids)) + list(ids[before:]) for ids in prompts]
        seen = [[1] * before + [0] * (width - len(ids)) + [1] * (len(ids) - before) for ids in prompts]
        mask = torch.tensor(seen, device=self.device)
        cache = self._started(len(prompts))
        with handle_of(self.model).passes.prefilling(in_chunks=True):  # a prompt of one token is not decoded either
            logits = self._forward(
                torch.tensor(rows, device=self.device),
                (mask.cumsum(1) - 1).clamp(min=0)[:, before:],
                None if min(map(len, prompts)) == width else mask,
                cache,
            )
        lengths, shared = [len(ids) for ids in prompts], None if rows_are_independent(cache) else mask
        if look is not None:
            twin = Batch(self.model)
            twin.cache = _copied(cache)
            twin.lengths, twin.mask = list(lengths), shared
            look(twin, logits)
        if self.lengths:
            join_rows(self.cache, cache)
        else:
            self.cache = cache
        self.mask = shared
        self.lengths += lengths
        return logits

    def _started(self, rows: int) -> Cache:
        """A cache whose rows hold the prefix."""
        cache: Cache = DynamicCache(config=self.model.config)
        if not self.prefix:
            return cache
        if self.prefilled is None:
            ids = torch.tensor([self.prefix], device=self.device)
            self._forward(ids, torch.arange(len(self.prefix), device=self.device)[None], None, cache)
            self.prefilled = cache
        cache = _copied(self.prefilled)
        cache.batch_repeat_interleave(rows)
        return cache

    def log_probabilities(self, logits: Tensor, replies: Sequence[Sequence[int]]) -> list[float]:
        """Log-probability in nats of a given reply (token ids) to each row, 0 for an empty reply; ``logits [rows, V]``
        are those of the first tokens.
        """
        sums = [0.0] * len(replies)
        for i in range(longest := max(map(len, replies))):
            log_probs = logits.float().log_softmax(-1)
            for row, reply in enumerate(replies):
                sums[row] += float(log_probs[row, reply[i]]) if i < len(reply) else 0.0
            if i + 1 < longest:
                logits = self.step([reply[i] if i < len(reply) else 0 for reply in replies])
        return sums

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Decode one given token per row; return the logits ``[rows, V]`` of the token after it.

        Raises `SeergateError` if a row gets too long for the frequencies of the model's RoPE (`check_angles`).
        """
        check_angles(text_config(self.model), max(self.lengths) + 1, "a prompt with its answer")
        if self.mask is not None:
            self.mask = torch.cat((self.mask, self.mask.new_ones(len(self), 1)), dim=1)
        ids = torch.tensor(tokens, device=self.device)[:, None]
        positions = torch.tensor(self.lengths, device=self.device)[:, None]
        logits = self._forward(ids, positions, self.mask, self.cache)
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        if not rows:
            self.cache, self.mask = DynamicCache(config=self.model.config), None
        else:
            keep_rows(self.cache, rows)
            self.mask = None if self.mask is None else self.mask[rows]
        self.lengths = [self.lengths[row] for row in rows]

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            **{CACHE: cache},
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


def _copied(cache: Cache) -> Cache:
    """A copy that may be modified, also outside of inference mode."""
    with torch.inference_mode(False):
        return copy.deepcopy(cache)


@torch.inference_mode()
def sample_bytes(model: PreTrainedModel, prompt: Sequence[int], longest: int) -> float:
    """Estimated peak bytes of a sample of ``longest`` tokens under the attached method: keys, values and the method's
    state, extrapolated from a prefill of ``prompt``.
    """
    batch, total = Batch(model), 0.0
    batch.add([prompt])
    for layer in batch.cache.layers:
        if not isinstance(layer, GatedLayer) or layer.state is None:
            # linear attention has no keys but states, and a layer that reads another's keys has neither
            keys = [getattr(layer, name, None) for name in ("keys", "values")]
            states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
            for tensors, times in ((keys, longest / len(prompt)), (states, 1)):
                total += times * sum(tensor.nbytes for tensor in tensors if tensor is not None)
            continue
        state, resident = layer.state, longest
        if isinstance(state, CompressingState) and not state.compresses_once:
            for part in (state, *state.parts):
                if isinstance(part, CompressingState):
                    part.decoded = [longest - len(prompt)]  # as at the end: some states grow
            resident = max(len(prompt), min(longest, state.max_resident()))
        total += float(layer.storage.row_bytes([resident])[0] + state.bytes_held(resident, longest))
    return total


class _Row(SampledRow):
    """A sample that is being generated."""

    def __init__(self, request: Request, limit: int) -> None:
        super().__init__(list(request.ids), request.seed)
        self.request, self.limit, self.seconds = request, limit, 0.0
        self.reply_logprob: float | None = None

    @property
    def full(self) -> bool:
        """True if the answer has reached its limit."""
        return len(self.tokens) >= self.limit

    def ended(self, ends: Collection[int], tokenizer: PreTrainedTokenizerBase) -> bool:
        """True if the last token was the answer's last."""
        return self.tokens[-1] in ends or self.full or ends_in_stop(self.tokens, self.request.stop, tokenizer)


@dataclass(frozen=True)
class Job:
    """One setting, and how its samples are generated.

    Attributes:
        batch_size: samples that a process generates together; as many as fit into memory if ``None``.
        prompt, longest: token ids of the longest prompt, and number of tokens of the longest sample (prompt included),
            from which memory is estimated.
        prefix: `common_prefix` of the prompts of all samples.
    """

    spec: MethodSpec
    batch_size: int | None
    prompt: tuple[int, ...]
    longest: int
    limit: Limit
    sampling: Sampling
    prefix: tuple[int, ...] = ()


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens with which all prompts begin, such as worked examples, if they are many: they are prefilled once. At
    least two tokens of each prompt are left, as a single one would be decoded.
    """
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    length = min(sum(1 for _ in same), min(map(len, prompts), default=0) - 2)
    return prompts[0][:length] if len(prompts) > 1 and length >= SHARED_TOKENS else ()


def shares_prefix(handle: Handle) -> bool:
    """True if prompts may be prefilled in two pieces: nothing is evicted or approximated, and all layers are gated."""
    exact = not isinstance(handle.method, CompressingMethod) and type(handle.storage) is KVBackend
    return exact and len(handle.bindings) == text_config(handle.model).num_hidden_layers


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
