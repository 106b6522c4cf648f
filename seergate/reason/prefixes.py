"""Rows of a batch that begin alike share the pages of that beginning.

`num_return_sequences` and repeated sampling put the same prompt into several rows. Pages are shared only if they are
equal to the last bit, so no output changes: the same row computed at another place of the batch may round differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seergate.reason.paged_layer import CachePages

Prompt = tuple[tuple[int, ...], Tensor, tuple[int, ...]]
"""Numbers of the rows, ids ``[B, S]`` (each row's first), and how many of them are the row's."""


def share_prefixes(pages: CachePages, prompt: Prompt) -> int:
    """Let each full page be that of the first row that begins with the same tokens up to its end.

    Returns:
        How many pages were given back.
    """
    (uids, ids, counts), store, size = prompt, pages.store, pages.store.block_size
    if tuple(row.uid for row in store.rows) != uids:
        return 0
    known: dict[tuple[int, ...], int] = {}
    shared = 0
    for position, (tokens, count) in enumerate(zip(ids.tolist(), counts, strict=True)):
        row = store.rows[position]
        for block in range(min(count // size, row.sealed)):
            begins, own = tuple(tokens[: (block + 1) * size]), row.table[block]
            physical = known.setdefault(begins, own)
            if physical == own:
                continue
            if not _equal(pages, own, physical):
                break
            pages.remap(position, block, physical, like=None)
            shared += 1
    return shared


def _equal(pages: CachePages, a: int, b: int) -> bool:
    return all(
        torch.equal(buffer[a], buffer[b])
        for layer in pages.layers
        for buffer in (layer.key_pages, layer.value_pages)
        if buffer is not None
    )
