"""Rows that decode together: their cache and forward passes, and the prefix that their prompts share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from seergate.cache.batching import join_rows, keep_rows, rows_are_independent
from seergate.cache.forward import CACHE
from seergate.cache.storage import KVBackend
from seergate.models.attach import Handle, handle_of
from seergate.models.families import check_angles, text_config

SHARED_TOKENS = 256
"""Shorter prefixes are prefilled with each prompt."""


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
        with self._prefilling(width):
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
            with self._prefilling(len(self.prefix) + 1):
                self._forward(ids, torch.arange(len(self.prefix), device=self.device)[None], None, cache)
            self.prefilled = cache
        cache = _copied(self.prefilled)
        cache.batch_repeat_interleave(rows)
        return cache

    def _prefilling(self, prompt_end: int) -> AbstractContextManager[None]:
        """Read what follows as a part of prompts of so many slots, also if it is a single token."""
        return handle_of(self.model).passes.prefilling(in_chunks=True, prompt_end=prompt_end)

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


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens with which all prompts begin, such as worked examples, if they are many: they are prefilled once. At
    least two tokens of each prompt are left, as a single one would be decoded.
    """
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    length = min(sum(1 for _ in same), min(map(len, prompts), default=0) - 2)
    return prompts[0][:length] if len(prompts) > 1 and length >= SHARED_TOKENS else ()


def shares_prefix(handle: Handle) -> bool:
    """True if prompts may be prefilled in two pieces: the method allows it, and the cache is an ordinary one whose
    layers are all gated.
    """
    able = handle.method.chunked_prefill and type(handle.storage) is KVBackend
    return able and len(handle.bindings) == text_config(handle.model).num_hidden_layers
