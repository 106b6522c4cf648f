"""Memory layout of tokens in a contiguous KV cache ``[B, Hkv, S, d]`` or a paged one.

A paged cache consists of pages ``[pages, Hkv, page, d]`` and a page table ``[B, P]``: token ``i`` of row ``b`` is in
page ``table[b, i // page]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seergate.ops.rows import RowLengths


def unpaged(pages: Tensor, page_table: Tensor) -> Tensor:
    """Copy a paged cache to a contiguous one, ``[B, Hkv, P * page, d]``."""
    return pages[page_table.long()].transpose(1, 2).flatten(2, 3)


class Layout(NamedTuple):
    """A cache as a matrix with ``unit`` consecutive tokens of a head per row.

    Attributes:
        outer, heads, step: distances in matrix rows between rows of the batch (or pages), heads, and units of a head.
        unit: tokens per matrix row.
        length, size: rows and columns of the matrix.
    """

    outer: int
    heads: int
    step: int
    unit: int
    length: int
    size: int

    def matrix(self, cache: Tensor) -> Tensor:
        """The matrix ``[length, size]``, a view."""
        return cache.as_strided((self.length, self.size), (self.size, 1))


def layout_of(cache: Tensor, unit: int, rows: RowLengths) -> Layout | None:
    """The layout of a cache or of pages ``[.., Hkv, S, d]``; ``None`` unless ``unit`` consecutive tokens of a head are
    contiguous, at offsets that are multiples of their size. Made once for the layers of the step ``rows``.
    """

    def make() -> Layout | None:
        (pages, kv_heads, tokens, dim), (*outermost, within, last) = cache.shape, cache.stride()
        size = unit * dim
        in_order = last == 1 and tokens % unit == 0 and (unit == 1 or within == dim)
        aligned = unit > 1 or tokens == 1 or within % dim == 0
        apart = [0 if n == 1 else stride for n, stride in zip((pages, kv_heads), outermost, strict=True)]
        if not (in_order and aligned) or any(stride % size for stride in apart):
            return None
        (outer, heads), step = (stride // size for stride in apart), 0 if tokens == unit else within * unit // size
        length = 1 + (pages - 1) * outer + (kv_heads - 1) * heads + (tokens // unit - 1) * step
        return Layout(outer, heads, step, unit, length, size)

    return rows.once(("layout", unit, cache.shape, cache.stride()), make)


def index_of(cache: Tensor, layout: Layout, places: Tensor, page_table: Tensor | None, rows: RowLengths) -> Tensor:
    """The rows of `Layout.matrix` to gather, int64 or int32 ``[B * Hkv * X]``.

    Args:
        cache: ``[B, Hkv, S, d]``, or pages.
        layout: its layout, whose ``unit`` divides the page size.
        places: int ``[B, Hkv, X]``, token positions divided by ``unit``.
        page_table: ``[B, P]`` of a paged cache.
        rows: the step's rows, which keep the offsets of the batch's rows and heads for the other layers.
    """
    (outer, heads, step), kv_heads = layout[:3], cache.shape[1]

    def offsets() -> Tensor:
        first_K1 = torch.arange(kv_heads, device=cache.device)[:, None] * heads
        if page_table is not None:
            return first_K1
        return torch.arange(len(places), device=cache.device)[:, None, None] * outer + first_K1

    if page_table is not None:
        per_page, places = cache.shape[2] // layout.unit, places.long()
        page = torch.div(places, per_page, rounding_mode="floor")
        table_BKP = page_table.long()[:, None].expand(-1, kv_heads, -1)
        places = (places - page * per_page) * step + table_BKP.gather(2, page) * outer
    elif step != 1:
        places = places * step
    key = ("offsets", len(places), kv_heads, outer, heads, page_table is None)
    return (places + rows.once(key, offsets)).reshape(-1)
