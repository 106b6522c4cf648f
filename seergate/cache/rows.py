"""Rows: how many tokens each row of a batch holds, and where the batch was padded. No keys or values in here.

Rows are left-compacted: index 0 is a row's first real token, so that blocks, and with them every selection, do not
depend on padding or on the rest of the batch. Towards transformers a cache speaks in *slots*, the columns of the
padded batch.

Shape suffixes: B batch, T slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


class Rows:
    """The rows of one layer.

    Args:
        batch: how many; all are empty.
        device: of the tensors.

    Attributes:
        lengths: int64 ``[B]``, tokens that a row holds.
        resident: `lengths` as a list, known without a device read.
        total: tokens of each row so far, evicted ones included.
        offsets: per row, the position that the model gave to its first token.
        slots: columns of the padded batch so far, which transformers calls the sequence length.
        valid: bool ``[B, <= slots]``, which slots hold real tokens; later ones all do. ``None`` if none was padding.
    """

    def __init__(self, batch: int = 0, device: torch.device | None = None) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.resident, self.total, self.offsets = [0] * batch, [0] * batch, [0] * batch
        self.slots = 0
        self.valid: Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def real_slots(self) -> Tensor:
        """Mask of the slots that hold real tokens: bool ``[B, slots]``."""
        none = torch.ones(len(self), 0, dtype=torch.bool, device=self.lengths.device)
        known = none if self.valid is None else self.valid
        return pad(known, (0, self.slots - known.shape[1]), value=True)

    def slot_index(self) -> Tensor | None:
        """Index within its row of the token in each slot: int64 ``[B, slots]``; ``None`` if slots are places."""
        if self.valid is None:
            return None
        index = (self.valid.cumsum(1) - 1).clamp(min=0)
        extra = torch.arange(1, self.slots - index.shape[1] + 1, device=index.device)
        return torch.cat((index, self.valid.sum(1, keepdim=True) - 1 + extra), dim=1)

    def set_resident(self, lengths: list[int]) -> None:
        """Set how many tokens each row holds."""
        if lengths == [length + 1 for length in self.resident]:
            self.lengths = self.lengths + 1  # no transfer to the device at a decode step
        else:
            self.lengths = torch.tensor(lengths, dtype=torch.int64, device=self.lengths.device)
        self.resident = lengths

    def add(self, counts: list[int], slots: int, valid: Tensor | None) -> None:
        """Count new tokens.

        Args:
            counts: per row.
            slots: new columns.
            valid: bool ``[B, slots]``, which of them hold real tokens; ``None`` if all do.
        """
        if valid is not None or (self.valid is not None and slots > 1):
            known = self.real_slots()
            self.valid = pad(known, (0, slots), value=True) if valid is None else torch.cat((known, valid), dim=1)
        self.slots += slots
        self.total = [total + count for total, count in zip(self.total, counts, strict=True)]
        self.set_resident([resident + count for resident, count in zip(self.resident, counts, strict=True)])

    def crop(self, slots: int) -> list[int]:
        """Forget all but the first slots; the tokens that each row had before."""
        if self.valid is None:
            after = [slots] * len(self)
        else:
            self.valid = self.valid[:, :slots]
            after = [count + slots - self.valid.shape[1] for count in self.valid.sum(1).tolist()]
        self.slots = slots
        return self.shorten(after)

    def shorten(self, lengths: list[int]) -> list[int]:
        """Forget the newest tokens of each row, and not their slots; the tokens that each row had before."""
        before, self.total = list(self.resident), list(lengths)
        self.set_resident(lengths)
        return before

    def select(self, index: Tensor) -> None:
        """Take the rows ``index`` (int64), in that order; a row may be repeated."""
        rows = index.tolist()
        self.resident, self.total, self.offsets = (
            [x[row] for row in rows] for x in (self.resident, self.total, self.offsets)
        )
        self.lengths = self.lengths.index_select(0, index)
        if self.valid is not None:
            self.valid = self.valid.index_select(0, index)

    def append(self, other: Rows) -> None:
        """Put other rows after these. All count as left-padded to the longest of them."""
        self.lengths = torch.cat((self.lengths, other.lengths))
        self.resident, self.total = self.resident + other.resident, self.total + other.total
        self.offsets = self.offsets + other.offsets
        self.slots = max(self.total)
        device = self.lengths.device
        begins = torch.tensor([self.slots - total for total in self.total], device=device)
        self.valid = torch.arange(self.slots, device=device) >= begins[:, None] if begins.any() else None
