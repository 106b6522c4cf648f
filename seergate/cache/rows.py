"""Rows: the length of each row of a batch, and where the batch is padded. Keys and values are elsewhere.

Rows are left-compacted: index 0 is a row's first real token, so that blocks and selections do not depend on padding or
on the rest of the batch. The interface to transformers counts in *slots*, the columns of the padded batch.

Shape suffixes: B batch, T slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from seergate.errors import SeergateError
from seergate.ops.rows import RowLengths


class Rows:
    """The rows of one layer.

    Lengths are also counted on the host, which avoids device reads; after compiled steps (`add_compiled`) they are
    read once, when needed. If such steps may occur (``compiles``), tensors are updated in place.

    Attributes:
        lengths: int64 ``[B]``, tokens that each row holds.
        each: int64 ``[B]``, the index of each row.
        width: int64 scalar, the number of slots; ``None`` without compiled steps.
        offsets: per row, the position that the model gave to its first token.
        newest: int64 ``[B]``, the position that it gave to the newest token.
        gaps: bool ``[B]``, whether positions before the newest tokens that came one by one are not consecutive.
        valid: bool ``[B, <= slots]``, which slots hold real tokens; later slots all do. ``None`` without padding.
    """

    def __init__(self, batch: int = 0, device: torch.device | None = None, compiles: bool = False) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.each = torch.arange(batch, device=device)
        self.width = torch.zeros((), dtype=torch.int64, device=device) if compiles else None
        self._resident, self._total, self.offsets = [0] * batch, [0] * batch, [0] * batch
        self._slots, self._seen = 0, True
        self.newest = torch.full_like(self.lengths, -1)
        self.gaps = torch.zeros(batch, dtype=torch.bool, device=device)
        self.valid: Tensor | None = None
        self.shared: RowLengths | None = None  # keeps what the layers of a step share as long as the cache

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def resident(self) -> list[int]:
        """`lengths` as a list."""
        if not self._seen:
            self._see()
        return self._resident

    @property
    def total(self) -> list[int]:
        """Tokens of each row so far, evicted ones included."""
        if not self._seen:
            self._see()
        return self._total

    @property
    def slots(self) -> int:
        """Columns of the padded batch so far, which transformers calls the sequence length."""
        if not self._seen:
            self._see()
        return self._slots

    def _see(self) -> None:
        """Read the lengths that compiled steps have counted on the device; such steps evict nothing."""
        assert self.width is not None
        self._resident = self._total = self.lengths.tolist()
        self._slots, self._seen = int(self.width), True

    def add_compiled(self, positions: Tensor | None) -> None:
        """Count one new token per row, on the device only; ``positions`` as in `place`."""
        assert self.width is not None
        self.newest.copy_(self.newest + 1 if positions is None else positions[:, 0])
        self.lengths.add_(1)
        self.width.add_(1)
        self._seen = False

    def _set_slots(self, slots: int) -> None:
        self._slots = slots
        if self.width is not None:
            self.width.fill_(slots)

    def real_slots(self) -> Tensor:
        """Mask of the slots that hold real tokens: bool ``[B, slots]``."""
        none = torch.ones(len(self), 0, dtype=torch.bool, device=self.lengths.device)
        valid = none if self.valid is None else self.valid
        return pad(valid, (0, self.slots - valid.shape[1]), value=True)

    def slot_index(self) -> Tensor | None:
        """Index within its row of each slot's token, int64 ``[B, slots]``; ``None`` if it equals the slot."""
        if self.valid is None:
            return None
        index = (self.valid.cumsum(1) - 1).clamp(min=0)
        extra = torch.arange(1, self.slots - index.shape[1] + 1, device=index.device)
        return torch.cat((index, self.valid.sum(1, keepdim=True) - 1 + extra), dim=1)

    def set_resident(self, lengths: list[int], like: RowLengths | None = None) -> RowLengths:
        """Set how many tokens each row holds. Returns the lengths for a decode step: those of another layer (``like``)
        if they are the same, so that the layers share what follows from them.
        """
        device = self.lengths.device
        if like is None or like.host != lengths or like.tensor.device != device:
            like = None
        if like is not None:
            new = like.tensor
        elif lengths == [length + 1 for length in self.resident]:
            new = self.lengths + 1  # no transfer to the device at a decode step
        else:
            new = torch.tensor(lengths, dtype=torch.int64, device=device)
        self.lengths = new if self.width is None else self.lengths.copy_(new)
        self._resident = lengths
        if like is None and 0 in lengths:  # a row without a token yet attends to a zero key; its output is not used
            return RowLengths(new.clamp(min=1), [max(1, length) for length in lengths])
        return like or RowLengths(new, lengths)

    def add(self, counts: list[int], slots: int, valid: Tensor | None, like: RowLengths | None = None) -> RowLengths:
        """Count ``counts[b]`` new tokens of row b, in ``slots`` new columns; ``like`` and result as in `set_resident`.

        ``valid``, bool ``[B, slots]``, marks the columns with real tokens; ``None`` if all are real.
        """
        if valid is not None or (self.valid is not None and slots > 1):
            real = self.real_slots()
            self.valid = pad(real, (0, slots), value=True) if valid is None else torch.cat((real, valid), dim=1)
        self._set_slots(self.slots + slots)
        self._total = [total + count for total, count in zip(self.total, counts, strict=True)]
        resident = [resident + count for resident, count in zip(self.resident, counts, strict=True)]
        self.shared = self.set_resident(resident, like)
        return self.shared

    def place(self, positions: Tensor | None, counts: list[int]) -> None:
        """Note the positions ``[B, S]`` of new tokens, of which row b has ``counts[b]``, or ``[B]`` of one; call it
        before `add`. ``None`` stands for consecutive ones.
        """
        if positions is None:
            newest = self.newest + torch.tensor(counts, device=self.lengths.device)
        elif positions.ndim == 1 and all(counts) and all(self.total):
            newest = positions.to(self.lengths.device)
        else:
            positions = positions.to(self.lengths.device)
            positions = positions[:, None] if positions.ndim == 1 else positions
            if not all(self.total):
                first = zip(positions[:, 0].tolist(), self.offsets, self.total, strict=True)
                self.offsets = [old if total else new for new, old, total in first]
            index = torch.arange(positions.shape[1], device=positions.device)
            given = torch.tensor(counts, device=positions.device)[:, None]
            consecutive = self._consecutive(self.total)[:, None] + 1 + index
            self.gaps = self.gaps | ((positions != consecutive) & (index < given)).any(1)
            newest = torch.where(given > 0, positions.gather(1, (given - 1).clamp(min=0)), self.newest[:, None])[:, 0]
        self.newest = newest if self.width is None else self.newest.copy_(newest)

    def _consecutive(self, lengths: list[int]) -> Tensor:
        """Position of the newest token in rows of these lengths without gaps, int64 ``[B]``."""
        newest = [offset + length - 1 for offset, length in zip(self.offsets, lengths, strict=True)]
        return torch.tensor(newest, dtype=torch.int64, device=self.lengths.device)

    def regular_offset(self, row: int) -> int:
        """The row's entry of `offsets`, after a crop. Raises `SeergateError` if the row's positions have gaps."""
        if self.gaps[row]:
            raise SeergateError(
                f"row {row} is cropped so far that keys before RoPE have to be recovered, which needs consecutive "
                "positions, and its position_ids have gaps; crop it by fewer tokens, or start a new cache"
            )
        return self.offsets[row]

    def crop(self, slots: int) -> list[int]:
        """Keep the first ``slots`` slots; return how many tokens each row had before."""
        if self.valid is None:
            after = [slots] * len(self)
        else:
            self.valid = self.valid[:, :slots]
            after = [count + slots - self.valid.shape[1] for count in self.valid.sum(1).tolist()]
        self._set_slots(slots)
        return self.shorten(after)

    def shorten(self, lengths: list[int]) -> list[int]:
        """Keep the first ``lengths[b]`` tokens of row b, and all slots; return how many tokens each row had before."""
        before = list(self.resident)
        # Tokens that came one by one had rising positions, so the newest tells whether there was a gap.
        self.gaps = self.gaps | (self.newest != self._consecutive(self.total))
        newest, self._total = self._consecutive(lengths), list(lengths)
        self.newest = newest if self.width is None else self.newest.copy_(newest)
        self.set_resident(lengths)
        return before

    def select(self, index: Tensor) -> None:
        """Take the rows ``index`` (int64), in that order; a row may be repeated."""
        rows = index.tolist()
        self._resident, self._total, self.offsets = (
            [x[row] for row in rows] for x in (self.resident, self.total, self.offsets)
        )
        self.lengths, self.newest, self.gaps = (
            x.index_select(0, index) for x in (self.lengths, self.newest, self.gaps)
        )
        self.each = torch.arange(len(index), device=index.device)
        if self.valid is not None:
            self.valid = self.valid.index_select(0, index)

    def append(self, other: Rows) -> None:
        """Append other rows; all rows then count as left-padded to the longest."""
        pairs = ((self.lengths, other.lengths), (self.newest, other.newest), (self.gaps, other.gaps))
        self.lengths, self.newest, self.gaps = (torch.cat(pair) for pair in pairs)
        self.each = torch.arange(len(self), device=self.lengths.device)
        self._resident, self._total = self.resident + other.resident, self.total + other.total
        self.offsets = self.offsets + other.offsets
        self._set_slots(max(self.total))
        device = self.lengths.device
        begins = torch.tensor([self.slots - total for total in self.total], device=device)
        self.valid = torch.arange(self.slots, device=device) >= begins[:, None] if begins.any() else None
