"""A paged cache stands for the contiguous one: the same attention, whatever the pages' order, and clear refusals."""

from __future__ import annotations

import math

import pytest
import torch

from seergate import ops
from seergate.ops import reference

SPARSE = pytest.mark.parametrize(
    "sparse_decode", [reference.sparse_decode, ops.sparse_decode], ids=["reference", "torch"]
)
DENSE = pytest.mark.parametrize("dense_decode", [reference.dense_decode, ops.dense_decode], ids=["reference", "torch"])
LENGTHS = torch.tensor([24, 17])


def caches(page=8):
    """A cache ``[2, 2, 24, 4]``, and the same in pages; two pages are nobody's."""
    cache = torch.randn(2, 2, 24, 4).double()
    table = torch.randperm(2 * (24 // page) + 2)[: 2 * (24 // page)].view(2, -1).int()
    pages = torch.full((2 * (24 // page) + 2, 2, page, 4), math.nan).double()
    for b in range(2):
        for p, number in enumerate(table[b].tolist()):
            pages[number] = cache[b, :, p * page : (p + 1) * page]
    return cache, pages, table


@SPARSE
@pytest.mark.parametrize("page", [4, 8, 24])
def test_sparse(sparse_decode, page):
    q, (cache, pages, table) = torch.randn(2, 4, 4).double(), caches(page)
    indices = torch.tensor([[[0, 3, 5], [5, -1, -1]], [[1, 2, 4], [0, 4, -1]]])
    want = reference.sparse_decode(q, cache, cache, indices, LENGTHS, 4)
    torch.testing.assert_close(sparse_decode(q, pages, pages, indices, LENGTHS, 4, page_table=table), want)


@DENSE
def test_dense(dense_decode):
    q, (cache, pages, table) = torch.randn(2, 4, 4).double(), caches()
    for lengths in (None, LENGTHS):
        want = reference.dense_decode(q, cache, cache, lengths)
        torch.testing.assert_close(dense_decode(q, pages, pages, lengths, page_table=table), want)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(2, 3), "page_table is torch.float32; it must be an int32 tensor"),
        (torch.zeros(3, 3).int(), r"page_table has shape \[3, 3\]; it must be \[2, P\]"),
        (torch.full((2, 3), 8).int(), "page_table has pages 8 to 8; each must be in 0..7"),
    ],
)
def test_refused(table, message):
    q, (_, pages, _) = torch.randn(2, 4, 4).double(), caches()
    with pytest.raises(ValueError, match=message):
        ops.dense_decode(q, pages, pages, page_table=table)


def test_pages_hold_whole_blocks():
    q, (_, pages, table) = torch.randn(2, 4, 4).double(), caches()
    with pytest.raises(ValueError, match="k has pages of 8 tokens; it must have a multiple of block_size, 16"):
        ops.sparse_decode(q, pages, pages, torch.zeros(2, 2, 1).int(), LENGTHS, 16, page_table=table)


def test_length_beyond_the_table():
    q, (_, pages, table) = torch.randn(2, 4, 4).double(), caches()
    with pytest.raises(ValueError, match=r"lengths is \[25, 1\]; each must be in 1..24"):
        ops.dense_decode(q, pages, pages, torch.tensor([25, 1]), page_table=table)
