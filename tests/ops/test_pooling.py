"""Key pooling against the worked example, the reference, and poisoned memory."""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seergate import ops
from seergate.ops import reference
from tests.support.op_inputs import grid

BOTH = pytest.mark.parametrize("pool_keys", [reference.pool_keys, ops.pool_keys], ids=["reference", "torch"])
ALL = ("max", "min", "avg")


@BOTH
def test_worked_examples(pool_keys):
    """A full block, a last block with fewer tokens, and rows of different lengths."""
    k = torch.tensor([[1.0, -2.0], [3.0, 0.0]])[None, None]
    assert pool_keys(k, 2, ALL).tolist() == [[[[3, 0, 1, -2, 2, -1]]]]
    assert pool_keys(k, 2, ("avg", "max")).tolist() == [[[[2, -1, 3, 0]]]]
    k = torch.tensor([1.0, 3.0, -5.0, 7.0]).expand(2, 1, 4)[..., None]
    assert pool_keys(k[:1, :, :3], 2, ALL).tolist() == [[[[3, 1, 2], [-5, -5, -5]]]]
    pooled = pool_keys(k, 2, ALL, torch.tensor([3, 1]))
    assert pooled.tolist() == [[[[3, 1, 2], [-5, -5, -5]]], [[[1, 1, 1], [0, 0, 0]]]]


KINDS = [kinds for n in (1, 2, 3) for kinds in permutations(ALL, n)]


@given(
    capacity=st.integers(0, 40),
    block_size=st.integers(1, 17),
    kinds=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_equals_reference_with_and_without_lengths(capacity, block_size, kinds, dtype, data):
    lengths = data.draw(st.none() | st.lists(st.integers(0, capacity), min_size=3, max_size=3))
    lengths = None if lengths is None else torch.tensor(lengths)
    k = torch.randn(3, 2, capacity, 5).to(dtype)
    got, want = (op(k, block_size, kinds, lengths) for op in (ops.pool_keys, reference.pool_keys))
    assert got.dtype == dtype
    # Maxima and minima are exact; a mean may be summed in another order, in fp32.
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)
    if "avg" not in kinds:
        assert torch.equal(got, want)


@BOTH
def test_garbage_beyond_the_length_never_leaks(pool_keys):
    k, lengths = torch.randn(4, 2, 24, 3), torch.tensor([0, 5, 8, 24])
    clean = pool_keys(k, 8, ALL, lengths)
    for garbage in (torch.nan, torch.inf, -torch.inf):
        dirty = k.clone()
        for row, length in enumerate(lengths):
            dirty[row, :, length:] = garbage
        assert torch.equal(pool_keys(dirty, 8, ALL, lengths), clean)


def test_means_are_accumulated_in_fp32():
    # 256 + 63 * 1 in bf16 steps stays 256: the sum would stall at a power of two.
    k = torch.ones(1, 1, 64, 1, dtype=torch.bfloat16)
    k[0, 0, 0] = 256
    want = torch.tensor(319 / 64).bfloat16().item()
    assert ops.pool_keys(k, 64, ("avg",)).item() == want
    assert ops.pool_keys(k, 64, ("avg",), torch.tensor([64])).item() == want


@pytest.mark.parametrize(
    ("block_size", "dim", "dtype"),
    grid(
        [(8, 128, torch.float32), (17, 5, torch.bfloat16), (17, 16, torch.float32), (64, 5, torch.float32)],
        [8, 17, 64],
        [5, 16, 128],
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
def test_a_block_is_pooled_alike_bit_for_bit_wherever_it_stands(block_size, dim, dtype):
    """Prefill pools many blocks of a transposed projection, decode pools one: their selections must not differ."""
    k = torch.randn(2, 2, 5 * block_size, dim).to(dtype)
    want = ops.pool_keys(k, block_size, ALL)
    heads_last = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(ops.pool_keys(heads_last, block_size, ALL), want)
    assert torch.equal(ops.pool_keys(heads_last, block_size, ALL, torch.tensor([5 * block_size] * 2)), want)
    for block in (0, 2, 4):
        some = k[1:, :, block * block_size : (block + 1) * block_size]
        assert torch.equal(ops.pool_keys(some, block_size, ALL), want[1:, :, block : block + 1])
