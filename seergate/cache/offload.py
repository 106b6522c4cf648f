"""KV offload (SeerAttention-R, section 3.2): keys and values in slow memory, those being read in fast memory.

The slow memory is a file that is mapped into memory, or the host's memory beside a GPU. Only selected blocks are
fetched; those that the steps before selected are here already (`BlockPool`). Which memory a block is read from changes
no number, nor does when it is fetched, on demand or ahead. So outputs are those of a cache that is not offloaded.

Shape suffixes: B batch, S new tokens, K KV heads, G query heads per KV head, D head dimension, P = B * K pairs, N
blocks, X selected blocks, Y likely blocks.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from seergate import ops
from seergate.cache.background import Background
from seergate.cache.block_pool import BlockPool
from seergate.cache.layer import GatedLayer
from seergate.cache.ordinary import ordinary_tensors
from seergate.config import is_int
from seergate.decode.stats import Fetched
from seergate.errors import SeergateError
from seergate.methods.base import Method, Step
from seergate.methods.selecting import SelectingMethod


@dataclass(frozen=True)
class Offload:
    """Keep keys and values in slow memory.

    A prompt needs one layer's keys and values at a time in fast memory while it is read; the cap is on what stays.

    Attributes:
        memory_bytes: fast memory for blocks of keys and values, all layers and rows together. What the method
            remembers (compressed keys) comes on top: at block size 64 in bf16 2.3 % of the keys and values at 4k
            tokens, 1.2 % at 16k, under 1 % from about 30k.
        store: ``"disk"``: a file without a name, gone with the process; ``"host"``: the host's memory, pinned where
            the model is on a GPU.
        folder: where the file is made; the system's temporary folder if ``None``. It should be on a disk: some
            systems keep their temporary folder in memory.
        ahead: per row and KV head, up to so many further blocks are fetched for the next step while this one goes on:
            those that score best after the selected ones, into what `memory_bytes` holds beyond one step's blocks. It
            moves more bytes; docs/decode-engine.md says what it was measured to spare.

    Raises:
        ValueError: naming the field, what it is and what it must be.
    """

    memory_bytes: int
    store: Literal["disk", "host"] = "disk"
    folder: str | Path | None = None
    ahead: int = 0

    def __post_init__(self) -> None:
        if not is_int(self.memory_bytes) or self.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {self.memory_bytes!r}; it must be a positive number of bytes")
        if self.store not in ("disk", "host"):
            raise ValueError(f'store is {self.store!r}; it must be "disk" or "host"')
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(f"folder is {str(self.folder)!r}; it must be a folder that exists")
        if not is_int(self.ahead) or self.ahead < 0:
            raise ValueError(f"ahead is {self.ahead!r}; it must be 0 or a positive number of blocks")

    @cached_property
    def background(self) -> Background:
        """Where blocks are fetched ahead. Its thread starts with the first of them."""
        return Background()

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
            _take_room(file.fileno(), count * dtype.itemsize, self.folder or tempfile.gettempdir())
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
            # the name goes now, the file with the last tensor that maps it


def _take_room(file: int, count: int, folder: object) -> None:
    """Give an empty file its size and, where the system can, its place on the disk: a mapped page for which there is
    none later would end the process.
    """
    if not hasattr(os, "posix_fallocate"):
        os.truncate(file, count)
        return
    try:
        os.posix_fallocate(file, 0, count)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
            os.truncate(file, count)
            return
        raise SeergateError(
            f"{folder} has no room for {count} bytes of keys and values ({error.strerror}); name another folder"
        ) from error


class OffloadedLayer(GatedLayer):
    """A `GatedLayer` whose buffers lie in slow memory, and which reads selected blocks through a `BlockPool`.

    Args:
        offload: what the user asked for.
        sharers: layers that share the fast memory, those that the method leaves dense not counted.
        method, layer, num_heads, rotary, static_length, shared: see `GatedLayer`.

    Raises:
        SeergateError: for a static cache.
    """

    def __init__(self, offload: Offload, sharers: int, *args: Any, **kwargs: Any) -> None:
        self.offload, self.sharers = offload, sharers
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

    def _slots_for(self, rows: int) -> int:
        """Blocks that this layer's share of the memory holds.

        Raises:
            SeergateError: if these are fewer than one step of so many rows reads. Dense layers, which come first in
                most models and read past the pool, say so too, so that no layer is changed by what another refuses.
        """
        assert self.keys is not None and self.values is not None and isinstance(self.method, SelectingMethod)
        heads, dims = self.keys.shape[1], (self.keys.shape[3], self.values.shape[3])
        each, rule = self.block_size * sum(dims) * self.dtype.itemsize, self.method.rule
        if not self.sharers:
            return 0
        slots = self.offload.memory_bytes // (each * self.sharers)
        needed = rows * heads * (rule.token_budget // self.block_size if rule.token_budget is not None else 1)
        if slots < needed:
            raise SeergateError(
                f"memory_bytes is {self.offload.memory_bytes}, which is {slots} blocks in each of {self.sharers} "
                f"layers; a step of {rows} rows reads {needed}, so it must be at least {needed * each * self.sharers}"
            )
        return slots if self.method.selects_in(self.layer) else 0

    @ordinary_tensors
    def _new_pool(self) -> None:
        """An empty pool for the rows that there are."""
        assert self.keys is not None and self.values is not None
        (rows, heads), dims = self.keys.shape[:2], (self.keys.shape[3], self.values.shape[3])
        self.pool = BlockPool(self._slots_for(rows), rows, heads, self.block_size, *dims, self.dtype, self.device)

    def _zeros(self, like: Tensor, *shape: int) -> Tensor:
        return self.offload.buffer(shape, like.dtype, self.device)

    def _room_for(self, tokens: int) -> int:
        return 2 * tokens  # a file that is not written to yet takes no room, and copying one takes time

    def _store(self, keys: Tensor, values: Tensor, starts: list[int], counts: list[int]) -> None:
        assert self.pool is not None
        self.pool.settle()  # nothing may be written where something is being read
        super()._store(keys, values, starts, counts)
        if keys.shape[2] == 1 and set(counts) == {1}:
            newest = (x[:, :, 0].detach().to(self.dtype).flatten(0, 1) for x in (keys, values))
            self.pool.put(torch.tensor(starts), *newest)
            return
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.pool.forget(row, start, start + count)

    def _select_buffers(self, index: Tensor) -> None:
        assert self.keys is not None and self.values is not None and self.pool is not None
        rows = index.tolist()
        self._slots_for(len(rows))  # before anything is changed
        self.pool.settle()
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._zeros(old, len(rows), *old.shape[1:])
            for i, row in enumerate(rows):
                new[i] = old[row]
            setattr(self, name, new)
        self._new_pool()

    def _append_buffers(self, other: GatedLayer) -> None:
        assert self.pool is not None
        self._slots_for(len(self.row_lengths) + len(other.row_lengths))  # before anything is changed
        self.pool.settle()
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
        keys, values = (x.view(batch * heads, -1, size * x.shape[3]) for x in (self.keys, self.values))
        found_PX = self.pool.locate(indices.flatten(0, 1).long().cpu(), keys, values)
        if found_PX is None:  # more than there is room for: straight from slow memory
            self._blocks_read_past += int((indices >= 0).sum())
            return super().attend_to(step, indices)
        if self.offload.ahead and step.scores_BKN is not None:
            likely_BKY = next_best(step.scores_BKN, indices, step.lengths, size, self.offload.ahead)
            self.pool.fetch_ahead(likely_BKY.flatten(0, 1).cpu(), keys, values, self.offload.background)
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

    def take_fetched(self, step: Step, everything: bool) -> Fetched:
        """See `GatedLayer`. Where all tokens are read, they are read past the pool."""
        assert self.pool is not None and self.keys is not None
        pool = self.pool
        blocks, self._blocks_read_past = self._blocks_read_past + pool.fetched, 0
        if everything:
            blocks += sum(-(-end // self.block_size) for end in step.ends) * self.keys.shape[1]
        ahead, used = pool.ahead, pool.used
        pool.fetched = pool.ahead = pool.used = 0
        return Fetched(*(count * pool.block_bytes for count in (blocks, ahead, used)))

    @property
    def nbytes(self) -> int:
        """Bytes of fast memory: the pool and the method's state."""
        held = self.pool.nbytes if self.pool is not None else 0
        return held + (self.state.nbytes if self.state is not None else 0)

    def row_bytes(self) -> np.ndarray:
        """See `GatedLayer`. The pool has a size of its own, which is divided equally."""
        held = self.pool.nbytes if self.pool is not None else 0
        return np.full(len(self.row_lengths), held / len(self.row_lengths)) + self._own_state()


