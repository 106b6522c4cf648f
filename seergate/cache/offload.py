"""KV offload (SeerAttention-R, section 3.2): the KV cache is in slow memory, selected blocks are in fast memory.

Slow memory is a memory-mapped file, or the host's memory if the model is on a GPU. A selected block is fetched unless
it is still in fast memory from an earlier step (`BlockPool`). Outputs equal those of a cache that is not offloaded.

Shape suffixes: B batch, S new tokens, K KV heads, G query heads per KV head, D head dimension, P = B * K pairs, N
blocks, X selected blocks, F blocks to fetch, C tokens of a block.
"""

from __future__ import annotations

import copy
import errno
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from seergate import ops
from seergate.cache.forward import ForwardContext
from seergate.cache.rows import Rows
from seergate.cache.storage import DynamicStorage, KVBackend, Storage, token_bytes
from seergate.checks import check, is_int
from seergate.errors import SeergateError
from seergate.methods.base import AttentionOutput, LayerState, Method, Step
from seergate.methods.selecting import PerHeadSelection, SelectingMethod
from seergate.ops import Selection
from seergate.ops.selection import UNBOUNDED


@dataclass(frozen=True)
class Offload(KVBackend):
    """Keep keys and values in slow memory.

    During prefill, in dense layers and in steps that read more than fits, the keys and values of one layer at a time
    are in fast memory, in addition to ``memory_bytes``.

    Attributes:
        memory_bytes: fast memory for blocks of keys and values, all layers and rows together. The method's state
            (compressed keys) comes on top: at block size 64 in bf16 2.3 % of the keys and values at 4k tokens, 1.2 %
            at 16k, under 1 % from about 30k.
        store: ``"disk"``: an unnamed file that vanishes with the process; ``"host"``: host memory.
        folder: directory of the file; the system's temporary folder if ``None``. It should be on a disk: some systems
            keep their temporary folder in memory.

    Raises:
        ValueError: for an option out of range.
    """

    tag: ClassVar[str] = "offloaded"
    memory_bytes: int
    store: Literal["disk", "host"] = "disk"
    folder: str | Path | None = None
    method: SelectingMethod = field(init=False, repr=False, compare=False)  # set by `bind`
    sharers: int = field(init=False, repr=False, compare=False)  # layers that select; set by `bind`

    def __post_init__(self) -> None:
        size, folder = self.memory_bytes, self.folder
        check("memory_bytes", size, is_int(size) and size >= 1, "a positive number of bytes")
        check("store", self.store, self.store in ("disk", "host"), '"disk" or "host"')
        check("folder", str(folder), folder is None or Path(folder).is_dir(), "a folder that exists")

    def bind(self, model: PreTrainedModel, method: Method, layers: Sequence[int]) -> KVBackend:
        assert isinstance(method, SelectingMethod)  # ensured by `seergate.decode.compatibility`
        bound = copy.copy(self)
        vars(bound).update(method=method, sharers=sum(method.selects_in(layer) for layer in layers))
        return bound

    def new(self, layer: int, layers: Sequence[Any], static_length: int | None) -> Storage:
        return Offloaded(self, layer)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate zeros in slow memory. Raises `SeergateError` if the disk is full."""
        count = math.prod(shape)
        if self.store == "host" or not count:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        with tempfile.NamedTemporaryFile(prefix="seergate-", dir=self.folder) as file:
            _take_room(file.fileno(), count * dtype.itemsize, self.folder or tempfile.gettempdir())
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
            # leaving the block deletes the name; the file goes with the last tensor that maps it


def _take_room(file: int, count: int, folder: object) -> None:
    """Set the size of an empty file and reserve its disk space where the system can: writing to a mapped page without
    disk space would kill the process.
    """
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, count)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # else the file system cannot reserve space
            raise SeergateError(
                f"{folder} has no room for {count} bytes of keys and values ({error.strerror}); name another folder"
            ) from error
    os.truncate(file, count)


class BlockPool:
    """The blocks of an offloaded layer that are in fast memory: a fixed number of slots, one block each (LRU).

    A block belongs to a pair of row and KV head, since each KV head selects its own blocks. The bookkeeping is in host
    memory, because blocks are fetched from there.

    Args:
        keys, values: all blocks, ``[B, K, S, D]`` in slow memory.

    Attributes:
        keys, values: ``[slots, 1, C, D]``, as pages for `seergate.ops.sparse_decode`.
    """

    def __init__(self, slots: int, keys: Tensor, values: Tensor, block_size: int, device: torch.device) -> None:
        self.slots, (rows, self.kv_heads), self.block_size = slots, keys.shape[:2], block_size
        self.keys, self.values = (
            torch.empty(slots, 1, block_size, x.shape[3], dtype=x.dtype, device=device) for x in (keys, values)
        )
        self._slot_of = torch.full((rows * self.kv_heads, 0), -1, device="cpu")  # [P, N], -1: not in the pool
        self._owner = torch.full((slots, 2), -1, device="cpu")  # pair and block, -1: empty
        self._last_read = torch.full((slots,), -1, device="cpu")  # -1: empty
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values."""
        return self.block_size * token_bytes(self.keys, self.values)

    def locate(self, blocks_PX: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> tuple[Tensor, int] | None:
        """Fetch the blocks ``blocks_PX`` that the pool lacks from all blocks in slow memory, ``[P, N, C * D]``.

        Returns:
            Slot of each block, int64 ``[P, X]`` in host memory like ``blocks_PX``, 0 where that is padding (-1); and
            the number of fetched blocks. ``None`` if there are more blocks than slots.
        """
        real_PX = blocks_PX >= 0
        count = int(real_PX.sum())
        if count > self.slots:
            return None
        self._widen(key_blocks.shape[1])
        self._clock += 1
        blocks_PX = blocks_PX.clamp(min=0)
        slots_PX = self._slot_of.gather(1, blocks_PX)
        here_PX = real_PX & (slots_PX >= 0)
        self._last_read[slots_PX[here_PX]] = self._clock
        pairs_F, columns_F = (real_PX & ~here_PX).nonzero(as_tuple=True)
        if len(pairs_F):
            blocks_F = blocks_PX[pairs_F, columns_F]
            slots_F = self._last_read.topk(len(pairs_F), largest=False).indices
            self._vacate(slots_F)
            places_F = pairs_F * key_blocks.shape[1] + blocks_F
            for target, source in ((self.keys, key_blocks), (self.values, value_blocks)):
                fetched = source.flatten(0, 1).index_select(0, places_F).to(target.device)
                target.view(self.slots, -1).index_copy_(0, slots_F.to(target.device), fetched)
            self._owner[slots_F] = torch.stack((pairs_F, blocks_F), dim=1)
            self._last_read[slots_F] = self._clock
            self._slot_of[pairs_F, blocks_F] = slots_F
            slots_PX[pairs_F, columns_F] = slots_F
        return slots_PX.masked_fill_(~real_PX, 0), len(pairs_F)

    def _vacate(self, slots_F: Tensor) -> None:
        """Mark these slots as empty."""
        pairs_F, blocks_F = self._owner[slots_F].unbind(1)
        self._slot_of[pairs_F[pairs_F >= 0], blocks_F[pairs_F >= 0]] = -1
        self._owner[slots_F], self._last_read[slots_F] = -1, -1

    def put(self, positions_B: Tensor, keys_PD: Tensor, values_PD: Tensor) -> None:
        """Write one new token per row to the pool, where the pool has the token's block; ``positions_B``, in host
        memory, is the index of the token in each row.
        """
        blocks_P = (positions_B // self.block_size).repeat_interleave(self.kv_heads)
        self._widen(int(blocks_P.max()) + 1)  # the longest row may have begun a block beyond what was read so far
        slots_P = self._slot_of.gather(1, blocks_P[:, None])[:, 0]
        here = (slots_P >= 0).nonzero()[:, 0]
        if len(here):
            places = (positions_B % self.block_size).repeat_interleave(self.kv_heads)[here]
            device = self.keys.device
            slots, places, here = slots_P[here].to(device), places.to(device), here.to(device)
            self.keys[slots, 0, places], self.values[slots, 0, places] = keys_PD[here], values_PD[here]

    def forget(self, row: int, start: int, end: int) -> None:
        """Drop the blocks of a row that hold its tokens ``start..end - 1``."""
        blocks = slice(start // self.block_size, -(-end // self.block_size))
        part = self._slot_of[row * self.kv_heads : (row + 1) * self.kv_heads, blocks]
        self._vacate(part[part >= 0])

    def _widen(self, blocks: int) -> None:
        """Enlarge the table to this many blocks per pair."""
        missing = blocks - self._slot_of.shape[1]
        if missing > 0:
            self._slot_of = pad(self._slot_of, (0, missing), value=-1)


class Offloaded(DynamicStorage):
    """Storage in slow memory that reads selected blocks through a `BlockPool`."""

    def __init__(self, offload: Offload, layer: int) -> None:
        self.offload, self.layer = offload, layer
        super().__init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloaded:
        """Raise `SeergateError`: a copy would double the slow memory."""
        raise SeergateError("an offloaded cache cannot be copied; read the prompt again into a new cache")

    def clear(self) -> None:
        super().clear()
        self.pool: BlockPool | None = None

    def allocate(self, keys: Tensor, values: Tensor, block_size: int, state: LayerState) -> None:
        super().allocate(keys, values, block_size, state)
        self._new_pool()

    def _slots_for(self, rows: int) -> int:
        """Number of blocks in this layer's share of the fast memory; 0 in a dense layer.

        Raises `SeergateError` if a step of this many rows reads more, in dense layers too: these come first in most
        models, so that the error is raised before any layer has changed.
        """
        heads, width = self.keys.shape[1], self.keys.shape[3] + self.values.shape[3]
        method, sharers = self.offload.method, self.offload.sharers
        each, budget = self.block_size * width * self.dtype.itemsize, method.block_budget
        if not sharers:
            return 0
        slots = self.offload.memory_bytes // (each * sharers)
        most = 1 if budget is None else budget.least if budget.most == UNBOUNDED else budget.most
        needed = rows * heads * most
        if slots < needed:
            raise SeergateError(
                f"memory_bytes is {self.offload.memory_bytes}, which is {slots} blocks in each of {sharers} "
                f"layers; a step of {rows} rows reads {needed}, so it must be at least {needed * each * sharers}"
            )
        return slots if method.selects_in(self.layer) else 0

    def _new_pool(self) -> None:
        """Replace the pool with an empty one for the current rows."""
        slots = self._slots_for(len(self.keys))
        self.pool = BlockPool(slots, self.keys, self.values, self.block_size, self.device)

    def buffer(self, like: Tensor, *shape: int) -> Tensor:
        return self.offload.buffer(shape, like.dtype)

    def room_for(self, tokens: int) -> int:
        return 2 * tokens  # growing copies the whole file, so do it rarely

    def write(
        self,
        context: ForwardContext,
        rows: Rows,
        keys: Tensor,
        values: Tensor,
        counts: list[int],
        max_tokens: int | None,
    ) -> None:
        assert self.pool is not None
        super().write(context, rows, keys, values, counts, max_tokens)
        if keys.shape[2] == 1 and set(counts) == {1}:
            newest = (x[:, :, 0].detach().to(self.dtype).flatten(0, 1) for x in (keys, values))
            self.pool.put(torch.tensor(rows.resident, device="cpu"), *newest)
            return
        for row, (start, count) in enumerate(zip(rows.resident, counts, strict=True)):
            self.pool.forget(row, start, start + count)

    def select(self, index: Tensor) -> None:
        rows = index.tolist()
        self._slots_for(len(rows))  # before anything is changed
        selected = [self.buffer(old, len(rows), *old.shape[1:]) for old in (self._keys, self._values)]
        for new, old in zip(selected, (self._keys, self._values), strict=True):
            for i, row in enumerate(rows):
                new[i] = old[row]
        self._keys, self._values = selected
        self._new_pool()

    def append(self, other: Storage, longest: int, max_tokens: int | None) -> None:
        self._slots_for(len(self.keys) + len(other.keys))  # before anything is changed
        super().append(other, longest, max_tokens)
        self._new_pool()

    def attend(self, step: Step, selection: Selection | PerHeadSelection | None, block_size: int) -> AttentionOutput:
        assert self.pool is not None
        size, (batch, heads) = self.block_size, self.keys.shape[:2]
        whole = sum(-(-end // size) for end in step.ends) * heads * self.pool.block_bytes
        if selection is None:  # not through the pool
            return super().attend(self._near(step), None, block_size)._replace(fetched=whole)
        indices = selection.indices
        keys, values = (x.view(batch * heads, -1, size * x.shape[3]) for x in (self.keys, self.values))
        located = self.pool.locate(indices.flatten(0, 1).long().cpu(), keys, values)
        if located is None:  # more blocks than slots
            selected = int((indices >= 0).sum()) * self.pool.block_bytes
            fetched = selected if self.device.type == "cpu" else whole
            return super().attend(self._near(step), selection, block_size)._replace(fetched=fetched)
        # Treat each pair as a row of a paged cache that holds only its selected blocks, in order.
        slots_PX = located[0].to(self.device)
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
        return AttentionOutput(torch.cat(outputs, dim=1).flatten(1, 2), fetched=located[1] * self.pool.block_bytes)

    def _near(self, step: Step) -> Step:
        """The step with a copy of the keys and values in the model's memory."""
        size = self.in_blocks(step.max_length)
        keys, values = (x[:, :, :size].to(self.device) for x in (step.keys_BKCD, step.values_BKCD))
        return replace(step, keys_BKCD=keys, values_BKCD=values)

    @property
    def nbytes(self) -> int:
        """Bytes of fast memory: the pool."""
        return self.pool.nbytes if self.pool is not None else 0

    def row_bytes(self, resident: list[int]) -> np.ndarray:
        """Bytes of the pool, divided equally among the rows."""
        return np.full(len(resident), self.nbytes / len(resident))
