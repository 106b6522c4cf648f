"""The K-compression cache's decode step against the reference, against pooling a whole prompt, in poisoned memory."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seergate import ops
from seergate.ops import reference
from seergate.ops.gate_math import Branch, compressed_keys

ALL = ("max", "min", "avg")
KINDS = [kinds for n in (1, 2, 3) for kinds in permutations(ALL, n)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def branch(kv_heads, dim, width, kinds=ALL, norm=True, rope=True, dtype=torch.float32):
    """Weights of a key branch."""
    return {
        "weight": (torch.randn(kv_heads, len(kinds) * dim, width) / math.sqrt(dim)).to(dtype),
        "kinds": kinds,
        "norm_weight": torch.rand(width).to(dtype) + 0.5 if norm else None,
        "inv_freq": 100.0 ** -torch.linspace(0, 1, width // 2) if rope else None,
        "attention_scaling": 1.2 if rope else 1.0,
    }


def caches(lengths, kv_heads, dim, block_size, width, blocks, turns=2, dtype=torch.float32, wide=None):
    """Ring and compressed keys, NaN wherever nothing may be read."""
    recent = torch.full((len(lengths), kv_heads, turns * block_size, dim), math.nan, dtype=dtype)
    for row, length in enumerate(lengths):
        if length % block_size == 0:
            slots = torch.arange(length - block_size, length - 1) % recent.shape[2]
            recent[row, :, slots] = torch.randn(kv_heads, block_size - 1, dim).to(dtype)
    return recent, torch.full((len(lengths), kv_heads, blocks, width), math.nan, dtype=wide or dtype)


def same(got, want):
    assert torch.equal(got.isnan(), want.isnan()), "what was to stay as it is has changed"
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def check(lengths, options, block_size, blocks, turns, dtype):
    """A step's new keys in rows of these lengths, against the reference with the gates in float64."""
    (kv_heads, columns, width), ends = options["weight"].shape, torch.tensor(lengths, dtype=torch.int64)
    k = torch.randn(len(lengths), kv_heads, columns // len(options["kinds"])).to(dtype)
    sizes = *k.shape[1:], block_size, width, blocks, turns
    recent, compressed = caches(lengths, *sizes, dtype, options["weight"].dtype)
    want = recent.clone(), compressed.to(torch.float64, copy=True)
    exact = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    reference.update_compressed_keys(k, ends, *want, block_size=block_size, **exact)
    ops.update_compressed_keys(k, ends, recent, compressed, block_size=block_size, **options)
    assert torch.equal(recent.nan_to_num(0), want[0].nan_to_num(0))
    same(compressed, want[1])


@given(
    kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 8, 16, 17, 64]),
    dim=st.sampled_from([1, 5, 16, 40, 64]),
    width=st.sampled_from([2, 6, 16, 34]),
    kinds=st.sampled_from(KINDS),
    norm=st.booleans(),
    rope=st.booleans(),
    turns=st.integers(1, 3),
    offset=st.integers(0, 16),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]),
    data=st.data(),
)
def test_equals_reference(kv_heads, block_size, dim, width, kinds, norm, rope, turns, offset, dtype, data):
    """In a batch of none to four rows."""
    lengths = data.draw(st.lists(st.integers(1, 4 * block_size), max_size=3))
    if lengths:
        lengths += [block_size * data.draw(st.integers(1, 4))]
    options = branch(kv_heads, dim, width, kinds, norm, rope, dtype) | {"position_offset": offset}
    check(lengths, options, block_size, 4, turns, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_keys_and_gates_of_different_dtypes(dtype):
    """A bf16 model with fp32 gates, and the other way round."""
    check([16, 5, 8], branch(2, 16, 8), 8, 2, 2, dtype)
    check([16, 5, 8], branch(2, 16, 8, dtype=dtype), 8, 2, 2, torch.float32)


@pytest.mark.parametrize(("block_size", "width"), [(8, 7), (17, 12)])
def test_token_by_token_gives_what_a_prompt_gives(block_size, width):
    """Rows that begin at different times; the last blocks stay open."""
    total, heads, dim = 3 * block_size + 3, 2, 12
    keys = torch.randn(3, heads, total, dim)
    options = branch(heads, dim, width, rope=width % 2 == 0)
    recent, compressed = caches([1, 1, 1], heads, dim, block_size, width, 4)
    starts = torch.tensor([0, 5, block_size])
    for step in range(total):
        lengths = (step + 1 - starts).clamp(min=1)
        k = keys[torch.arange(3), :, lengths - 1]
        ops.update_compressed_keys(k, lengths, recent, compressed, block_size=block_size, **options)
    pooled = ops.pool_keys(keys, block_size, ALL)
    positions = torch.arange(4) * block_size
    want = compressed_keys(pooled, Branch(**{name: options[name] for name in Branch._fields}), positions)
    for row, start in enumerate(starts.tolist()):
        complete = (total - start) // block_size
        torch.testing.assert_close(compressed[row, :, :complete], want[row, :, :complete], rtol=1e-5, atol=1e-5)
        assert compressed[row, :, complete:].isnan().all()


@pytest.mark.parametrize("block", [1, 1024, 2**17 - 1])
def test_far_positions(block):
    """Angles of a hundred thousand turns: fp32 as torch has it, to the last bits of the angle."""
    options = branch(1, 16, 16, norm=False)
    recent, _ = caches([8], 1, 16, 8, 16, 1)
    k = torch.randn(1, 1, 16)
    compressed = torch.zeros(1, 1, block + 1, 16)
    ring, ends = recent.roll(8 * (block % 2), dims=2), torch.tensor([8 * (block + 1)])
    ops.update_compressed_keys(k, ends, ring, compressed, block_size=8, **options)
    keys = torch.cat((recent[:, :, :7], k[:, :, None]), dim=2)
    end = Branch(options["weight"], None, options["inv_freq"], 1.2)
    want = compressed_keys(ops.pool_keys(keys, 8, ALL), end, torch.tensor([8 * block]))
    torch.testing.assert_close(compressed[:, :, block:], want, rtol=1e-5, atol=1e-5)
    assert not compressed[:, :, :block].any()


def test_any_layout():
    """Heads last, every second row, weights transposed: nothing is assumed to be contiguous."""
    options = branch(2, 16, 8)
    lengths = [16, 3]
    recent, compressed = caches(lengths, 2, 16, 8, 8, 3)
    k = torch.randn(2, 2, 16)
    want = recent.clone(), compressed.clone()
    ops.update_compressed_keys(k, torch.tensor(lengths), *want, block_size=8, **options)
    for_heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (recent, compressed)]
    options["weight"] = options["weight"].transpose(1, 2).contiguous().transpose(1, 2)
    k = torch.stack((k, torch.full_like(k, math.nan)), dim=-1)[..., 0]
    lengths = torch.tensor([16, 0, 3, 0])[::2]
    ops.update_compressed_keys(k, lengths, *for_heads_last, block_size=8, **options)
    for got, expected in zip(for_heads_last, want, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_gradients_do_not_flow():
    options = branch(1, 16, 8)
    options["weight"].requires_grad_()
    options["norm_weight"].requires_grad_()
    (recent, compressed), k = caches([8], 1, 16, 8, 8, 1), torch.randn(1, 1, 16, requires_grad=True)
    ops.update_compressed_keys(k, torch.tensor([8]), recent, compressed, block_size=8, **options)
    assert not compressed.requires_grad and compressed.isfinite().all()
