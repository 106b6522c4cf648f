"""KV offload (SeerAttention-R, section 3.2): keys and values in slow memory, those being read in fast memory.

The slow memory is a file that is mapped into memory, or the host's memory beside a GPU. Only selected blocks are
fetched; those that the steps before selected are here already (`BlockPool`). Which memory a block is read from changes
no number, so outputs are those of a cache that is not offloaded.

Shape suffixes: B batch, S new tokens, K KV heads, G query heads per KV head, D head dimension, P = B * K pairs, X
selected blocks.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from seergate import ops
from seergate.config import is_int
from seergate.errors import SeergateError
from seergate.host.block_pool import BlockPool
from seergate.host.cache import GatedLayer
from seergate.methods.base import Method, SelectingMethod, Step


@dataclass(frozen=True)
class Offload:
    """Keep keys and values in slow memory.

    A prompt needs one layer's keys and values at a time in fast memory while it is read; the cap is on what stays.

    Attributes:
        memory_bytes: fast memory for blocks of keys and values, all layers and rows together. What the method
            remembers (compressed keys) comes on top; it is under 1 % of the keys and values at block size 64.
        store: ``"disk"``: a file without a name, gone with the process; ``"host"``: the host's memory, pinned where
            the model is on a GPU.
        folder: where the file is made; the system's temporary folder if ``None``. It should be on a disk: some
            systems keep their temporary folder in memory.

    Raises:
        ValueError: naming the field, what it is and what it must be.
    """

    memory_bytes: int
    store: Literal["disk", "host"] = "disk"
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        if not is_int(self.memory_bytes) or self.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {self.memory_bytes!r}; it must be a positive number of bytes")
        if self.store not in ("disk", "host"):
            raise ValueError(f'store is {self.store!r}; it must be "disk" or "host"')
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(f"folder is {str(self.folder)!r}; it must be a folder that exists")

    def check(self, method: Method) -> None:
        """Refuse a method that an offloaded cache is of no use to.

        Raises:
            SeergateError: if it is not one that selects, or corrects earlier tokens with dense passes.
        """
        if not isinstance(method, SelectingMethod):
            raise SeergateError(
                f"{method.name!r} cannot be offloaded: only a method that selects blocks leaves some of them unread"
            )
        if method.rule.lossless or method.rule.rectify_every is not None:
            raise SeergateError(
                "lossless decoding and rectification read the whole cache in dense passes; do without offload"
            )

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in slow memory."""
        if self.store == "host":
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        count = math.prod(shape)
        if not count:
            return torch.zeros(shape, dtype=dtype)
        with tempfile.NamedTemporaryFile(prefix="seergate-", dir=self.folder) as file:
            file.truncate(count * dtype.itemsize)  # a hole: takes no room until it is written
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
            # the name goes now, the file with the last tensor that maps it


