"""The rows that decode sparsely in a step, and what its layers share.

Shape suffixes: R rows, N blocks of the longest row, r pages of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(eq=False)
class Rows:
    """Rows that decode.

    Attributes:
        lengths_R: tokens so far, int64; ``table_RNr`` the pages of each row's blocks, int64.
        kept: how many blocks each KV head reads, where this is known and the same in all rows.
        computed: results of `once`.
    """

    lengths_R: Tensor
    table_RNr: Tensor
    kept: int | None = None
    computed: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths_R)

    def once(self, function: Callable[..., T], *arguments: Any) -> T:
        """``function(self, *arguments)``, computed in the first layer that asks for it."""
        key = function, *arguments
        if key not in self.computed:
            self.computed[key] = function(self, *arguments)
        return self.computed[key]  # type: ignore[no-any-return]


def divided(rows: Rows, most: int) -> list[Rows]:
    """The rows in groups of at most ``most``."""
    parts = zip(rows.lengths_R.split(most), rows.table_RNr.split(most), strict=True)
    return [Rows(lengths_R, table_RNr, rows.kept) for lengths_R, table_RNr in parts]
