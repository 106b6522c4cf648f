"""A paged cache: keys and values in pages ``[pages, Hkv, page, d]``, and a table ``[B, P]`` of each row's pages."""

from __future__ import annotations

from torch import Tensor


def unpaged(pages: Tensor, page_table: Tensor) -> Tensor:
    """The cache ``[B, Hkv, P * page, d]`` that a paged one stands for: a copy."""
    return pages[page_table.long()].transpose(1, 2).flatten(2, 3)
