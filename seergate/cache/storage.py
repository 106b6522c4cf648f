"""KV storage. A `Storage` holds the keys and values of one layer; `DynamicStorage` is the default.

To keep them somewhere else, subclass `Storage` (or `DynamicStorage`) and `KVBackend`, which makes the storages, and
pass the backend to `seergate.attach(storage=...)`. docs/decode-engine.md has an example. A storage does not see
padding: a row's tokens are indexed from its first real one, and `Rows` has their number.

Shape suffixes: B batch, S new tokens, C capacity, K KV heads, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from seergate import ops
from seergate.cache.forward import ForwardContext
from seergate.cache.rows import Rows
from seergate.methods.base import AttentionOutput, LayerState, Method, Step
from seergate.methods.evicting import Eviction, compact, trimmed
from seergate.methods.selecting import PerHeadSelection
from seergate.ops import Selection

GROWTH_TOKENS, GROWTH_SHARE = 256, 1 / 8
"""Buffers grow by this many tokens or by this share of their tokens, whichever is larger."""


def token_bytes(keys: Tensor, values: Tensor) -> int:
    """Bytes that one token's key and value take in one KV head of a cache ``[..., D]``."""
    return keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size()


class Storage(ABC):
    """The keys and values of one layer.

    `allocate` is called first, then `write` once per forward pass, with operations on rows (`crop`, `select`,
    `append`) in between. A call that fails must leave the storage unchanged.

    Attributes:
        static_length: slots of a static cache; ``None`` if the storage grows.
        shortens_rows: whether single rows can be cropped within a forward pass.
    """

    static_length: int | None = None
    shortens_rows = True

    @abstractmethod
    def allocate(self, keys: Tensor, values: Tensor, block_size: int, state: LayerState) -> None:
        """Allocate memory for a new batch.

        Args:
            keys, values: the first new tokens, ``[B, K, S, D]``; `write` stores them later.
            block_size: tokens per block of the method.
            state: the method's state in this layer.
        """

    @abstractmethod
    def write(
        self,
        context: ForwardContext,
        rows: Rows,
        keys: Tensor,
        values: Tensor,
        counts: list[int],
        max_tokens: int | None,
    ) -> None:
        """Append new tokens to the rows.

        Args:
            context: the context of the forward pass.
            rows: the rows, before these tokens are counted.
            keys, values: ``[B, K, S, D]``; row b's first ``counts[b]`` are stored.
            counts: new tokens per row.
            max_tokens: maximum tokens per row once its prompt is compressed; ``None`` if the method evicts nothing.
        """

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """All keys ``[B, K, C, D]``, each row's tokens first. May be a copy."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """All values ``[B, K, C, D]``, likewise."""

    def some_keys(self, row: int, first: int, end: int) -> Tensor:
        """The keys ``[1, K, end - first, D]`` of some tokens of a row."""
        return self.keys[row : row + 1, :, first:end]

    def step(self, **facts: Any) -> Step:
        """Build the `Step` for the method from the given fields and the stored keys and values."""
        return Step(keys_BKCD=self.keys, values_BKCD=self.values, **facts)

    def attend(self, step: Step, selection: Selection | PerHeadSelection | None, block_size: int) -> AttentionOutput:
        """Attention of a decode step to the blocks that the method selected.

        Args:
            step: the step.
            selection: the blocks that each KV head, or each query head, reads; ``None`` for all tokens.
            block_size: tokens per block.
        """
        keys, values, page_table = step.stored
        q_BHD, sinks = step.q_BHSD[:, :, 0], step.sinks
        how = step.softmax_options | {"page_table": page_table}
        if selection is None:
            if page_table is None:
                keys, values = keys[:, :, : step.max_length], values[:, :, : step.max_length]
            lengths = None if page_table is None and len(set(step.ends)) == 1 else step.lengths
            return AttentionOutput(ops.dense_decode(q_BHD, keys, values, lengths, **how))

        def sparse(q: Tensor, indices: Tensor, **more: Any) -> Tensor:
            return ops.sparse_decode(q, keys, values, indices, step.rows, block_size, **how | more)

        if isinstance(selection, PerHeadSelection):
            indices, group = selection.heads.indices, q_BHD.shape[1] // keys.shape[1]
            members = [slice(member, None, group) for member in range(group)]
            outputs = [sparse(q_BHD[:, m], indices[:, m], sinks=None if sinks is None else sinks[m]) for m in members]
            output = torch.stack(outputs, 2).flatten(1, 2)
        else:
            output = sparse(q_BHD, selection.indices, counts=selection.counts)
        return AttentionOutput(output)

    @abstractmethod
    def crop(self, lengths: list[int]) -> None:
        """Keep the first ``lengths[b]`` tokens of row b."""

    @abstractmethod
    def select(self, index: Tensor) -> None:
        """Keep the rows ``index`` (int64), in that order; a row may be repeated."""

    @abstractmethod
    def append(self, other: Storage, longest: int, max_tokens: int | None) -> None:
        """Append the rows of another storage of this kind.

        Args:
            other: the other storage, which is not used afterwards.
            longest: tokens of the longest row of ``other``.
            max_tokens: as in `write`.
        """

    @abstractmethod
    def clear(self) -> None:
        """Release all rows; `allocate` is called before the next use."""

    def resume(self, backend: KVBackend) -> None:  # noqa: B027 (most have nothing to do)
        """Called when the cache is used under a handle; another backend may have made this storage."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated on the model's device."""

    @abstractmethod
    def row_bytes(self, resident: list[int]) -> np.ndarray:
        """Bytes of each row's tokens, without batch padding or spare capacity."""


