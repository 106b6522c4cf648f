"""PagedLayer: a `GatedLayer` whose keys and values lie in the blocks of a `BlockStore` that a cache's layers share.

All layers of a cache have the same tables. The first layer that reaches an operation (new tokens, rows reordered, ...)
carries it out in the store, the others find it done and only touch their own tensors: `CachePages.once`.

Shape suffixes: B batch, S new tokens, K KV heads, D head dimension, P blocks of a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from seergate.cache.call import Call
from seergate.cache.layer import GatedLayer
from seergate.cache.ordinary import ordinary_tensors
from seergate.errors import SeergateError
from seergate.methods.base import Method, Step
from seergate.methods.selecting import SelectingMethod
from seergate.ops.paging import unpaged
from seergate.reason.paged import BlockStore, Copies
from seergate.reason.paged_step import PagedStep

if TYPE_CHECKING:
    from seergate.reason.sharing import CacheSharing

PAGE_TOKENS = 16
"""Tokens per block where neither the user nor the method says how many (vLLM's default)."""


@dataclass(frozen=True)
class Paging:
    """Keep keys and values in pages instead of one buffer per layer.

    Attributes:
        block_size: tokens per page, a multiple of the method's block size; the method's own, or 16, if ``None``.
        max_blocks: how many pages a cache may have, all rows together; ``None`` for no limit. Reaching it raises
            `OutOfBlocks`.
        share_prefixes: let rows whose prompts begin with the same tokens share the pages of that beginning, once the
            prompt has been read; only pages that are equal to the last bit.
    """

    block_size: int | None = None
    max_blocks: int | None = None
    share_prefixes: bool = False

    def page_of(self, method: Method) -> int:
        """Tokens per page under a method.

        Raises:
            SeergateError: if pages would cut a block.
        """
        own = int(getattr(method, "block_size", PAGE_TOKENS))
        size = own if self.block_size is None else self.block_size
        if isinstance(method, SelectingMethod) and isinstance(size, int) and size % own:
            raise SeergateError(
                f"pages of {size} tokens would cut the blocks of {own} that {method.name!r} selects; their size must "
                "be a multiple of it"
            )
        BlockStore(size, self.max_blocks)  # complains about other nonsense
        return size


class CachePages:
    """The blocks of one cache, and the order in which its layers operate on them.

    Args:
        store: the bookkeeping.

    Attributes:
        sharing: what lets blocks share memory, if anything does.
    """

    @ordinary_tensors
    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.sharing: CacheSharing | None = None
        self._layers: list[weakref.ref[PagedLayer]] = []
        self._turn, self._done = 0, cast(Any, None)
        self._tables = torch.zeros(0, 0, dtype=torch.int32)
        self._on_device: dict[torch.device, Tensor] = {}
        self._newest: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def join(self, layer: PagedLayer) -> None:
        """A layer takes part from now on."""
        self._layers.append(weakref.ref(layer))

    @property
    def layers(self) -> list[PagedLayer]:
        """Those that still exist, in order."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    def once(self, layer: PagedLayer, operation: Callable[[], Any]) -> Any:
        """Carry out the layer's next operation, unless another layer has already done so; its result."""
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

    def advance(self, batch: int, counts: Sequence[int], ids: Callable[[], Tensor] | None) -> Copies:
        """Between two forward passes: seal what is full, apply what was decided, make room for the new tokens.

        Args:
            batch: rows.
            counts: new tokens per row.
            ids: returns their ids ``[B, S]``, each row's first; ``None`` if they are not known.
        """
        if not self.store.rows:
            self.store.add_rows(batch)
        self.store.seal()
        if self.sharing is not None:
            self.sharing.between_passes()
        copies = self.store.extend(counts)
        if self.sharing is not None:
            self.sharing.note_tokens(counts, ids)
        return copies

    @ordinary_tensors
    def table(self, device: torch.device) -> Tensor:
        """Int32 ``[B, P]`` on a device: the physical block of each logical one; 0 beyond a row's last."""
        rows, stale = self.store.rows, self.store.stale
        width = max((len(row.table) for row in rows), default=0)
        if len(rows) != len(self._tables) or width > self._tables.shape[1]:
            self._tables = torch.zeros(len(rows), width + width // 8 + 8, dtype=torch.int32)
            stale = set(range(len(rows)))
        if stale:
            for position in stale:
                line = self._tables[position]
                line.zero_()
                line[: len(rows[position].table)] = torch.tensor(rows[position].table, dtype=torch.int32)
            self.store.stale, self._on_device = set(), {}
        if device not in self._on_device:
            self._on_device[device] = self._tables.to(device, copy=True)
        return self._on_device[device][:, :width]

    def newest(self, device: torch.device, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Where the token after the first ``lengths [B]`` of each row lies: blocks and places in them, ``[B]``."""
        if device not in self._newest:  # the same in all layers of a forward pass
            rows, size = torch.arange(len(lengths), device=device), self.store.block_size
            self._newest[device] = self.table(device)[rows, lengths // size].long(), lengths % size
        return self._newest[device]

    def remap(self, position: int, block: int, physical: int, like: int | None) -> None:
        """Let a row's block be another physical one, and let the methods know.

        Args:
            position: of the row.
            block: logical.
            physical: what it shall be.
            like: which logical block of the same row it is now; ``None`` if its contents have not changed.
        """
        self.store.remap(position, block, physical)
        if like is None:
            return
        for layer in self.layers:
            if layer.state is not None:
                parts = self.store.block_size // layer.block_size
                newer, older = (slice(i * parts, (i + 1) * parts) for i in (block, like))
                layer.state.block_shared(position, newer, older)


class PagedLayer(GatedLayer):
    """See the module's docstring.

    Args:
        pages: of the cache.
        method, layer, num_heads, rotary, static_length, shared: see `GatedLayer`.
    """

    shortens_rows = False

    def __init__(self, pages: CachePages, *args: Any, **kwargs: Any) -> None:
        self.pages, self.turn = pages, 0
        super().__init__(*args, **kwargs)
        pages.join(self)

    def _clear(self) -> None:
        super()._clear()
        self.key_pages: Tensor | None = None
        self.value_pages: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> GatedLayer:
        """Refused: a page belongs to one cache.

        Raises:
            SeergateError: always.
        """
        raise SeergateError("a paged cache cannot be copied; repeat its rows instead (cache.batch_repeat_interleave)")

    # What `GatedLayer` keeps in two buffers is put together from the pages where somebody asks for all of it.
    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """All keys ``[B, K, P * page, D]``: a copy."""
        return None if self.key_pages is None else unpaged(self.key_pages, self.pages.table(self.device))

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        pass

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """All values ``[B, K, P * page, D]``: a copy."""
        return None if self.value_pages is None else unpaged(self.value_pages, self.pages.table(self.device))

    @values.setter
    def values(self, value: Tensor | None) -> None:
        pass

    def some_keys(self, row: int, first: int, end: int) -> Tensor:
        """See `GatedLayer`. Gathers only the pages that hold these tokens."""
        assert self.key_pages is not None
        size = self.pages.store.block_size
        begin, stop = first // size, -(-end // size)
        table = self.pages.table(self.device)[row : row + 1, begin:stop]
        return unpaged(self.key_pages, table)[:, :, first - begin * size : end - begin * size]

    # ---------------------------------------------------------------------------------------------------- storing

    @ordinary_tensors
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See `GatedLayer`."""
        super().lazy_initialization(key_states, value_states)
        size, heads = self.pages.store.block_size, key_states.shape[1]
        self.key_pages = key_states.new_zeros(0, heads, size, key_states.shape[3])
        self.value_pages = value_states.new_zeros(0, heads, size, value_states.shape[3])

    def _store(self, call: Call, keys: Tensor, values: Tensor, starts: list[int], counts: list[int]) -> None:
        keys, values = keys.detach().to(self.dtype), values.detach().to(self.dtype)

        def ids() -> Tensor:
            assert self.pages.sharing is not None
            found = self.pages.sharing.ids()
            return call.compact(found.to(self.device)[:, None, :, None])[:, 0, :, 0]

        known = None if call.taps is None else ids
        copies = self.pages.once(self, lambda: self.pages.advance(len(counts), counts, known))
        self._fit()
        assert self.key_pages is not None and self.value_pages is not None
        _copy(self.key_pages, self.key_pages, copies)
        _copy(self.value_pages, self.value_pages, copies)
        if keys.shape[2] == 1 and set(counts) == {1}:
            homes, places = self.pages.newest(self.device, self.lengths)
            self.key_pages[homes, :, places] = keys[:, :, 0]
            self.value_pages[homes, :, places] = values[:, :, 0]
        else:
            for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
                self._write(row, start, keys[row, :, :count], values[row, :, :count])
        self._set_lengths([start + count for start, count in zip(starts, counts, strict=True)])

    def _write(self, row: int, start: int, keys_KSD: Tensor, values_KSD: Tensor) -> None:
        """Put consecutive tokens of a row in their places."""
        assert self.key_pages is not None and self.value_pages is not None
        table, size = self.pages.table(self.device)[row].long(), self.pages.store.block_size
        tokens = torch.arange(start, start + keys_KSD.shape[1], device=self.device)
        homes, places = table[tokens // size], tokens % size
        self.key_pages[homes, :, places] = keys_KSD.transpose(0, 1)
        self.value_pages[homes, :, places] = values_KSD.transpose(0, 1)

    @ordinary_tensors
    def _fit(self) -> None:
        """Have as many pages as the store has blocks."""
        for name in ("key_pages", "value_pages"):
            pages: Tensor = getattr(self, name)
            capacity = self.pages.store.capacity
            if len(pages) < capacity:
                grown = pages.new_zeros(capacity, *pages.shape[1:])
                grown[: len(pages)] = pages
                setattr(self, name, grown)

    def step(self, **facts: Any) -> Step:
        """See `GatedLayer`."""
        return PagedStep(
            self.pages.table(self.device), keys_BKCD=self.key_pages, values_BKCD=self.value_pages, **facts
        )

    # ----------------------------------------------------------------------------------------- rows and lengths

    def crop(self, tokens_to_remove: int) -> None:
        """See `GatedLayer`."""
        super().crop(tokens_to_remove)
        if self.is_initialized:
            lengths = list(self.row_lengths)
            self.pages.once(self, lambda: self._crop_rows(lengths))

    def _crop_rows(self, lengths: list[int]) -> None:
        self.pages.store.crop(lengths)
        if self.pages.sharing is not None:
            self.pages.sharing.note_crop(lengths)

    def reset(self) -> None:
        """See `GatedLayer`."""
        if self.is_initialized:
            self.pages.once(self, self.pages.store.clear)
        super().reset()

    def _select_buffers(self, index: Tensor) -> None:
        rows = index.tolist()
        self.pages.once(self, lambda: self._select_store_rows(rows))

    def _select_store_rows(self, rows: list[int]) -> None:
        forks = self.pages.store.select(rows)
        if self.pages.sharing is not None:
            self.pages.sharing.note_forks(forks)

    def _append_buffers(self, other: GatedLayer) -> None:
        if not isinstance(other, PagedLayer):
            raise SeergateError("only the rows of a paged cache can join a paged cache")
        copies = self.pages.once(self, lambda: self._adopt(other))
        self._fit()
        for name in ("key_pages", "value_pages"):
            _copy(getattr(other, name), getattr(self, name), copies)

    def _adopt(self, other: PagedLayer) -> Copies:
        other.pages.store.seal()
        if self.pages.sharing is not None and other.pages.sharing is not None:
            with self.pages.sharing.adopting(other.pages.sharing):
                return self.pages.store.adopt(other.pages.store)
        return self.pages.store.adopt(other.pages.store)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in use, and of the method's state. Free blocks do not count: any row may take them."""
        if self.key_pages is None or self.value_pages is None:
            return 0
        return self.pages.store.physical * self._page_bytes() + (self.state.nbytes if self.state is not None else 0)

    def row_bytes(self) -> np.ndarray:
        """See `GatedLayer`. A block that a row has several times counts once, one that it shares with others whole."""
        used = np.array([len(row.table) - row.repeats for row in self.pages.store.rows])
        return used * self._page_bytes()

    def _page_bytes(self) -> int:
        assert self.key_pages is not None and self.value_pages is not None
        return sum(x.shape[1:].numel() * x.element_size() for x in (self.key_pages, self.value_pages))


def _copy(source: Tensor, target: Tensor, copies: Copies) -> None:
    if copies:
        old, new = torch.tensor(copies, device=source.device).unbind(1)
        target[new] = source[old]
