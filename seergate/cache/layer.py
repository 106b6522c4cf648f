"""GatedLayer: a layer of a transformers `Cache` that replaces a `DynamicLayer` or `StaticLayer`.

`Rows` counts the tokens of each row, a `Storage` holds keys and values, and a `LayerState` is the method's state.

Shape suffixes: B batch, S new tokens, K KV heads, D head dimension, T slots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from seergate.cache.forward import PROMPT, ForwardContext
from seergate.cache.rows import Rows
from seergate.cache.storage import DynamicStorage, Storage
from seergate.errors import SeergateError
from seergate.inference_mode import outside_inference_mode
from seergate.methods.base import LayerSpec, LayerState, Method, Rotary
from seergate.methods.evicting import CompressingMethod, CompressingState, Eviction
from seergate.ops.rows import RowLengths


class GatedLayer(CacheLayerMixin):
    """A layer of a transformers `Cache` for one gated attention layer.

    Args:
        shared: whether later layers read what `update` returns (Gemma 4's KV sharing).
        compiles: whether decode steps may be compiled or captured in a CUDA graph: the operations then do not depend
            on the rows' lengths, which only the device knows. Needs a static cache and a method with ``fixed_shapes``.
        anchor: index of the layer whose selections this layer reads, its own if it makes them.
        last_reader: index of the last layer that reads the selections of ``anchor``.

    Attributes:
        counts: counters of compiled steps (`seergate.decode.stats`); ``None`` if an eager step must run before the
            next compiled one.
        failed: whether a rectification has failed, after which the layers may hold different tokens.
        reading: whether more of the prompt is to come, for which a method that evicts waits; also after a failure.
    """

    is_sliding = False

    def __init__(
        self,
        storage: Storage,
        method: Method,
        layer: int,
        num_heads: int,
        rotary: Rotary,
        shared: bool,
        compiles: bool,
        anchor: int,
        last_reader: int,
    ) -> None:
        self.anchor, self.last_reader = anchor, last_reader
        self.storage, self.method, self.layer, self.num_heads, self.rotary = storage, method, layer, num_heads, rotary
        self.static_length, self.shared, self.compiles = storage.static_length, shared, compiles
        self.is_compileable = self.static_length is not None  # makes transformers mask the slots that are not written
        self.block_size = int(getattr(method, "block_size", 1))
        self._clear()

    @outside_inference_mode
    def _clear(self) -> None:
        self.rows = Rows()
        self.counts: object = None
        self.state: LayerState | None = None
        self.is_initialized = self.failed = self.reading = False

    def __deepcopy__(self, memo: dict[int, Any]) -> GatedLayer:
        """Copy the tokens, for another text with the same prefix. The method and the gates are shared, unless the
        model is copied as well.
        """
        for part in (self.method, self.rotary):
            memo.setdefault(id(part), part)
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(vars(self), memo))
        return new

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` may be called, which transformers asks."""
        return not isinstance(self.method, CompressingMethod)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """All keys (`Storage.keys`); ``None`` before the first token."""
        return self.storage.keys if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """All values (`Storage.values`); ``None`` before the first token."""
        return self.storage.values if self.is_initialized else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the storage and the method's state for this batch."""
        batch, heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        spec = LayerSpec(self.layer, batch, self.num_heads, heads, head_dim, self.dtype, self.device, self.rotary)
        self.state = self.method.new_state(spec) if self.anchor == self.layer else LayerState(spec, self.method)
        self.storage.allocate(key_states, value_states, self.block_size, self.state)
        self.rows = Rows(batch, self.device, self.compiles)
        if self.compiles:  # a compiler must see no new tensors later
            for name, size in self.state.tokens_per_entry.items():
                entries = self.storage.keys.shape[2] // size
                self.state.grown(name, entries, limit=entries)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Called by the plain model only: store new tokens, which the method has not seen; as `store`."""
        if self.failed:
            raise SeergateError("a pass failed that was to rectify this cache; start a new one")
        if isinstance(self.state, CompressingState) and self.rows.slots:
            raise SeergateError(
                f"this cache was filled under {self.method.name!r}, which evicted from it; start a new one"
            )
        keys_and_values = self.store(ForwardContext(PROMPT), key_states, value_states)
        self.state = None
        return keys_and_values

    @outside_inference_mode
    def store(self, context: ForwardContext, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens ``[B, K, S, D]``, padding included, keys after RoPE. Return the keys and values that dense
        attention needs: of all slots, or only the new ones if the method evicts (padded to the length of a static
        cache) or a decode step reads the storage.
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        rows, (batch, _, new, _) = self.rows, key.shape
        if batch != len(rows):
            raise SeergateError(
                f"the cache holds {len(rows)} rows and {batch} arrive; use a new cache for a new batch"
            )
        if not context.on_host:
            self.storage.write(context, rows, key, value, [1] * batch, None)
            rows.add_compiled(context.positions(batch))
            context.rows, context.k, context.starts, context.counts = RowLengths(rows.lengths), key, [], []
            return key, value
        if self.static_length is not None and rows.slots + new > self.static_length:
            raise SeergateError(
                f"the static cache has room for {self.static_length} tokens; {rows.slots} are there and {new} more "
                "arrive"
            )
        fresh, passes = rows.slots == 0, context.passes
        context.counts = [new] * batch if context.valid is None else context.valid.sum(1).tolist()
        context.k, context.starts = context.compact(key), list(rows.resident)
        stored = context.k_pre if self.method.stores_pre_rope and context.k_pre is not None else context.k
        most = None if passes is None else self._max_resident()
        self.storage.write(context, rows, stored, context.compact(value), context.counts, most)
        rows.place(context.positions(batch), context.counts)
        like = None if passes is None or passes.rows is None else passes.rows()
        context.rows = rows.add(context.counts, new, context.valid, like)
        if passes is not None:
            passes.rows = ref(context.rows)
        only_new = isinstance(self.state, CompressingState) and bool(fresh or context.mode.decoded)
        if only_new and self.static_length is not None:
            beyond = (0, 0, 0, self.static_length - new)  # the mask was made for all slots
            return pad(key, beyond), pad(value, beyond)
        if only_new or (fresh and self.static_length is None):
            return key, value
        if new == 1 and context.mode != PROMPT and not self.shared:
            return key, value  # the attention function reads the storage itself
        return self.slot_view()

    def _max_resident(self) -> int | None:
        return self.state.max_resident() if isinstance(self.state, CompressingState) else None

    def evict(self, eviction: Eviction) -> None:
        """Drop evicted tokens, and release memory beyond the method's maximum (after a long prompt)."""
        assert isinstance(self.storage, DynamicStorage) and isinstance(self.state, CompressingState)
        lengths = list(self.rows.resident)
        for row, length in zip(eviction.rows, eviction.lengths, strict=True):
            lengths[row] = length
        room = self.storage.evict(eviction, max(*lengths, self.state.max_resident()))
        self.rows.set_resident(lengths)
        self.state.on_evict(eviction, room)

    def slot_view(self) -> tuple[Tensor, Tensor]:
        """Keys and values per slot ``[B, K, T, D]``, a view if no slot is padding; T is the static length, if any."""
        stored, index = (self.storage.keys, self.storage.values), self.rows.slot_index()
        width = self.rows.slots if self.static_length is None else self.static_length
        if index is None:
            parts = [buffer[:, :, :width] for buffer in stored]
        else:
            index = pad(index, (0, width - self.rows.slots))[:, None, :, None].to(stored[0].device)
            shape = (-1, stored[0].shape[1], -1)
            parts = [buffer.gather(2, index.expand(*shape, buffer.shape[3])) for buffer in stored]
        return parts[0].to(self.device), parts[1].to(self.device)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask, in slots."""
        if self.static_length is not None:
            return self.static_length, 0
        return self.rows.slots + int(query_length), 0

    def get_seq_length(self) -> Any:
        """Number of slots so far: a tensor if steps may be compiled, as in transformers' own static layer."""
        return self.rows.slots if self.rows.width is None else self.rows.width

    def get_max_length(self) -> int:
        """Capacity in slots; -1 for a cache that grows."""
        return -1 if self.static_length is None else self.static_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest slots: ``tokens_to_remove`` is minus their number, or if positive the number of slots to
        keep, as in older transformers. Raises `SeergateError` if the method evicts or there are fewer slots.
        """
        slots, given = self.rows.slots, int(tokens_to_remove)  # transformers 5.17 gives a tensor
        kept = given if given > 0 else slots + given
        if kept >= slots or not self.is_initialized:
            return
        if isinstance(self.method, CompressingMethod):
            raise SeergateError(
                f"a cache of the evicting method {self.method.name!r} cannot be cropped, as assisted "
                "decoding crops that of its assistant"
            )
        if kept < 0:
            raise SeergateError(f"{-tokens_to_remove} tokens are to be cropped and the cache has {slots}")
        self._forget(self.rows.crop(kept))

    def hide(self, real: Tensor) -> None:
        """Remove the newest tokens of some rows and make their slots padding; ``real [B, slots]`` marks the rest."""
        self.rows.valid = real
        self._forget(self.rows.shorten(real.sum(1).tolist()))

    def _forget(self, before: list[int]) -> None:
        """Crop storage and state from the lengths ``before`` to the rows' current lengths."""
        if self.state is not None:
            self.state.crop(before, self.rows.resident, self.storage.some_keys, self.rows.regular_offset)
        self.storage.crop(self.rows.resident)

    def reset(self) -> None:
        """Forget everything."""
        self.storage.clear()
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``, in that order."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._select_rows(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows (indices or a bool mask)."""
        indices = torch.as_tensor(indices).cpu()
        self._select_rows(torch.arange(len(self.rows))[indices])

    @outside_inference_mode
    def _select_rows(self, index: Tensor) -> None:
        if not self.is_initialized:
            return
        if len(index) != len(self.rows):
            self.counts = None  # allocated for another number of rows
        index = index.to(self.device)
        self.storage.select(index)
        self.rows.select(index)
        if self.state is not None:
            self.state.select_rows(index)

    @outside_inference_mode
    def append_rows(self, other: GatedLayer) -> None:
        """Append the rows of another cache of the same method; neither may be static. All rows then count as
        left-padded to the longest. ``other`` must not be used afterwards.
        """
        assert self.static_length is None and other.static_length is None
        self.storage.append(other.storage, max(other.rows.resident), self._max_resident())
        self.rows.append(other.rows)
        if self.state is None or other.state is None:
            self.state = None  # one of them ran without its method
        else:
            self.state.append_rows(other.state)

    @property
    def nbytes(self) -> int:
        """Bytes that the keys, values and the method's state occupy."""
        return self.storage.nbytes + (self.state.nbytes if self.state is not None else 0)

    def row_bytes(self, tokens: Sequence[int] | None = None) -> np.ndarray:
        """Bytes of each row's tokens and method state, without batch padding or spare capacity; or of its first
        ``tokens``, if more have been stored already.
        """
        resident, seen = np.array(self.rows.resident), np.array(self.rows.total)
        held = resident if tokens is None else np.array(tokens)
        state = 0 if self.state is None else self.state.bytes_held(held, seen - (resident - held))
        return self.storage.row_bytes(held.tolist()) + state
