"""Decode attention: sparse and dense, contiguous and paged, against the reference, on caches poisoned where unread."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seergate import ops
from seergate.ops import reference
from seergate.ops.triton_impl import launch
from tests.ops.triton.conftest import moved
from tests.support.op_inputs import LAYOUTS, decode_inputs, grid, in_layout, poison, relative
from tests.support.op_inputs import in_pages as paged

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
F32, F16 = TOLERANCE


@pytest.fixture(params=["few long splits", "many short splits"])
def splits(request, monkeypatch):
    """One program per row and head, or one per tile of the smallest size."""
    if request.param == "many short splits":
        monkeypatch.setattr(launch, "MIN_TILES", 1)
        monkeypatch.setattr(launch, "STAGE_BYTES", 1024)
    else:
        monkeypatch.setattr(launch, "MAX_SPLITS", 1)


def cache(batch=2, kv_heads=2, group=2, capacity=100, dim=64, value_dim=None, dtype=torch.float32):
    return decode_inputs(batch, kv_heads, group, capacity, dim, value_dim, dtype)


def choose(lengths, kv_heads, block_size, blocks, capacity, some=None):
    """Random blocks; ``some[b][h]`` of them if given, otherwise ``blocks``."""
    indices = torch.full((len(lengths), kv_heads, blocks), -1, dtype=torch.int32)
    for b, length in enumerate(lengths.tolist()):
        for h in range(kv_heads):
            block_count = -(-length // block_size)
            count = min(block_count, blocks if some is None else some[b][h])
            indices[b, h, :count] = torch.randperm(block_count)[:count].sort().values
    return indices


def check(op, device, exact, stored, *where, **options):
    """An op on the device, with keys and values as they are ``stored``, against its reference in float64, which gets
    the ``exact`` queries, keys and values and no ``page_table``. Returns the output.
    """
    q, own = exact[0], {name: x for name, x in options.items() if name != "page_table"}
    want = getattr(reference, op)(*(x.double() for x in exact), *moved(where, "cpu"), **moved(own, "cpu"))
    got = getattr(ops, op)(*moved((q, *stored, *where), device), **moved(options, device))
    assert got.dtype == q.dtype and got.shape == want.shape
    assert relative(got.cpu(), want) < TOLERANCE[q.dtype]
    return got


@pytest.mark.parametrize(
    ("group", "dtype"),
    grid([(1, F32), (4, F16), (5, F32), (7, F16), (8, F32), (17, F16)], [1, 4, 5, 7, 8, 17], TOLERANCE),
    ids=str,
)
def test_sparse_equals_reference(group, dtype, splits, device):
    lengths = torch.tensor([1, 97])
    qkv, indices = cache(group=group, dtype=dtype), choose(lengths, 2, 16, 5, 100)
    stored = [poison(x, lengths, indices, 16) for x in qkv[1:]]
    for options in ({}, {"softcap": 3.0, "sinks": torch.randn(2 * group)}):
        check("sparse_decode", device, qkv, stored, indices, lengths, 16, **options)


@pytest.mark.parametrize(
    ("block_size", "dims", "dtype"),
    grid(
        [
            (16, (64, 64), F32), (16, (96, 96), F16), (64, (128, 128), F32), (64, (256, 256), F16),
            (24, (80, 48), F16), (128, (64, 64), F16), (64, (96, 96), F32),
        ],
        [16, 24, 64, 128],
        [(64, 64), (80, 48), (96, 96), (128, 128), (256, 256)],
        TOLERANCE,
    ),
    ids=str,
)  # fmt: skip
def test_dimensions_and_block_sizes(block_size, dims, dtype, splits, device):
    lengths = torch.tensor([200])
    qkv, indices = cache(1, 1, 2, 230, *dims, dtype), choose(lengths, 1, block_size, 2, 230)
    indices[..., -1] = 199 // block_size
    stored = [poison(x, lengths, indices, block_size) for x in qkv[1:]]
    check("sparse_decode", device, qkv, stored, indices, lengths, block_size)


@pytest.mark.parametrize(("block_size", "dtype"), grid([(16, F32), (64, F16)], [16, 64], TOLERANCE), ids=str)
def test_counts_of_none_one_and_all(block_size, dtype, splits, device):
    lengths = torch.tensor([150, 129])
    qkv, indices = cache(2, 2, 4, 150, dtype=dtype), choose(lengths, 2, block_size, 10, 150, some=[[0, 10], [1, 2]])
    stored = [poison(x, lengths, indices, block_size) for x in qkv[1:]]
    for sinks in (None, torch.randn(8)):
        got = check("sparse_decode", device, qkv, stored, indices, lengths, block_size, sinks=sinks)
        assert not got[0, :4].any()
    assert not ops.sparse_decode(*moved((qkv[0], *stored, indices[..., :0], lengths), device), block_size).any()


def test_the_counts_of_a_selection_change_nothing(splits, device):
    qkv, lengths = moved(cache(2, 2, 4, 150, dtype=F16), device), torch.tensor([150, 17], device=device)
    for rule in ({"token_budget": 64}, {"threshold": 0.1}):
        chosen = ops.select_blocks(torch.randn(2, 2, 10, device=device), lengths, block_size=16, **rule)
        want = ops.sparse_decode(*qkv, chosen.indices, lengths, 16)
        assert torch.equal(ops.sparse_decode(*qkv, chosen.indices, lengths, 16, counts=chosen.counts), want)


def test_blocks_beyond_the_length_are_passed_over(splits, device):
    qkv, lengths, read = cache(1, 2, 2, 96), torch.tensor([40]), torch.tensor([[[0, 1], [2, -1]]])
    stored = [poison(x, lengths, read, 16) for x in qkv[1:]]
    check("sparse_decode", device, qkv, stored, torch.tensor([[[0, 1, 3, 5], [2, 4, 5, -1]]]), lengths, 16)


@pytest.mark.parametrize(
    ("lengths", "dtype"),
    grid([(None, F16), ((100, 100), F32), ((1, 67), F16)], [None, (100, 100), (1, 67)], TOLERANCE),
    ids=str,
)
def test_dense_equals_reference(lengths, dtype, splits, device):
    lengths = None if lengths is None else torch.tensor(lengths)
    qkv = cache(group=5, dtype=dtype, dim=96)
    stored = qkv[1:] if lengths is None else [poison(x, lengths) for x in qkv[1:]]
    for options in ({}, {"sinks": torch.randn(10), "softcap": 4.0}):
        check("dense_decode", device, qkv, stored, lengths, **options)


SIZES = {(16, 16): F32, (128, 64): F16, (64, 32): F16, (48, 24): F32}
"""Of a page and a block, each with a quick dtype."""


@pytest.mark.parametrize(("sizes", "dtype"), grid(SIZES.items(), SIZES, TOLERANCE), ids=str)
def test_paged(sizes, dtype, splits, device):
    page, block_size = sizes
    lengths = torch.tensor([129, 40])
    qkv, indices = cache(2, 2, 4, 144, dtype=dtype), choose(lengths, 2, block_size, 3, 144)
    needed = -(-144 // page)
    table = torch.randperm(2 * needed + 3)[: 2 * needed].view(2, needed).int()
    sparse = [paged(poison(x, lengths, indices, block_size), page, table, 2 * needed + 3) for x in qkv[1:]]
    check("sparse_decode", device, qkv, sparse, indices, lengths, block_size, page_table=table)
    dense = [paged(poison(x, lengths), page, table, 2 * needed + 3) for x in qkv[1:]]
    check("dense_decode", device, qkv, dense, lengths, page_table=table)


@settings(max_examples=8)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    block_size=st.sampled_from([8, 16, 20, 32, 64]),
    capacity=st.integers(1, 150),
    dims=st.sampled_from([(16, 16), (20, 12), (64, 64)]),
    layout=st.sampled_from(LAYOUTS),
    fewest=st.sampled_from([1, 4]),
    data=st.data(),
)
def test_any_shape_and_layout(batch, kv_heads, group, block_size, capacity, dims, layout, fewest, data):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, capacity), min_size=batch, max_size=batch)))
    qkv = cache(batch, kv_heads, group, capacity, *dims)
    indices = choose(lengths, kv_heads, block_size, data.draw(st.integers(1, 8)), capacity)
    stored = [in_layout(poison(x, lengths, indices, block_size).to(device), layout) for x in qkv[1:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "MIN_TILES", fewest)
        check("sparse_decode", device, qkv, stored, indices, lengths, block_size)


@pytest.mark.plain_empty
@pytest.mark.parametrize("where", ["rows", "tokens", "pages"])
def test_offsets_beyond_32_bits(where, splits, device):
    """A cache that spans more than 2^31 elements, of which few are touched."""
    far = 2**31 + 64
    size = {"rows": (2, 1, 64, 16), "tokens": (1, 1, 64 * 3, 16), "pages": (2, 1, 64, 16)}[where]
    buffer = torch.empty(2 * far, dtype=torch.float16, device=device)
    step = far // (size[2] - 64) if where == "tokens" else 16
    k = buffer.as_strided(size, (far, 1024, step, 1))
    k.copy_(torch.randn(size))
    q = torch.randn(size[0], 2, 16).half()
    lengths = torch.full((size[0],), size[2])
    indices = torch.tensor([[[size[2] // 64 - 1]]] * size[0])
    options = {"page_table": torch.tensor([[1], [0]])} if where == "pages" else {}
    near = k.cpu().contiguous().flip(0) if options else k.cpu().contiguous()
    check("sparse_decode", device, (q, near, near), (k, k), indices, lengths, 64, **options)


def test_arguments_of_any_layout(splits, device):
    """Lengths that are one number repeated, every second sink, a transposed page table, indices with heads last."""
    qkv, lengths = cache(2, 2, 2, 96), torch.tensor(70, device=device).expand(2)
    table = torch.tensor([[0, 2, 4], [5, 3, 1]], device=device).T.contiguous().T
    indices = choose(lengths.cpu(), 2, 16, 3, 96).to(device).transpose(1, 2).contiguous().transpose(1, 2)
    pages = [paged(x, 32, table.cpu(), 6) for x in qkv[1:]]
    sinks = torch.randn(8, device=device)[::2]
    check("sparse_decode", device, qkv, pages, indices, lengths, 16, sinks=sinks, page_table=table)


def test_large_scores(splits, device):
    """Scores far beyond what exp2 of fp32 can hold."""
    (q, k, v), lengths = cache(1, 1, 4, 150), torch.tensor([150])
    q *= 1000
    want = reference.dense_decode(q.double(), k.double(), v.double(), lengths)
    got = ops.dense_decode(*(x.to(device) for x in (q, k, v, lengths)))
    torch.testing.assert_close(got.cpu().double(), want, atol=2e-4, rtol=2e-3)


def test_empty_batch(device):
    q, k, v = (x.to(device) for x in cache(0))
    none = torch.zeros(0, device=device).long()
    assert ops.dense_decode(q, k, v, none).shape == (0, 4, 64)
    assert ops.sparse_decode(q, k, v, none.view(0, 2, 0), none, 16).shape == (0, 4, 64)