class KVBackend:
    """Factory of the storages of all caches under a handle; the argument of ``attach(storage=...)``. This base class
    makes `DynamicStorage`.

    Attributes:
        tag: kind of storage in the table of refused combinations (`seergate.decode.compatibility`).
    """

    tag: ClassVar[str] = "dynamic"

    @property
    def lossy(self) -> bool:
        """True if a block may be replaced by another block's keys and values."""
        return False

    def bind(self, model: PreTrainedModel, method: Method, layers: Sequence[int]) -> KVBackend:
        """Return the backend for one handle: a copy if the backend keeps state between calls.

        Args:
            model: the model that the handle is attached to.
            method: the method that decides what is read.
            layers: indices of the layers that can be gated.
        """
        return self

    def new(self, layer: int, layers: Sequence[Any], static_length: int | None) -> Storage:
        """Make the storage of one layer of a cache.

        Args:
            layer: the layer's index.
            layers: all layers of the cache; those before this one already have their storage.
            static_length: slots of a static cache; ``None`` for a dynamic one.
        """
        return DynamicStorage(static_length)

    def stats(self) -> dict[str, Any]:
        """The storage's part of `Handle.stats`."""
        return {}

    def saving_ratios(self, layers: Sequence[Any]) -> list[float] | None:
        """Share of each row's blocks that sharing within the row currently saves, in a cache of these layers; ``None``
        without sharing.
        """
        return None

    def reset(self) -> None:
        """Reset the counters."""

    def remove(self) -> None:
        """Called when the handle is detached."""


