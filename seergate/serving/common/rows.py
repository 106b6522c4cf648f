"""The rows that decode sparsely in a step, with their pages.

Shape suffixes: R rows, N blocks of the longest row, r pages of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from seergate.ops.rows import RowLengths


class PagedRows(RowLengths):
    """Rows that decode.

    Attributes:
        table_RNr: the pages of each row's blocks, int64.
    """

    def __init__(self, lengths_R: Tensor, table_RNr: Tensor, host: Sequence[int] | None = None) -> None:
        super().__init__(lengths_R, host)
        self.table_RNr = table_RNr

    def __len__(self) -> int:
        return len(self.tensor)

    def divided(self, most: int) -> list[PagedRows]:
        """Groups of at most ``most`` rows."""
        return self.once(("divided", most), lambda: [self._part(i, i + most) for i in range(0, len(self), most)])

    def _part(self, start: int, end: int) -> PagedRows:
        host = None if self.host is None else self.host[start:end]
        return PagedRows(self.tensor[start:end], self.table_RNr[start:end], host)
