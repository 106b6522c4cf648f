"""Paged caches: keys and values in pages that several rows, or several positions of a row, may share.

`CachePages` are the pages of a cache, whose block table is a `BlockStore`; `Paged` is the storage of one layer.

Shape suffixes: B batch, S new tokens, K KV heads, D head dimension, P pages of a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from seergate.cache.block_store import BlockStore, Copies
from seergate.cache.forward import ForwardContext
from seergate.cache.rows import Rows
from seergate.cache.storage import KVBackend, Storage, token_bytes
from seergate.errors import SeergateError
from seergate.inference_mode import outside_inference_mode
from seergate.methods.base import LayerState, Step
from seergate.ops.paging import unpaged


class PagedStep(Step):
    """A step on a paged cache. Ops read the pages; a method that reads `keys_BKCD` or `values_BKCD` gets a copy.

    With a ``page_table``, int32 ``[B, P]``, keys and values are given as pages ``[pages, K, page, D]``; without one
    (`replace`) as in any step.
    """

    def __init__(self, page_table: Tensor | None = None, **facts: Any) -> None:
        super().__init__(**facts)
        self._stored: Any = (self.keys_BKCD, self.values_BKCD, page_table)
        if page_table is not None:  # gathered on first access
            del self.keys_BKCD, self.values_BKCD

    @cached_property
    def keys_BKCD(self) -> Tensor:  # type: ignore[override]
        """All keys, gathered into a copy."""
        return unpaged(self._stored[0], self._stored[2])

    @cached_property
    def values_BKCD(self) -> Tensor:  # type: ignore[override]
        """All values, gathered into a copy."""
        return unpaged(self._stored[1], self._stored[2])

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._stored  # type: ignore[no-any-return]


class CachePages(BlockStore):
    """The pages of one cache, whose layers all have the same block tables.

    The first layer that comes to an operation (new tokens, reordered rows, ...) applies it to the tables; the others
    use its result and change only their own tensors (`once`).
    """

    @outside_inference_mode
    def __init__(self, block_size: int, limit: int | None) -> None:
        super().__init__(block_size, limit)
        self._layers: list[weakref.ref[Paged]] = []
        self._turn, self._done = 0, cast(Any, None)
        self._tables = torch.zeros(0, 0, dtype=torch.int32, device="cpu")
        self._on_device: dict[torch.device, Tensor] = {}
        self._newest: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def join(self, layer: Paged) -> None:
        """Add a layer."""
        self._layers.append(weakref.ref(layer))

    @property
    def layers(self) -> list[Paged]:
        """The layers that still exist, in order."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values ``[pages, K, page, D]`` of every layer."""
        return [(layer.key_pages, layer.value_pages) for layer in self.layers if layer.is_allocated]

    def once(self, layer: Paged, operation: Callable[[], Any]) -> Any:
        """Apply the layer's next operation to the tables, unless another layer has done so; return its result."""
        if layer.turn == self._turn:
            self._newest = {}
            self._done = operation()
            self._turn += 1
        elif layer.turn != self._turn - 1:
            raise SeergateError(
                "the layers of this paged cache are not in step any more (a forward pass was interrupted, or only "
                "some layers were changed); start a new cache"
            )
        layer.turn += 1
        return self._done

    def advance(self, counts: Sequence[int], context: ForwardContext) -> Copies:
        """Make room for ``counts[b]`` new tokens of each row, between two forward passes."""
        if not self.rows:
            self.add_rows(len(counts))
        self.between_passes()
        return self.extend(counts)

    def between_passes(self) -> None:
        """Seal full blocks: all tokens so far have been written in every layer."""
        self.seal()

    def resumed(self, backend: KVBackend) -> None:
        """Called when the cache is used under a handle with this backend."""

    @outside_inference_mode
    def table(self, device: torch.device) -> Tensor:
        """Block table on a device, int32 ``[B, P]``: the physical block of each logical one; 0 beyond a row's last."""
        rows, stale = self.rows, self.stale
        width = max((len(row.table) for row in rows), default=0)
        if len(rows) != len(self._tables) or width > self._tables.shape[1]:
            self._tables = torch.zeros(len(rows), width + width // 8 + 8, dtype=torch.int32, device="cpu")
            stale = set(range(len(rows)))
        if stale:
            for position in stale:
                line = self._tables[position]
                line.zero_()
                line[: len(rows[position].table)] = torch.tensor(rows[position].table, dtype=torch.int32, device="cpu")
            self.stale, self._on_device = set(), {}
        if device not in self._on_device:
            self._on_device[device] = self._tables.to(device, copy=True)
        return self._on_device[device][:, :width]

    def newest(self, device: torch.device, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Physical block and offset of the token after the first ``lengths [B]`` of each row: two tensors ``[B]``."""
        if device not in self._newest:  # the same in all layers of a forward pass
            rows, size = torch.arange(len(lengths), device=device), self.block_size
            self._newest[device] = self.table(device)[rows, lengths // size].long(), lengths % size
        return self._newest[device]

    def remap(self, position: int, newer: int, older: int) -> None:
        """Map a row's logical block to the physical one of another; the method states copy the entries as well."""
        super().remap(position, newer, older)
        for layer in self.layers:
            parts = self.block_size // layer.block_size
            entries = (slice(block * parts, (block + 1) * parts) for block in (newer, older))
            layer.state.block_shared(position, *entries)


class Paged(Storage):
    """The keys and values of one layer, in pages."""

    shortens_rows = False  # the first layer would take back what later layers still read

    def __init__(self, pages: CachePages) -> None:
        self.pages, self.turn, self.is_allocated = pages, 0, False
        pages.join(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Paged:
        """Raise `SeergateError`: a page belongs to one cache."""
        raise SeergateError("a paged cache cannot be copied; repeat its rows instead (cache.batch_repeat_interleave)")

    def allocate(self, keys: Tensor, values: Tensor, block_size: int, state: LayerState) -> None:
        self.block_size, self.state, self.dtype, self.device = block_size, state, keys.dtype, keys.device
        size, heads = self.pages.block_size, keys.shape[1]
        self.key_pages = keys.new_zeros(0, heads, size, keys.shape[3])
        self.value_pages = keys.new_zeros(0, heads, size, values.shape[3])
        self.is_allocated = True

    def write(
        self,
        context: ForwardContext,
        rows: Rows,
        keys: Tensor,
        values: Tensor,
        counts: list[int],
        max_tokens: int | None,
    ) -> None:
        copies = self.pages.once(self, lambda: self.pages.advance(counts, context))
        self._fit()
        _copy(self.key_pages, self.key_pages, copies)
        _copy(self.value_pages, self.value_pages, copies)
        pairs = [(self.key_pages, keys.detach().to(self.dtype)), (self.value_pages, values.detach().to(self.dtype))]
        if keys.shape[2] == 1 and set(counts) == {1}:
            homes, places = self.pages.newest(self.device, rows.lengths)
            for pages, x in pairs:
                pages[homes, :, places] = x[:, :, 0]
            return
        size = self.pages.block_size
        for row, (start, number) in enumerate(zip(rows.resident, counts, strict=True)):
            tokens = torch.arange(start, start + number, device=self.device)
            homes, places = self.pages.table(self.device)[row].long()[tokens // size], tokens % size
            for pages, x in pairs:
                pages[homes, :, places] = x[row, :, :number].transpose(0, 1)

    def _fit(self) -> None:
        """Allocate as many pages as the store has blocks."""
        for name in ("key_pages", "value_pages"):
            pages: Tensor = getattr(self, name)
            capacity = self.pages.capacity
            if len(pages) < capacity:
                grown = pages.new_zeros(capacity, *pages.shape[1:])
                grown[: len(pages)] = pages
                setattr(self, name, grown)

    @property
    def keys(self) -> Tensor:
        """All keys, gathered into a copy."""
        return unpaged(self.key_pages, self.pages.table(self.device))

    @property
    def values(self) -> Tensor:
        """All values, gathered into a copy."""
        return unpaged(self.value_pages, self.pages.table(self.device))

    def some_keys(self, row: int, first: int, end: int) -> Tensor:
        """Gathers only the pages that hold these tokens."""
        size = self.pages.block_size
        begin, stop = first // size, -(-end // size)
        table = self.pages.table(self.device)[row : row + 1, begin:stop]
        return unpaged(self.key_pages, table)[:, :, first - begin * size : end - begin * size]

    def step(self, **facts: Any) -> Step:
        table = self.pages.table(self.device)
        return PagedStep(table, keys_BKCD=self.key_pages, values_BKCD=self.value_pages, **facts)

    def crop(self, lengths: list[int]) -> None:
        self.pages.once(self, lambda: self.pages.crop(lengths))

    def select(self, index: Tensor) -> None:
        rows = index.tolist()
        self.pages.once(self, lambda: self.pages.select(rows))

    def append(self, other: Storage, longest: int, max_tokens: int | None) -> None:
        if not isinstance(other, Paged):
            raise SeergateError("only the rows of a paged cache can join a paged cache")
        copies = self.pages.once(self, lambda: self.pages.adopt(other.pages))
        self._fit()
        for name in ("key_pages", "value_pages"):
            _copy(getattr(other, name), getattr(self, name), copies)

    def clear(self) -> None:
        if self.is_allocated:
            self.pages.once(self, self.pages.clear)
            self.is_allocated = False

    def resume(self, backend: KVBackend) -> None:
        self.pages.resumed(backend)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use. Free ones do not count: any row may take them."""
        return self.pages.physical * self._page_bytes() if self.is_allocated else 0

    def row_bytes(self, resident: list[int]) -> np.ndarray:
        """Bytes of each row's pages: a page repeated in a row counts once, a page shared with other rows in full."""
        pages = (-(-tokens // self.pages.block_size) for tokens in resident)
        used = np.array([min(n, len(row.table)) - row.repeats for n, row in zip(pages, self.pages.rows, strict=True)])
        return used * self._page_bytes()

    def _page_bytes(self) -> int:
        return self.key_pages.shape[1:3].numel() * token_bytes(self.key_pages, self.value_pages)


def _copy(source: Tensor, target: Tensor, copies: Copies) -> None:
    if copies:
        old, new = torch.tensor(copies, device=source.device).unbind(1)
        target[new] = source[old]
