"""The rows that decode sparsely in a step, and values that its layers share.

Shape suffixes: R rows, N blocks of the longest row, r pages of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from seergate.ops.rows import RowLengths

T = TypeVar("T")


@dataclass(eq=False)
class Rows:
    """Rows that decode.

    Attributes:
        lengths_R, table_RNr: number of tokens of each row, and the pages of its blocks; both int64.
        kept: number of blocks that each KV head reads, if it is known in advance and equal in all rows.
        computed: results of `once`.
        step: the lengths as the ops take them.
    """

    lengths_R: Tensor
    table_RNr: Tensor
    kept: int | None = None
    computed: dict[Any, Any] = field(default_factory=dict)
    step: RowLengths = field(init=False)

    def __post_init__(self) -> None:
        self.step = RowLengths(self.lengths_R)

    def __len__(self) -> int:
        return len(self.lengths_R)

    def once(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return ``function(self, *arguments)``, which is computed once and cached for the other layers."""
        key = function, *arguments
        if key not in self.computed:
            self.computed[key] = function(self, *arguments)
        return self.computed[key]  # type: ignore[no-any-return]


def divided(rows: Rows, most: int) -> list[Rows]:
    """Split the rows into groups of at most ``most``."""
    parts = zip(rows.lengths_R.split(most), rows.table_RNr.split(most), strict=True)
    return [Rows(lengths_R, table_RNr, rows.kept) for lengths_R, table_RNr in parts]
