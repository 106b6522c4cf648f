"""Block-sparse decode attention against the reference, dense attention, and poisoned caches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seergate import ops
from seergate.ops import reference
from seergate.ops.torch_impl import decode as torch_impl
from tests.support.op_inputs import INTERPRETING, LAYOUTS, WIDE, examples, in_layout, poison, relative
from tests.support.op_inputs import decode_inputs as cache

BOTH = pytest.mark.parametrize(
    "sparse_decode", [reference.sparse_decode, ops.sparse_decode], ids=["reference", "torch"]
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def choose(lengths, kv_heads, block_size, budget, capacity):
    scores = torch.randn(len(lengths), kv_heads, -(-capacity // block_size))
    return ops.select_blocks(scores, lengths, block_size=block_size, token_budget=budget).indices


@BOTH
def test_by_hand(sparse_decode):
    # Blocks of two tokens, block 1 left out; scores 0 and ln 3 in block 0, ln 4 for the one token of block 2.
    k = torch.tensor([1.0, 3.0, 99.0, 99.0, 4.0, 99.0]).log()[None, None, :, None].to(WIDE)
    v = torch.tensor([8.0, 16.0, 0.0, 0.0, -8.0, 1e9])[None, None, :, None].to(WIDE)
    q = torch.ones(1, 1, 1, dtype=WIDE)
    for sinks, total in ((None, 8), (torch.tensor([8.0]).log().to(WIDE), 16)):
        out = sparse_decode(q, k, v, torch.tensor([[[0, 2, -1]]]), torch.tensor([5]), 2, 1.0, sinks=sinks)
        assert out.item() == pytest.approx((1 * 8 + 3 * 16 - 4 * 8) / total)


@BOTH
def test_softcap_by_hand(sparse_decode):
    k = torch.tensor([0.0, 5.0])[None, None, :, None].to(WIDE)
    v = torch.tensor([0.0, 1.0])[None, None, :, None].to(WIDE)
    q = torch.ones(1, 1, 1, dtype=WIDE)
    out = sparse_decode(q, k, v, torch.tensor([[[0]]]), torch.tensor([2]), 2, 1.0, softcap=2.0)
    assert out.item() == pytest.approx(torch.sigmoid(torch.tensor(2 * math.tanh(2.5))).item())


@BOTH
def test_query_head_h_belongs_to_kv_head_h_div_group(sparse_decode):
    q, k, v = cache(batch=1, kv_heads=2, group=3, capacity=4)
    v = torch.tensor([1.0, 2.0], dtype=WIDE)[None, :, None, None].expand(1, 2, 4, 1)
    out = sparse_decode(q, k, v, torch.tensor([[[0], [0]]]), torch.tensor([4]), 4)
    torch.testing.assert_close(out[0, :, 0], torch.tensor([1.0, 1, 1, 2, 2, 2], dtype=WIDE))


@examples(150)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 5, 7, 8]),
    block_size=st.integers(1, 9),
    capacity=st.integers(1, 40),
    same_length=st.booleans(),
    dims=st.sampled_from([(8, 8), (4, 8), (6, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float16] if INTERPRETING else list(TOLERANCE)),
    pairs_per_chunk=st.integers(0, 10),
    layout=st.sampled_from(LAYOUTS),
    extras=st.sampled_from([(), ("sinks",), ("softcap",), ("sinks", "softcap")]),
    data=st.data(),
)
def test_equals_reference_and_never_reads_the_rest(
    batch, kv_heads, group, block_size, capacity, same_length, dims, dtype, pairs_per_chunk, layout, extras, data
):
    """However few tokens are gathered at a time."""
    exact = q, k, v = cache(batch, kv_heads, group, capacity, *dims, dtype)
    ends = data.draw(st.lists(st.integers(1, capacity), min_size=batch, max_size=batch))
    lengths = torch.tensor([ends[0]] * batch if same_length else ends)
    budget = data.draw(st.integers(block_size, block_size + capacity))
    indices = choose(lengths, kv_heads, block_size, budget, capacity)
    given = {"sinks": torch.randn(q.shape[1]), "softcap": 3.0}
    options = {name: given[name] for name in extras}
    want = reference.sparse_decode(*(x.double() for x in exact), indices, lengths, block_size, **options)
    k, v = (in_layout(poison(x, lengths, indices, block_size), layout) for x in (k, v))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "GATHER_BYTES_CPU", pairs_per_chunk * budget * dims[0] * k.element_size())
        got = ops.sparse_decode(q, k, v, indices, lengths, block_size, **options)
    assert got.dtype == dtype and relative(got, want) < TOLERANCE[dtype]


def test_budget_that_covers_everything_is_dense_attention():
    q, k, v = cache(batch=1, kv_heads=2, group=3, capacity=40)
    for length in (1, 7, 8, 9, 40):
        lengths = torch.tensor([length])
        indices = choose(lengths, 2, 8, 1000, 40)
        near = q[:, :, None], k[:, :, :length], v[:, :, :length]
        dense = torch.nn.functional.scaled_dot_product_attention(*near, enable_gqa=True)[:, :, 0]
        torch.testing.assert_close(ops.sparse_decode(q, k, v, indices, lengths, 8), dense)


@BOTH
@pytest.mark.parametrize("extras", [{}, {"sinks": torch.zeros(4)}], ids=["plain", "sinks"])
def test_a_head_without_blocks_gives_zero(sparse_decode, extras):
    q, k, v = cache(batch=1, capacity=16)
    k[:], v[:, 0] = math.nan, math.nan
    k[:, 1, 8:] = 0.0
    indices = torch.tensor([[[-1, -1], [1, -1]]])
    out = sparse_decode(q, k, v, indices, torch.tensor([16]), 8, **extras)
    assert not out[:, :2].any() and out[:, 2:].isfinite().all() and out[:, 2:].any()
    for none in (torch.full((1, 2, 2), -1), torch.zeros(1, 2, 0, dtype=torch.int32)):
        assert not sparse_decode(q, k, v, none, torch.tensor([16]), 8, **extras).any()


@BOTH
def test_blocks_beyond_the_length_are_passed_over(sparse_decode):
    q, k, v = cache(batch=1, capacity=24)
    lengths, honest = torch.tensor([10]), torch.tensor([[[0, 1], [1, -1]]])
    want = sparse_decode(q, k, v, honest, lengths, 8)
    k[:, :, 10:], v[:, :, 10:] = math.nan, math.nan
    stale = torch.tensor([[[0, 1, 2], [1, 2, -1]]])
    torch.testing.assert_close(sparse_decode(q, k, v, stale, lengths, 8), want)
