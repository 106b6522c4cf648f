"""Rows that come and go: what continuous batching needs from a cache of `GatedLayer`s.

Rows lie left-compacted in a `GatedLayer`, each with its own length, so a row of one cache can continue beside rows of
another. Other layers (sliding windows, linear attention) keep all rows at one common slot and cannot.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from seergate.errors import SeergateError
from seergate.host.cache import GatedLayer


def rows_are_independent(cache: Cache) -> bool:
    """Whether every layer keeps its rows apart, so that `join_rows` works."""
    return bool(cache.layers) and all(isinstance(layer, GatedLayer) for layer in cache.layers)


def join_rows(cache: Cache, arriving: Cache) -> None:
    """Put the rows of ``arriving`` after those of ``cache``, which may have seen more or fewer tokens.

    Afterwards the batch counts as left-padded to its longest row. ``arriving`` must not be used any more.

    Raises:
        SeergateError: if one of them has layers of another kind.
    """
    if not (rows_are_independent(cache) and rows_are_independent(arriving)):
        raise SeergateError("only caches whose layers are all gated can be joined")
    for layer, other in zip(cache.layers, arriving.layers, strict=True):
        layer.append_rows(other)


def keep_rows(cache: Cache, rows: list[int]) -> None:
    """Drop all rows but these, in that order."""
    cache.batch_select_indices(torch.tensor(rows, dtype=torch.int64))
