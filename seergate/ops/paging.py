"""Memory layout of tokens in a contiguous KV cache ``[B, Hkv, S, d]`` or a paged one.

A paged cache consists of pages ``[pages, Hkv, page, d]`` and a page table ``[B, P]``: token ``i`` of row ``b`` is in
page ``table[b, i // page]``.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def rows_of(cache: Tensor, unit: int, places: Tensor, page_table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """View the cache as a matrix with ``unit`` consecutive tokens of one head per row, to gather tokens from.

    Args:
        cache: ``[B, Hkv, S, d]``, or pages, for which `has_rows_of` is true.
        unit: tokens per matrix row; divides the page size.
        places: int64 ``[B, Hkv, X]``, token positions divided by ``unit``.
        page_table: ``[B, P]`` of a paged cache.

    Returns:
        The matrix ``[rows, unit * d]``, a view, and the row index of each of ``places``, int64 ``[B * Hkv, X]``.
    """
    (outer, kv_heads, tokens), size = cache.shape[:3], unit * cache.shape[-1]
    steps = [0 if n == 1 else s // size for n, s in zip(cache.shape[:2], cache.stride()[:2], strict=True)]
    step = 0 if tokens == unit else cache.stride(2) * unit // size
    count = 1 + (outer - 1) * steps[0] + (kv_heads - 1) * steps[1] + (tokens // unit - 1) * step
    device = cache.device
    if page_table is None:
        first = torch.arange(outer, device=device)[:, None, None] * steps[0]
    else:
        per_page = tokens // unit
        page = torch.div(places, per_page, rounding_mode="floor")
        table_BKP = page_table.long()[:, None].expand(-1, kv_heads, -1)
        first, places = table_BKP.gather(2, page) * steps[0], places - page * per_page
    heads = torch.arange(kv_heads, device=device)[:, None] * steps[1]
    return cache.as_strided((count, size), (size, 1)), (first + heads + places * step).flatten(0, 1)