class DynamicStorage(Storage):
    """Two buffers, for keys and values, that grow as needed or have the ``static_length`` of a static cache."""

    def __init__(self, static_length: int | None = None) -> None:
        self.static_length = static_length
        self.clear()

    def clear(self) -> None:
        self._keys = self._values = torch.empty(0, 0, 0, 0)

    @property
    def keys(self) -> Tensor:
        return self._keys

    @property
    def values(self) -> Tensor:
        return self._values

    def allocate(self, keys: Tensor, values: Tensor, block_size: int, state: LayerState) -> None:
        self.block_size, self.dtype, self.device = block_size, keys.dtype, keys.device
        size = 0 if self.static_length is None else self.in_blocks(self.static_length)
        self._keys, self._values = (self.buffer(keys, *x.shape[:2], size, x.shape[3]) for x in (keys, values))

    def buffer(self, like: Tensor, *shape: int) -> Tensor:
        """Allocate zeros with the dtype of ``like``, in this storage's memory."""
        return like.new_zeros(shape)

    def room_for(self, tokens: int) -> int:
        """Length of a new buffer for rows of this many tokens."""
        return tokens + max(GROWTH_TOKENS, int(tokens * GROWTH_SHARE))

    def in_blocks(self, tokens: int) -> int:
        """Round a number of tokens up to whole blocks, as a block is one contiguous piece of a buffer."""
        return -(-tokens // self.block_size) * self.block_size

    def reserve(self, tokens: int, max_tokens: int | None) -> None:
        """Make room for this many tokens in every row; ``max_tokens`` as in `write`."""
        capacity = self._keys.shape[2]
        if tokens <= capacity:
            return
        roomy = self.room_for(tokens)
        if max_tokens is not None and tokens <= max_tokens:
            roomy = min(roomy, max_tokens)  # a row is longer only before its prompt has been compressed
        size = self.in_blocks(roomy)
        # Both are allocated before either is replaced: running out of memory must leave the cache as it was.
        grown = [self.buffer(old, *old.shape[:2], size, old.shape[3]) for old in (self._keys, self._values)]
        for new, old in zip(grown, (self._keys, self._values), strict=True):
            new[:, :, :capacity] = old
        self._keys, self._values = grown

    def write(
        self,
        context: ForwardContext,
        rows: Rows,
        keys: Tensor,
        values: Tensor,
        counts: list[int],
        max_tokens: int | None,
    ) -> None:
        new, starts = keys.shape[2], rows.resident if context.on_host else []
        if starts:
            self.reserve(max(start + count for start, count in zip(starts, counts, strict=True)), max_tokens)
        home = self._keys.device
        pairs = [
            (buffer, (x.detach() if x.requires_grad else x).to(home, self.dtype))  # autocast mixes dtypes
            for buffer, x in ((self._keys, keys), (self._values, values))
        ]
        if len(set(starts)) == 1 and set(counts) == {new}:
            for buffer, x in pairs:
                buffer[:, :, starts[0] : starts[0] + new] = x
        elif new == 1 and set(counts) == {1}:
            batch = rows.each.to(home) if starts else torch.arange(len(counts), device=home)
            places = rows.lengths.to(home)
            for buffer, x in pairs:
                buffer[batch, :, places] = x[:, :, 0]
        else:
            for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
                for buffer, x in pairs:
                    buffer[row, :, start : start + count] = x[row, :, :count]

    def evict(self, eviction: Eviction, max_tokens: int) -> int:
        """Keep the residents that stay, release memory beyond ``max_tokens``, and return the remaining capacity."""
        for buffer in (self._keys, self._values):
            compact(buffer, eviction)
        if self.static_length is None:
            size = self.in_blocks(max_tokens)
            self._keys, self._values = trimmed(self._keys, size), trimmed(self._values, size)
        return self._keys.shape[2]

    def crop(self, lengths: list[int]) -> None:
        pass  # later tokens overwrite the cropped ones

    def select(self, index: Tensor) -> None:
        self._keys, self._values = self._keys.index_select(0, index), self._values.index_select(0, index)

    def append(self, other: Storage, longest: int, max_tokens: int | None) -> None:
        self.reserve(longest, max_tokens)
        pairs = ((self._keys, other.keys), (self._values, other.values))
        joined = [self.buffer(ours, len(ours) + len(theirs), *ours.shape[1:]) for ours, theirs in pairs]
        for new, (ours, theirs) in zip(joined, pairs, strict=True):
            shared = min(ours.shape[2], theirs.shape[2])
            new[: len(ours)], new[len(ours) :, :, :shared] = ours, theirs[:, :, :shared]
        self._keys, self._values = joined

    def write_back(self, part: DynamicStorage, index: Tensor) -> None:
        """Copy the rows of another storage of the same capacity into the rows ``index`` of this one."""
        for whole, rows in ((self._keys, part.keys), (self._values, part.values)):
            whole[index.to(whole.device)] = rows

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def row_bytes(self, resident: list[int]) -> np.ndarray:
        return np.array(resident) * (self._keys.shape[1] * token_bytes(self._keys, self._values))
