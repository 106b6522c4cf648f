"""A step whose cache lies in pages. Ops read the pages; a method that asks for all keys gets a copy of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seergate.methods.base import Step
from seergate.ops.paging import unpaged


class _Gathered:
    """A field of `Step` that is given as pages and read as the contiguous tensor that they stand for."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, step: Any, owner: type) -> Any:
        if step is None:
            return self
        if self.name not in step.gathered:
            step.gathered[self.name] = unpaged(step.paged[self.name], step.page_table)
        return step.gathered[self.name]

    def __set__(self, step: Any, value: Tensor) -> None:
        (step.gathered if step.page_table is None else step.paged)[self.name] = value


class PagedStep(Step):
    """See the module's docstring.

    Args:
        page_table: int32 ``[B, P]``, each row's pages; then ``keys_BKCD`` and ``values_BKCD`` are given as pages
            ``[pages, K, page, D]``. ``None``: they are given as they are, as in any step.
        **facts: the fields of `Step`.
    """

    keys_BKCD = _Gathered()  # type: ignore[assignment]
    values_BKCD = _Gathered()  # type: ignore[assignment]

    def __init__(self, page_table: Tensor | None = None, **facts: Any) -> None:
        self.page_table = page_table
        self.paged: dict[str, Tensor] = {}
        self.gathered: dict[str, Tensor] = {}
        super().__init__(**facts)

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `Step`."""
        if self.page_table is None:
            return super().stored
        return self.paged["keys_BKCD"], self.paged["values_BKCD"], self.page_table
