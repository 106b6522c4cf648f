"""A paged cache stands for the contiguous one: the same attention, whatever the pages' order, and clear refusals."""

import pytest
import torch

from seergate import ops
from seergate.ops import reference
from tests.support.op_inputs import in_pages, poison

LENGTHS = torch.tensor([24, 17])


def caches(page=8):
    """A cache ``[2, 2, 24, 4]``, and the same in pages; two pages are nobody's."""
    cache = torch.randn(2, 2, 24, 4).double()
    table = torch.randperm(2 * (24 // page) + 2)[: 2 * (24 // page)].view(2, -1).int()
    return cache, in_pages(cache, page, table, 2 * (24 // page) + 2), table


@pytest.mark.parametrize("run", [reference, ops], ids=["reference", "torch"])
@pytest.mark.parametrize("page", [4, 8, 24])
def test_sparse_and_dense(run, page):
    q, (cache, pages, table) = torch.randn(2, 4, 4).double(), caches(page)
    indices = torch.tensor([[[0, 3, 5], [5, -1, -1]], [[1, 2, 4], [0, 4, -1]]])
    want = reference.sparse_decode(q, cache, cache, indices, LENGTHS, 4)
    torch.testing.assert_close(run.sparse_decode(q, pages, pages, indices, LENGTHS, 4, page_table=table), want)
    for lengths in (None, LENGTHS):
        want = reference.dense_decode(q, cache, cache, lengths)
        torch.testing.assert_close(run.dense_decode(q, pages, pages, lengths, page_table=table), want)


@pytest.mark.parametrize(
    ("dtype", "group", "lengths"),
    [
        (torch.float32, 1, [300, 300]),
        (torch.float32, 5, [300, 17]),
        (torch.float32, 8, [1, 16]),
        (torch.bfloat16, 4, [33, 299]),
        (torch.bfloat16, 7, [300, 17]),
    ],
)
def test_pages_are_the_contiguous_cache_to_the_last_bit(dtype, group, lengths):
    """Where the keys lie changes no rounding; blocks smaller than a page, and as large."""
    q, ends = torch.randn(2, 3 * group, 16).to(dtype), torch.tensor(lengths)
    cache = torch.randn(2, 2, 3, 19 * 16, 16).to(dtype)
    table = torch.randperm(40)[:38].view(2, 19)
    pages = [in_pages(x, 16, table, 40) for x in cache]
    for block in (4, 16):
        scores = torch.randn(2, 3, -(-300 // block))
        chosen = ops.select_blocks(scores, ends, block_size=block, token_budget=3 * block)
        paged = ops.sparse_decode(q, *pages, chosen.indices, ends, block, page_table=table)
        assert torch.equal(paged, ops.sparse_decode(q, *cache, chosen.indices, ends, block))
    assert torch.equal(ops.dense_decode(q, *pages, ends, page_table=table), ops.dense_decode(q, *cache, ends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[24, 24], [24, 17], [3, 9]])
def test_only_the_selected_blocks_of_pages_are_read(dtype, lengths):
    """NaN in every other block, and beyond each row's length."""
    q, ends = torch.randn(2, 4, 4).to(dtype), torch.tensor(lengths)
    cache, _, table = caches()
    chosen = ops.select_blocks(torch.randn(2, 2, 6), ends, block_size=4, token_budget=8).indices
    pages = in_pages(poison(cache.to(dtype), ends, chosen, 4), 8, table, 8)
    want = reference.sparse_decode(q.double(), cache.to(dtype).double(), cache.to(dtype).double(), chosen, ends, 4)
    got = ops.sparse_decode(q, pages, pages, chosen, ends, 4, page_table=table)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
