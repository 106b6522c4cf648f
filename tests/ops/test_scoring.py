"""Scores of a decode step's query against the reference, in poisoned memory."""

import math

import pytest
import torch

from seergate import ops
from seergate.ops import reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def step(lengths, group, dim, width, blocks, block_size, dtype, norm=True, rope=True, kv_heads=2, queries=1):
    """Arguments of a step; the compressed keys of blocks that are not complete are NaN. A KV head has ``queries`` gate
    queries, each from ``group`` query heads.
    """
    compressed = torch.full((len(lengths), kv_heads, blocks, width), math.nan, dtype=dtype)
    for row, length in enumerate(lengths):
        compressed[row, :, : length // block_size] = torch.randn(kv_heads, length // block_size, width).to(dtype)
    weight = torch.randn(kv_heads * queries, group, dim, width) / math.sqrt(group * dim)
    tensors = {
        "q": torch.randn(len(lengths), kv_heads * queries * group, dim).to(dtype),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "compressed": compressed,
        "weight": weight.to(dtype),
        "norm_weight": (torch.rand(width) + 0.5).to(dtype) if norm else None,
        "inv_freq": 100.0 ** -torch.linspace(0, 1, width // 2) if rope else None,
    }
    return tensors | {"block_size": block_size, "attention_scaling": 1.2 if rope else 1.0}


def check(step, dtype):
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in step.items()}
    got, want = ops.score_blocks(**step), reference.score_blocks(**wide)
    assert got.dtype == torch.promote_types(dtype, torch.float32) and got.shape == want.shape
    for row, length in enumerate(step["lengths"].tolist()):
        complete = min(length // step["block_size"], want.shape[2])
        ours, theirs = (x[row, :, :complete].double() for x in (got, want))
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


SHAPES = [
    (1, 16, 16, torch.float64), (4, 32, 32, torch.float32), (5, 40, 34, torch.float16), (7, 5, 6, torch.float32),
    (8, 16, 64, torch.float32), (4, 64, 64, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("group", "dim", "width", "dtype", "parts"),
    [(*shape, (True, True)) for shape in SHAPES]
    + [(*SHAPES[3], parts) for parts in ((False, True), (True, False), (False, False))],
)
def test_equals_reference(group, dim, width, dtype, parts):
    lengths = [1, 8, 63, 64, 65, 7]
    check(step(lengths, group, dim, width, 9, 8, dtype, *parts), dtype)


@pytest.mark.parametrize("parts", [(True, True), (False, False)])
@pytest.mark.parametrize(
    ("queries", "group", "dtype"), [(5, 1, torch.float32), (8, 1, torch.float16), (3, 2, torch.float64)]
)
def test_several_queries_per_kv_head(queries, group, dtype, parts):
    check(step([1, 8, 63, 64, 65, 7], group, 10, 6, 9, 8, dtype, *parts, queries=queries), dtype)


@pytest.mark.parametrize("queries", [1, 4])
def test_more_blocks_than_a_program_has(queries):
    arguments = step([8 * 300 + 3, 8 * 256, 40], 4 // queries, 16, 16, 310, 8, torch.float32, queries=queries)
    check(arguments, torch.float32)


def test_far_positions_and_a_cache_that_is_full():
    arguments = step([16 * 5], 2, 16, 16, 5, 16, torch.float32)
    arguments["lengths"] = torch.tensor([16 * 6 - 1])  # its last block is open and has no place
    check(arguments, torch.float32)


@pytest.mark.parametrize("queries", [1, 4])
def test_rows_and_heads_in_any_order_in_memory(queries):
    """As inside vLLM: heads first."""
    arguments = step([40, 64, 9], 4 // queries, 16, 32, 8, 8, torch.float32, queries=queries)
    want = ops.score_blocks(**arguments)
    arguments["compressed"] = arguments["compressed"].transpose(0, 1).contiguous().transpose(0, 1)
    arguments["q"] = arguments["q"].transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(ops.score_blocks(**arguments), want, equal_nan=True)


def test_no_row_and_no_block():
    for lengths, blocks in (([], 3), ([5], 0)):
        assert ops.score_blocks(**step(lengths, 2, 8, 8, blocks, 8, torch.float32)).shape == (len(lengths), 2, blocks)
