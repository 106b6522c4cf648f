"""BlockPool: the blocks of an offloaded cache that are in fast memory, and which of them to give up for others.

Blocks belong to one row and KV head each (a pair), since each KV head selects its own. Those that a step reads stay
for the next one; the pool gives up the blocks that have not been read for longest. What it counts lies in host memory:
it has to be known where the blocks are fetched from.

Blocks that are likely to be read next may be fetched ahead, into room that the step just made does not need. Which
slot gets which block is decided at once, by the decoding thread; only the copying goes on in the background, and
whatever is asked of the pool next waits for it. So what is read does not depend on what is faster.

Shape suffixes: P pairs, X selected blocks of a pair, Y likely blocks of a pair, N blocks of a pair, F blocks to fetch,
C tokens of a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seergate.cache.background import Background, Job
from seergate.errors import first_line

_EMPTY, _AHEAD = -1, 0
"""In place of the time of a slot's last reading: it holds nothing, or a block fetched ahead that no step has read."""


class BlockPool:
    """A fixed number of slots, each of which holds a block or nothing.

    Args:
        slots: how many.
        rows, kv_heads: of the cache.
        block_size: tokens per block.
        key_dim, value_dim, dtype, device: of what is held.

    Attributes:
        keys, values: ``[slots, 1, C, D]``, as pages for `seergate.ops.sparse_decode`.
        fetched: how many blocks were fetched, or should have been.
        ahead: how many of them ahead.
        used: how many of those a step has read since. Whoever reads these three may set them back.
    """

    def __init__(
        self,
        slots: int,
        rows: int,
        kv_heads: int,
        block_size: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots, self.kv_heads, self.block_size = slots, kv_heads, block_size
        self.keys = torch.empty(slots, 1, block_size, key_dim, dtype=dtype, device=device)
        self.values = torch.empty(slots, 1, block_size, value_dim, dtype=dtype, device=device)
        self.fetched = self.ahead = self.used = 0
        self._slot_of = torch.full((rows * kv_heads, 0), -1)  # [P, N], -1: not here
        self._owner = torch.full((slots,), -1)  # pair * N + block, -1: nobody
        self._last_read = torch.full((slots,), _EMPTY)
        self._clock = _AHEAD
        self._coming: tuple[Job, Tensor] | None = None  # what is being copied, and into which slots

    def __getstate__(self) -> dict[str, Any]:
        self.settle()  # what goes on in the background cannot be copied
        return vars(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values."""
        return self.block_size * (self.keys.shape[3] + self.values.shape[3]) * self.keys.element_size()

    def locate(self, blocks_PX: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> Tensor | None:
        """The slots of these blocks, after fetching those that are not here.

        Args:
            blocks_PX: int64 in host memory, -1 where there is none.
            key_blocks, value_blocks: all blocks, ``[P, N, C * D]``, in slow memory.

        Returns:
            Int64 ``[P, X]`` in host memory, 0 where there is no block; ``None`` if there are more than slots.
        """
        self.settle()
        real_PX = blocks_PX >= 0
        count = int(real_PX.sum())
        if count > self.slots:
            return None
        self._widen(key_blocks.shape[1])
        self._clock += 1
        blocks_PX = blocks_PX.clamp(min=0)
        slots_PX = self._slot_of.gather(1, blocks_PX)
        here_PX = real_PX & (slots_PX >= 0)
        slots_here = slots_PX[here_PX]
        self.used += int((self._last_read[slots_here] == _AHEAD).sum())
        self._last_read[slots_here] = self._clock
        pairs_F, columns_F = (real_PX & ~here_PX).nonzero(as_tuple=True)
        if len(pairs_F):
            blocks_F = blocks_PX[pairs_F, columns_F]
            slots_F = self._last_read.topk(len(pairs_F), largest=False).indices
            self._vacate(slots_F)
            _copy(self._targets, (key_blocks, value_blocks), slots_F, pairs_F * key_blocks.shape[1] + blocks_F)
            self._occupy(slots_F, pairs_F, blocks_F, self._clock)
            slots_PX[pairs_F, columns_F] = slots_F
        return slots_PX.masked_fill_(~real_PX, 0)

    def fetch_ahead(self, blocks_PY: Tensor, key_blocks: Tensor, value_blocks: Tensor, background: Background) -> None:
        """Begin to fetch blocks that the next step may read, as far as there is room beside those of this one.

        They take empty slots, then those that have not been read for longest, but none that holds a block of the step
        just made or another likely one. Until a step reads them they are the first to be given up again, so that a
        wrong guess costs no more than the place it was given.

        Args:
            blocks_PY: int64 in host memory, the most likely first, -1 where there is none. Nothing may be written to
                them before the pool has been told (`settle`, `put`, `forget`).
            key_blocks, value_blocks: see `locate`, which was called with the same.
            background: where they are copied.
        """
        self.settle()
        real_PY = blocks_PY >= 0
        slots_PY = self._slot_of.gather(1, blocks_PY.clamp(min=0))
        here_PY = slots_PY >= 0
        stays = self._last_read == self._clock
        stays[slots_PY[real_PY & here_PY]] = True
        columns_F, pairs_F = (real_PY & ~here_PY).t().nonzero(as_tuple=True)  # the best of each pair come first
        room = self.slots - int(stays.sum())
        columns_F, pairs_F = columns_F[:room], pairs_F[:room]
        if not len(pairs_F):
            return
        blocks_F = blocks_PY[pairs_F, columns_F]
        slots_F = self._last_read.masked_fill(stays, self._clock).topk(len(pairs_F), largest=False).indices
        self._vacate(slots_F)
        places_F = pairs_F * key_blocks.shape[1] + blocks_F
        # Not a method of this object: the job, which this object holds, would keep it alive.
        copy = partial(_copy_aside, self._targets, (key_blocks, value_blocks), slots_F, places_F)
        self._coming = background.start(copy), slots_F
        self._occupy(slots_F, pairs_F, blocks_F, _AHEAD)
        self.ahead += len(pairs_F)

    def settle(self) -> None:
        """Wait until what is being fetched ahead is here. If that fails its blocks are not, and will be fetched when
        they are needed: a guess must not end a step that some layers have already stored.
        """
        if self._coming is None:
            return
        job, slots_F = self._coming
        try:
            job.finish()
        except Exception as error:
            self._vacate(slots_F)
            said = f"blocks could not be fetched ahead ({type(error).__name__}: {first_line(error)})"
            warnings.warn(f"{said}; they are fetched when they are read", RuntimeWarning, stacklevel=2)
        self._coming = None  # not after an interrupt: the copying may go on

    @property
    def _targets(self) -> tuple[Tensor, Tensor]:
        """Keys and values, one slot per row."""
        return self.keys.view(self.slots, -1), self.values.view(self.slots, -1)

    def _occupy(self, slots_F: Tensor, pairs_F: Tensor, blocks_F: Tensor, read: int) -> None:
        """Note which blocks empty slots hold from now on, and when these were read."""
        self.fetched += len(slots_F)
        self._owner[slots_F], self._last_read[slots_F] = pairs_F * self._slot_of.shape[1] + blocks_F, read
        self._slot_of[pairs_F, blocks_F] = slots_F

    def _vacate(self, slots_F: Tensor) -> None:
        """Give up what these slots hold."""
        before_F = self._owner[slots_F]
        self._slot_of.view(-1)[before_F[before_F >= 0]] = -1
        self._owner[slots_F], self._last_read[slots_F] = -1, _EMPTY

    def put(self, positions_B: Tensor, keys_PD: Tensor, values_PD: Tensor) -> None:
        """One new token per row: where its block is here, write it there too.

        Args:
            positions_B: int64 in host memory, its index in the row.
            keys_PD, values_PD: its key and value in each pair.
        """
        self.settle()
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
        """Give up the blocks of a row that its tokens ``start..end - 1`` are in."""
        self.settle()
        blocks = slice(start // self.block_size, -(-end // self.block_size))
        part = self._slot_of[row * self.kv_heads : (row + 1) * self.kv_heads, blocks]
        self._vacate(part[part >= 0])

    def _widen(self, blocks: int) -> None:
        """Have room for this many blocks per pair."""
        old = self._slot_of.shape[1]
        if blocks <= old:
            return
        wide = torch.full((len(self._slot_of), blocks), -1)
        wide[:, :old] = self._slot_of
        if old:
            moved = self._owner // old * blocks + self._owner % old
            self._owner = torch.where(self._owner >= 0, moved, self._owner)
        self._slot_of = wide


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor], slots_F: Tensor, places_F: Tensor) -> None:
    """Copy blocks into slots: of the keys and of the values, from these places among all of ``[P, N, C * D]``."""
    for target, source in zip(targets, sources, strict=True):
        found = source.flatten(0, 1).index_select(0, places_F).to(target.device)
        target.index_copy_(0, slots_F.to(target.device), found)


@torch.inference_mode()  # the thread's own: decoding may be in it, and then made the tensors
def _copy_aside(targets: Sequence[Tensor], sources: Sequence[Tensor], slots_F: Tensor, places_F: Tensor) -> None:
    """The same, on a stream of its own beside a GPU, to the end."""
    device = targets[0].device
    if device.type != "cuda":
        _copy(targets, sources, slots_F, places_F)
        return
    side = torch.cuda.Stream(device)  # who read these slots is done: the host has waited for the selection since
    with torch.cuda.stream(side):
        _copy(targets, sources, slots_F, places_F)
    side.synchronize()
