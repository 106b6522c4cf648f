"""Continuous batching: rows that join and leave a cache of `GatedLayer`s.

Every row of a `GatedLayer` has its own length, so rows of different caches can be decoded in one batch. Layers of
transformers (sliding windows, linear attention) keep all rows at one common slot and cannot be joined.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache

from seergate.cache.layer import GatedLayer
from seergate.errors import SeergateError


def rows_are_independent(cache: Cache) -> bool:
    """True if every layer is a `GatedLayer`, which has a length per row, so that `join_rows` works."""
    return bool(cache.layers) and all(isinstance(layer, GatedLayer) for layer in cache.layers)


def join_rows(cache: Cache, arriving: Cache) -> None:
    """Append the rows of ``arriving`` to ``cache``; the rows may differ in length.

    The batch then counts as left-padded to its longest row. ``arriving`` must not be used afterwards. Raises
    `SeergateError` if a layer of either cache is not gated.
    """
    if not (rows_are_independent(cache) and rows_are_independent(arriving)):
        raise SeergateError("only caches whose layers are all gated can be joined")
    for layer, other in zip(cache.layers, arriving.layers, strict=True):
        layer.append_rows(other)


def keep_rows(cache: Cache, rows: list[int]) -> None:
    """Keep only these rows, in the given order."""
    cache.batch_select_indices(torch.tensor(rows, dtype=torch.int64))


@contextmanager
def only_rows(cache: Cache, rows: list[int]) -> Iterator[None]:
    """Narrow the cache to some rows for the duration of a ``with`` block. Inside, the newest tokens of these rows may
    be cropped and stored again; the new keys and values are kept.

    The rows must have their old lengths again at the end, otherwise `SeergateError`. An exception restores all rows.
    """
    if not rows_are_independent(cache):
        raise SeergateError("only a cache whose layers are all gated can be narrowed to some of its rows")
    index = torch.tensor(rows, dtype=torch.int64)
    whole = [(layer.rows, layer.storage, layer.state and layer.state.rows) for layer in cache.layers]
    for layer in cache.layers:  # selecting replaces the tensors in these objects
        layer.rows, layer.storage = copy.copy(layer.rows), copy.copy(layer.storage)
    try:
        cache.batch_select_indices(index)
        yield
        for layer, (before, _, _) in zip(cache.layers, whole, strict=True):
            lengths = [before.resident[row] for row in rows]
            if layer.rows.resident != lengths:
                raise SeergateError(f"rows of {lengths} tokens were narrowed to, and now have {layer.rows.resident}")
        for layer, (_, storage, tensors) in zip(cache.layers, whole, strict=True):
            storage.write_back(layer.storage, index)
            for name, tensor in (layer.state.rows if layer.state is not None else {}).items():
                tensors[name][index.to(tensor.device)] = tensor
    finally:
        for layer, (before, storage, tensors) in zip(cache.layers, whole, strict=True):
            layer.rows, layer.storage = before, storage
            if layer.state is not None:
                layer.state.rows = tensors
