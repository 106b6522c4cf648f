"""BlockPool: the blocks of an offloaded cache that are in fast memory, and which of them to give up for others.

Blocks belong to one row and KV head each (a pair), since each KV head selects its own. Those that a step reads stay
for the next one; the pool gives up the blocks that have not been read for longest. What it counts lies in host memory:
it has to be known where the blocks are fetched from.

Shape suffixes: P pairs, X selected blocks of a pair, N blocks of a pair, F blocks to fetch, C tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BlockPool:
    """A fixed number of slots, each of which holds a block or nothing.

    Args:
        slots: how many.
        rows, kv_heads: of the cache.
        block_size: tokens per block.
        key_dim, value_dim, dtype, device: of what is held.

    Attributes:
        keys, values: ``[slots, 1, C, D]``, as pages for `seergate.ops.sparse_decode`.
        fetched: how many blocks were fetched; whoever reads it may set it back.
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
        self.fetched = 0
        self._slot_of = torch.full((rows * kv_heads, 0), -1)  # [P, N], -1: not here
        self._owner = torch.full((slots,), -1)  # pair * N + block, -1: nobody
        self._last_read = torch.zeros(slots, dtype=torch.int64)
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values."""
        return self.nbytes // self.slots

    def locate(self, blocks_PX: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> Tensor | None:
        """The slots of these blocks, after fetching those that are not here.

        Args:
            blocks_PX: int64 in host memory, -1 where there is none.
            key_blocks, value_blocks: all blocks, ``[P, N, C * D]``, in slow memory.

        Returns:
            Int64 ``[P, X]`` in host memory, 0 where there is no block; ``None`` if there are more than slots.
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
            slots_PX[pairs_F, columns_F] = self._fetch(pairs_F, blocks_F, key_blocks, value_blocks)
        return slots_PX.masked_fill_(~real_PX, 0)

    def _fetch(self, pairs_F: Tensor, blocks_F: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> Tensor:
        """Bring blocks into the slots that have not been read for longest; those slots."""
        self.fetched += len(pairs_F)
        slots_F = self._last_read.topk(len(pairs_F), largest=False).indices
        before_F = self._owner[slots_F]
        self._slot_of.view(-1)[before_F[before_F >= 0]] = -1
        self._owner[slots_F] = pairs_F * self._slot_of.shape[1] + blocks_F
        self._slot_of[pairs_F, blocks_F] = slots_F
        self._last_read[slots_F] = self._clock
        rows_F, there = pairs_F * key_blocks.shape[1] + blocks_F, slots_F.to(self.keys.device)
        for target, source in ((self.keys, key_blocks), (self.values, value_blocks)):
            found = source.flatten(0, 1).index_select(0, rows_F).to(target.device)
            target.view(self.slots, -1).index_copy_(0, there, found)
        return slots_F

    def put(self, positions_B: Tensor, keys_PD: Tensor, values_PD: Tensor) -> None:
        """One new token per row: where its block is here, write it there too.

        Args:
            positions_B: int64 in host memory, its index in the row.
            keys_PD, values_PD: its key and value in each pair.
        """
        blocks_P = (positions_B // self.block_size).repeat_interleave(self.kv_heads)
        if not self._slot_of.shape[1] or int(blocks_P.max()) >= self._slot_of.shape[1]:
            return  # nothing of such a late block has been read yet
        slots_P = self._slot_of.gather(1, blocks_P[:, None])[:, 0]
        here = (slots_P >= 0).nonzero()[:, 0]
        if len(here):
            places = (positions_B % self.block_size).repeat_interleave(self.kv_heads)[here]
            device = self.keys.device
            slots, places, here = slots_P[here].to(device), places.to(device), here.to(device)
            self.keys[slots, 0, places], self.values[slots, 0, places] = keys_PD[here], values_PD[here]

    def forget(self, row: int, start: int, end: int) -> None:
        """Give up the blocks of a row that its tokens ``start..end - 1`` are in."""
        blocks = slice(start // self.block_size, -(-end // self.block_size))
        part = self._slot_of[row * self.kv_heads : (row + 1) * self.kv_heads, blocks]
        slots = part[part >= 0]
        self._owner[slots], self._last_read[slots] = -1, 0
        part.fill_(-1)

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
