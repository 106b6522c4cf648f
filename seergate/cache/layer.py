"""GatedLayer: one layer of a transformers `Cache`, preallocated and content-anchored.

It takes the place of a `DynamicLayer` or `StaticLayer` inside the user's cache. Rows are stored left-compacted: index
0 is a row's first real token, so that blocks, and with them every selection, do not depend on padding or on the rest
of the batch. Towards transformers it speaks in *slots*, the columns of the padded batch.

Shape suffixes: B batch, S new tokens, C capacity, K KV heads, D head dimension, T slots.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from seergate import ops
from seergate.cache.call import PROMPT, Call
from seergate.cache.ordinary import ordinary_tensors
from seergate.decode.stats import token_bytes
from seergate.errors import SeergateError
from seergate.methods.base import LayerSpec, LayerState, Method, Rotary, Step
from seergate.methods.evicting import CompressingMethod, CompressingState, Eviction, compact, trimmed

if TYPE_CHECKING:
    from seergate.decode.stats import DecodeStats

GROWTH_TOKENS, GROWTH_SHARE = 256, 1 / 8
"""The buffers grow by whichever is larger, this many tokens or this share of what they hold."""


class GatedLayer(CacheLayerMixin):
    """See the module's docstring.

    Args:
        method: decides what is stored and remembered.
        layer: index of the layer.
        num_heads: query heads.
        rotary: the model's RoPE.
        static_length: number of slots of a static cache; ``None`` grows as needed.
        shared: whether later layers read what `update` returns (Gemma 4's KV sharing).
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True
    shortens_rows = True  # whether a single row can be shortened

    def __init__(
        self,
        method: Method,
        layer: int,
        num_heads: int,
        rotary: Rotary,
        static_length: int | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.method, self.layer, self.num_heads, self.rotary = method, layer, num_heads, rotary
        self.static_length, self.shared = static_length, shared
        self.block_size = int(getattr(method, "block_size", 1))
        self._clear()

    def _clear(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.lengths = torch.empty(0, dtype=torch.int64)
        self.row_lengths: list[int] = []  # the same as `lengths`, known without a device read
        self.row_seen: list[int] = []  # real tokens seen, evicted ones included
        self.row_offsets: list[int] = []  # the position that the model gave to each row's first token
        self.slots = 0  # tokens seen per row, padding included: the length that transformers counts in
        self.valid: Tensor | None = None  # bool [B, <= slots]; slots beyond it are all real; None: none was padding
        self.state: LayerState | None = None
        self.call: Call | None = None  # put here by the attention module's pre-hook, taken by `update`
        self.is_initialized = False

    def __deepcopy__(self, memo: dict[int, Any]) -> GatedLayer:
        """Copies the tokens, for another text that begins with them. The method and the gates are shared, unless the
        model is copied as well.
        """
        for part in (self.method, self.rotary):
            memo.setdefault(id(part), part)
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(vars(self), memo))
        return new

    # ------------------------------------------------------------------------------------------------ storing

    @ordinary_tensors
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers and the method's state for this batch."""
        batch, heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._zeros(key_states, batch, heads, 0, head_dim)
        self.values = self._zeros(key_states, batch, heads, 0, value_states.shape[3])
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.row_lengths, self.row_seen = [0] * batch, [0] * batch
        self.state = self.method.new_state(
            LayerSpec(self.layer, batch, self.num_heads, heads, head_dim, self.dtype, self.device, self.rotary)
        )
        self.is_initialized = True
        if self.static_length is not None:
            self._reserve(self.static_length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens.

        Args:
            key_states, value_states: ``[B, K, S, D]`` in slots, keys after RoPE.

        Returns:
            Keys and values of all slots, for dense attention. An evicting method's past is not in them.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, new, _ = key_states.shape
        if batch != len(self.row_lengths):
            raise SeergateError(
                f"the cache holds {len(self.row_lengths)} rows and {batch} arrive; use a new cache for a new batch"
            )
        if self.static_length is not None and self.slots + new > self.static_length:
            self.raise_full(new)
        call, self.call = self.call, None
        if call is None:  # the model runs without its gates: keep the tokens, but the method has not seen them
            if isinstance(self.method, CompressingMethod) and self.slots:
                raise SeergateError(
                    f"this cache was filled under {self.method.name!r}, which evicted from it; start a new one"
                )
            self.state, call = None, Call(PROMPT, None)
        fresh = self.slots == 0
        if fresh:
            self.row_offsets = call.first_positions(batch)
        starts = list(self.row_lengths)
        counts = [new] * batch if call.valid is None else call.valid.sum(1).tolist()
        keys = call.compact(key_states)
        if call.taps is not None:
            call.take(keys, starts, counts)
            if self.method.stores_pre_rope:
                keys = call.k_pre
        self._store(call, keys, call.compact(value_states), starts, counts)
        self._remember_padding(call.valid, new)
        self.slots += new
        self.row_seen = [seen + count for seen, count in zip(self.row_seen, counts, strict=True)]
        if isinstance(self.method, CompressingMethod) and self.static_length is not None:
            beyond = (0, 0, 0, self.static_length - new)  # the mask was made for all slots
            return pad(key_states, beyond), pad(value_states, beyond)
        if isinstance(self.method, CompressingMethod) or (fresh and self.static_length is None):
            return key_states, value_states
        if new == 1 and call.taps is not None and not self.shared:
            return key_states, value_states  # the attention function reads the buffers themselves
        return self.slot_view()

    def raise_full(self, new: int) -> None:
        """There is no room for so many new tokens."""
        raise SeergateError(
            f"the static cache has room for {self.static_length} tokens; {self.slots} are there and {new} more arrive"
        )

    def takes(self, new: int) -> bool:
        """Whether so many new tokens will be a step of fixed shapes (`FixedLayer`)."""
        return False

    def settle(self, stats: DecodeStats) -> None:
        """After a step that is not of fixed shapes: get ready for those that are, in a layer that has them."""

    def take_fetched(self, step: Step, everything: bool) -> int | None:
        """Bytes that a decode step, of all tokens or of some, brought from slow memory; ``None`` without one."""
        return None

    def _remember_padding(self, valid: Tensor | None, new: int) -> None:
        if valid is None and (self.valid is None or new == 1):
            return  # slots beyond `self.valid` count as real
        known = self.real_slots()
        self.valid = pad(known, (0, new), value=True) if valid is None else torch.cat((known, valid), dim=1)

    def real_slots(self) -> Tensor:
        """Which slots hold real tokens: bool ``[B, slots]``."""
        none = torch.ones(len(self.row_lengths), 0, dtype=torch.bool, device=self.device)
        known = none if self.valid is None else self.valid
        return pad(known, (0, self.slots - known.shape[1]), value=True)

    def _store(self, call: Call, keys: Tensor, values: Tensor, starts: list[int], counts: list[int]) -> None:
        new, ends = keys.shape[2], [start + count for start, count in zip(starts, counts, strict=True)]
        self._reserve(max(ends))
        assert self.keys is not None and self.values is not None
        home = self.keys.device
        keys, values = (x.detach().to(home, self.dtype) for x in (keys, values))  # autocast mixes dtypes
        if len(set(starts)) == 1 and set(counts) == {new}:
            self.keys[:, :, starts[0] : ends[0]] = keys
            self.values[:, :, starts[0] : ends[0]] = values
        elif new == 1 and set(counts) == {1}:
            rows, places = torch.arange(len(ends), device=home), self.lengths.to(home)
            self.keys[rows, :, places] = keys[:, :, 0]
            self.values[rows, :, places] = values[:, :, 0]
        else:
            for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
                self.keys[row, :, start : start + count] = keys[row, :, :count]
                self.values[row, :, start : start + count] = values[row, :, :count]
        self._set_lengths(ends)

    def _set_lengths(self, lengths: list[int]) -> None:
        if lengths == [length + 1 for length in self.row_lengths]:
            self.lengths = self.lengths + 1  # no transfer to the device at a decode step
        else:
            self.lengths = torch.tensor(lengths, dtype=torch.int64, device=self.device)
        self.row_lengths = lengths

    def _zeros(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_zeros(shape)

    def _room_for(self, tokens: int) -> int:
        return tokens + max(GROWTH_TOKENS, int(tokens * GROWTH_SHARE))

    def _in_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size) * self.block_size

    @ordinary_tensors
    def _reserve(self, tokens: int) -> None:
        """Make room, in whole blocks, so that a block is one contiguous piece of the buffer."""
        assert self.keys is not None and self.values is not None
        capacity = self.keys.shape[2]
        if tokens <= capacity:
            return
        if self.static_length is None:
            roomy = self._room_for(tokens)
            limit = self.state.most_resident() if isinstance(self.state, CompressingState) else roomy
            tokens = min(roomy, limit) if tokens <= limit else roomy  # longer only before a prompt is compressed
        tokens = self._in_blocks(tokens)
        # Both are allocated before either is replaced: running out of memory must leave the cache as it was.
        grown = [self._zeros(old, *old.shape[:2], tokens, old.shape[3]) for old in (self.keys, self.values)]
        for new, old in zip(grown, (self.keys, self.values), strict=True):
            new[:, :, :capacity] = old
        self.keys, self.values = grown

    @ordinary_tensors
    def evict(self, eviction: Eviction) -> None:
        """Let go of residents, and of the room for more than the method may hold (after a long prompt)."""
        assert self.keys is not None and self.values is not None and isinstance(self.state, CompressingState)
        lengths = list(self.row_lengths)
        for row, length in zip(eviction.rows, eviction.lengths, strict=True):
            lengths[row] = length
        for buffer in (self.keys, self.values):
            compact(buffer, eviction)
        if self.static_length is None:
            room = self._in_blocks(max(*lengths, self.state.most_resident()))
            self.keys, self.values = trimmed(self.keys, room), trimmed(self.values, room)
        self._set_lengths(lengths)
        self.state.moved(eviction, self.keys.shape[2])

    # ------------------------------------------------------------------------------------- what transformers asks

    def slot_view(self) -> tuple[Tensor, Tensor]:
        """Keys and values in slots ``[B, K, T, D]``, a view if nothing is padded; T is the static length if set."""
        assert self.keys is not None and self.values is not None
        if self.valid is None:
            width = self.slots if self.static_length is None else self.static_length
            return self.keys[:, :, :width], self.values[:, :, :width]
        index = (self.valid.cumsum(1) - 1).clamp(min=0)
        extra = torch.arange(1, self.slots - index.shape[1] + 1, device=index.device)
        index = torch.cat((index, self.valid.sum(1, keepdim=True) - 1 + extra), dim=1)
        if self.static_length is not None:
            index = pad(index, (0, self.static_length - self.slots))
        index = index[:, None, :, None].expand(-1, self.keys.shape[1], -1, -1)
        return tuple(  # type: ignore[return-value]
            buffer.gather(2, index.expand(-1, -1, -1, buffer.shape[3])) for buffer in (self.keys, self.values)
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask, in slots."""
        if self.static_length is not None:
            return self.static_length, 0
        return self.slots + int(query_length), 0

    def get_seq_length(self) -> int:
        """Slots seen so far."""
        return self.slots

    def get_max_length(self) -> int:
        """Slots there is room for; -1 if it grows."""
        return -1 if self.static_length is None else self.static_length

    get_max_cache_shape = get_max_length  # its name in older transformers

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest slots.

        Args:
            tokens_to_remove: minus their number. A positive number is the length to keep, as in older transformers.

        Raises:
            SeergateError: if the method evicts.
        """
        kept = tokens_to_remove if tokens_to_remove > 0 else self.slots + tokens_to_remove
        if kept >= self.slots or not self.is_initialized:
            return
        if isinstance(self.method, CompressingMethod):
            raise SeergateError(f"a cache of the evicting method {self.method.name!r} cannot be cropped")
        if kept < 0:
            raise SeergateError(f"{-tokens_to_remove} tokens are to be cropped and the cache has {self.slots}")
        if self.valid is None:
            after = [kept] * len(self.row_lengths)
        else:
            prefix = self.valid[:, :kept]
            after = [count + kept - prefix.shape[1] for count in prefix.sum(1).tolist()]
            self.valid = prefix
        self.slots = kept
        self.shorten(after)

    def shorten(self, lengths: list[int]) -> None:
        """Forget the newest tokens of each row; what slots they had is for the caller to say."""
        before, self.row_seen = list(self.row_lengths), list(lengths)
        self._set_lengths(lengths)
        if self.state is not None:
            self.state.crop(before, lengths, self.some_keys, self.row_offsets)

    def some_keys(self, row: int, first: int, end: int) -> Tensor:
        """The keys ``[1, K, end - first, D]`` of some tokens of a row."""
        assert self.keys is not None
        return self.keys[row : row + 1, :, first:end]

    def reset(self) -> None:
        """Forget everything."""
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``, in that order."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._select_rows(torch.arange(len(self.row_lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows (indices or a bool mask)."""
        indices = torch.as_tensor(indices).cpu()
        self._select_rows(torch.arange(len(self.row_lengths))[indices])

    @ordinary_tensors
    def _select_rows(self, index: Tensor) -> None:
        if not self.is_initialized:
            return
        index = index.to(self.device)
        rows = index.tolist()
        held, seen, offsets = ([x[row] for row in rows] for x in (self.row_lengths, self.row_seen, self.row_offsets))
        self._select_buffers(index)
        self.lengths = self.lengths.index_select(0, index)
        self.row_lengths, self.row_seen, self.row_offsets = held, seen, offsets
        if self.valid is not None:
            self.valid = self.valid.index_select(0, index)
        if self.state is not None:
            self.state.select_rows(index)

    def _select_buffers(self, index: Tensor) -> None:
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)

    @ordinary_tensors
    def append_rows(self, other: GatedLayer) -> None:
        """Put the rows of another cache, of the same method and not static, after this one's; all count as left-padded
        to the longest of them. The other must not be used afterwards.
        """
        assert self.static_length is None and other.static_length is None
        self._append_buffers(other)
        self.lengths = torch.cat((self.lengths, other.lengths))
        self.row_lengths, self.row_seen = self.row_lengths + other.row_lengths, self.row_seen + other.row_seen
        self.row_offsets = self.row_offsets + other.row_offsets
        if self.state is None or other.state is None:
            self.state = None  # one of them ran without its method
        else:
            self.state.append_rows(other.state)
        self.slots = max(self.row_seen)
        begins = torch.tensor([self.slots - seen for seen in self.row_seen], device=self.device)
        self.valid = torch.arange(self.slots, device=self.device) >= begins[:, None] if begins.any() else None

    def _append_buffers(self, other: GatedLayer) -> None:
        self._reserve(max(other.row_lengths))
        assert self.keys is not None and self.values is not None
        assert other.keys is not None and other.values is not None
        short = self.keys.shape[2] - other.keys.shape[2]
        other.keys, other.values = (pad(x, (0, 0, 0, short)) for x in (other.keys, other.values))  # cut, if negative
        self.keys, self.values = torch.cat((self.keys, other.keys)), torch.cat((self.values, other.values))

    def step(self, **facts: Any) -> Step:
        """What a method gets to see: the buffers and these facts."""
        assert self.keys is not None and self.values is not None
        return Step(keys_BKCD=self.keys, values_BKCD=self.values, **facts)

    def attend_to(self, step: Step, indices: Tensor) -> Tensor:
        """Attention of a decode step to the blocks that each KV head selected: ``[B, H, D]``.

        Args:
            step: the step.
            indices: see `seergate.ops.sparse_decode`.
        """
        keys, values, page_table = step.stored
        home = keys.device  # not the model's where the cache is offloaded
        return ops.sparse_decode(
            step.q_BHSD[:, :, 0].to(home),
            keys,
            values,
            indices.to(home),
            step.lengths.to(home),
            self.block_size,
            step.sm_scale,
            sinks=None if step.sinks is None else step.sinks.to(home),
            softcap=step.softcap,
            page_table=page_table,
        ).to(step.q_BHSD.device)

    @property
    def nbytes(self) -> int:
        """Bytes that the keys, values and the method's state occupy."""
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes + (self.state.nbytes if self.state is not None else 0)

    def row_bytes(self) -> np.ndarray:
        """Per row, the bytes of its tokens, without room to grow."""
        assert self.keys is not None and self.values is not None
        each = self.keys.shape[1] * token_bytes(self.keys, self.values)
        return np.array(self.row_lengths) * each
