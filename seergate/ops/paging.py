"""Memory layout of tokens in a contiguous KV cache ``[B, Hkv, S, d]`` or a paged one.

A paged cache consists of pages ``[pages, Hkv, page, d]`` and a page table ``[B, P]``: token ``i`` of row ``b`` is in
page ``table[b, i // page]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seergate.ops.rows import RowLengths


def unpaged(pages: Tensor, page_table: Tensor) -> Tensor:
    """Copy a paged cache to a contiguous one, ``[B, Hkv, P * page, d]``."""
    return pages[page_table.long()].transpose(1, 2).flatten(2, 3)


def has_rows_of(cache: Tensor, unit: int) -> bool:
    """True if ``unit`` consecutive tokens of a head are contiguous, at offsets that are multiples of their size."""
    dim, tokens = cache.shape[-1], cache.shape[2]
    size = unit * dim
    in_order = cache.stride(-1) == 1 and tokens % unit == 0 and (unit == 1 or cache.stride(2) == dim)
    return (
        in_order
        and not any(n > 1 and s % size for n, s in zip(cache.shape[:2], cache.stride()[:2], strict=True))
        and (unit > 1 or tokens == 1 or cache.stride(2) % dim == 0)
    )


def layout_of(cache: Tensor, unit: int) -> tuple[int, int, int]:
    """Distances in matrix rows of ``unit`` tokens between rows of the batch (or pages), heads, and units of a head."""
    size = unit * cache.shape[-1]
    outer, heads = (0 if n == 1 else s // size for n, s in zip(cache.shape[:2], cache.stride()[:2], strict=True))
    return outer, heads, 0 if cache.shape[2] == unit else cache.stride(2) * unit // size


def as_rows(cache: Tensor, unit: int) -> Tensor:
    """View a cache for which `has_rows_of` is true as a matrix ``[rows, unit * d]``."""
    outer, heads, step = layout_of(cache, unit)
    pages, kv_heads, tokens, dim = cache.shape
    count = 1 + (pages - 1) * outer + (kv_heads - 1) * heads + (tokens // unit - 1) * step
    return cache.as_strided((count, unit * dim), (unit * dim, 1))


def rows_of(
    cache: Tensor, unit: int, places: Tensor, page_table: Tensor | None, rows: RowLengths
) -> tuple[Tensor, Tensor]:
    """View the cache as a matrix with ``unit`` consecutive tokens of one head per row, to gather tokens from.

    Args:
        cache: ``[B, Hkv, S, d]``, or pages, for which `has_rows_of` is true.
        unit: tokens per matrix row; divides the page size.
        places: int ``[B, Hkv, X]``, token positions divided by ``unit``.
        page_table: ``[B, P]`` of a paged cache.
        rows: the step's rows, which keep the offsets of the batch's rows and heads for the other layers.

    Returns:
        The matrix ``[rows, unit * d]``, a view, and the row index of each of ``places``, int64 ``[B * Hkv * X]``.
    """
    (outer, heads, step), kv_heads = layout_of(cache, unit), cache.shape[1]

    def offsets() -> Tensor:
        first_K1 = torch.arange(kv_heads, device=cache.device)[:, None] * heads
        if page_table is not None:
            return first_K1
        return torch.arange(len(places), device=cache.device)[:, None, None] * outer + first_K1

    if page_table is not None:
        per_page, places = cache.shape[2] // unit, places.long()
        page = torch.div(places, per_page, rounding_mode="floor")
        table_BKP = page_table.long()[:, None].expand(-1, kv_heads, -1)
        places = (places - page * per_page) * step + table_BKP.gather(2, page) * outer
    elif step != 1:
        places = places * step
    key = ("offsets", len(places), kv_heads, outer, heads, page_table is None)
    return as_rows(cache, unit), (places + rows.once(key, offsets)).reshape(-1)