class OffloadedLayer(GatedLayer):
    """A `GatedLayer` whose buffers lie in slow memory, and which reads selected blocks through a `BlockPool`.

    Args:
        offload: what the user asked for.
        memory_bytes: this layer's share of the fast memory.
        method, layer, num_heads, rotary, static_length, shared: see `GatedLayer`.

    Raises:
        SeergateError: for a static cache.
    """

    def __init__(self, offload: Offload, memory_bytes: int, *args: Any, **kwargs: Any) -> None:
        self.offload, self.memory_bytes = offload, memory_bytes
        super().__init__(*args, **kwargs)
        if self.static_length is not None:
            raise SeergateError("an offloaded cache grows by itself; use a dynamic cache, not a static one")

    def _clear(self) -> None:
        super()._clear()
        self.pool: BlockPool | None = None
        self._blocks_read_past = 0  # blocks, in steps that selected more than the pool can hold

    # ---------------------------------------------------------------------------------------------------- storing

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See `GatedLayer`."""
        super().lazy_initialization(key_states, value_states)
        self._new_pool()

    def _new_pool(self) -> None:
        """An empty pool for the rows that there are.

        Raises:
            SeergateError: if it cannot hold what one step reads.
        """
        assert self.keys is not None and self.values is not None and isinstance(self.method, SelectingMethod)
        (rows, heads), dims = self.keys.shape[:2], (self.keys.shape[3], self.values.shape[3])
        each = self.block_size * sum(dims) * self.dtype.itemsize
        slots, budget = self.memory_bytes // each, self.method.rule.token_budget
        needed = rows * heads * (budget // self.block_size if budget is not None else 1)
        if slots < needed:
            share = self.offload.memory_bytes / self.memory_bytes
            raise SeergateError(
                f"memory_bytes is {self.offload.memory_bytes}, which is {slots} blocks per layer; a step of {rows} "
                f"rows reads {needed}, so it must be at least {math.ceil(needed * each * share)}"
            )
        self.pool = BlockPool(slots, rows, heads, self.block_size, *dims, self.dtype, self.device)

    def _zeros(self, like: Tensor, *shape: int) -> Tensor:
        return self.offload.buffer(shape, like.dtype, self.device)

    def _room_for(self, tokens: int) -> int:
        return 2 * tokens  # a file that is not written to yet takes no room, and copying one takes time

    def _store(self, keys: Tensor, values: Tensor, starts: list[int], counts: list[int]) -> None:
        super()._store(keys, values, starts, counts)
        assert self.pool is not None
        if keys.shape[2] == 1 and set(counts) == {1}:
            newest = (x[:, :, 0].detach().to(self.dtype).flatten(0, 1) for x in (keys, values))
            self.pool.put(torch.tensor(starts), *newest)
            return
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.pool.forget(row, start, start + count)

    def _select_buffers(self, index: Tensor) -> None:
        assert self.keys is not None and self.values is not None
        rows = index.tolist()
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._zeros(old, len(rows), *old.shape[1:])
            for i, row in enumerate(rows):
                new[i] = old[row]
            setattr(self, name, new)
        self._new_pool()

    def _append_buffers(self, other: GatedLayer) -> None:
        self._reserve(max(other.row_lengths))
        for name in ("keys", "values"):
            ours, theirs = getattr(self, name), getattr(other, name)
            new = self._zeros(ours, len(ours) + len(theirs), *ours.shape[1:])
            shared = min(ours.shape[2], theirs.shape[2])
            new[: len(ours)], new[len(ours) :, :, :shared] = ours, theirs[:, :, :shared]
            setattr(self, name, new)
        self._new_pool()

    # ---------------------------------------------------------------------------------------------------- reading

    def slot_view(self) -> tuple[Tensor, Tensor]:
        """See `GatedLayer`."""
        keys, values = super().slot_view()
        return keys.to(self.device), values.to(self.device)

    def attend_to(self, step: Step, indices: Tensor) -> Tensor:
        """See `GatedLayer`."""
        assert self.pool is not None and self.keys is not None and self.values is not None
        size, (batch, heads) = self.block_size, self.keys.shape[:2]
        blocks = (x.view(batch * heads, -1, size * x.shape[3]) for x in (self.keys, self.values))
        found_PX = self.pool.locate(indices.flatten(0, 1).long().cpu(), *blocks)
        if found_PX is None:  # more than there is room for: straight from slow memory
            self._blocks_read_past += int((indices >= 0).sum())
            return super().attend_to(step, indices)
        # Every pair is a row of a paged cache that holds its selected blocks only, one after the other.
        slots_PX = found_PX.to(self.device)
        starts_BKX = indices.long() * size
        used_BKX = (step.lengths[:, None, None] - starts_BKX).clamp(0, size).masked_fill(indices < 0, 0)
        order_BKX = torch.arange(indices.shape[2], device=self.device).masked_fill(indices < 0, -1)
        q_BKGD = step.q_BHSD[:, :, 0].unflatten(1, (heads, -1))
        # A model with attention sinks has one per query head, so its KV heads cannot be rows of one call.
        parts = [slice(None)] if step.sinks is None else [slice(head, head + 1) for head in range(heads)]
        outputs = [
            ops.sparse_decode(
                q_BKGD[:, part].flatten(0, 1),
                self.pool.keys,
                self.pool.values,
                order_BKX[:, part].flatten(0, 1)[:, None],
                used_BKX[:, part].sum(-1).flatten().clamp(min=1),
                size,
                step.sm_scale,
                sinks=None if step.sinks is None else step.sinks.unflatten(0, (heads, -1))[part].flatten(),
                softcap=step.softcap,
                page_table=slots_PX.unflatten(0, (batch, heads))[:, part].flatten(0, 1),
            ).unflatten(0, (batch, -1))
            for part in parts
        ]
        return torch.cat(outputs, dim=1).flatten(1, 2)

    def take_fetched(self, step: Step, everything: bool) -> int:
        """See `GatedLayer`. Where all tokens are read, they are read past the pool."""
        assert self.pool is not None and self.keys is not None
        blocks, self._blocks_read_past, self.pool.fetched = self._blocks_read_past + self.pool.fetched, 0, 0
        if everything:
            blocks += sum(-(-end // self.block_size) for end in step.ends) * self.keys.shape[1]
        return blocks * self.pool.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of fast memory: the pool and the method's state."""
        held = self.pool.nbytes if self.pool is not None else 0
        return held + (self.state.nbytes if self.state is not None else 0)