def next_best(scores_BKN: Tensor, indices_BKX: Tensor, lengths_B: Tensor, block_size: int, count: int) -> Tensor:
    """The past blocks that score best after those selected, best first: int64 ``[B, K, Y]``, -1 where there are no
    more. The current block, which is still being written, and later ones are never among them.

    Args:
        scores_BKN: higher is better; NaN counts as lowest, as in `seergate.ops.select_blocks`.
        indices_BKX: the selected blocks, -1 where there is none.
        lengths_B: tokens of each row, the current one included.
        block_size: tokens per block.
        count: how many at most.
    """
    blocks = scores_BKN.shape[-1]
    largest = torch.finfo(torch.float32).max
    scores_BKN = scores_BKN.float().nan_to_num(-largest, largest, -largest)
    current_B = torch.div(lengths_B - 1, block_size, rounding_mode="floor")
    blocks_N = torch.arange(blocks, device=scores_BKN.device)
    out_BKN = (blocks_N >= current_B[:, None, None]).expand_as(scores_BKN).clone()
    # What is -1 stands for the current block, which is out anyway.
    out_BKN.scatter_(-1, torch.where(indices_BKX < 0, current_B[:, None, None], indices_BKX).long(), True)
    best = scores_BKN.masked_fill(out_BKN, -torch.inf).topk(min(count, blocks), dim=-1)
    return best.indices.masked_fill(best.values == -torch.inf, -1)
