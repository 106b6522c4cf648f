"""Wrong arguments of every op: one sentence names the argument, its value and the rule."""

import math
import re

import pytest
import torch

from seergate import ops
from seergate.ops.arguments import check_cu_seqlens
from tests.support.op_inputs import Pack
from tests.support.running import invalid

T, H, K, D, E, B = 24, 4, 2, 8, 6, 8
PACK = Pack.random([15, 9], dim=D, gate_dim=E, block_size=B, dtype=torch.float32)
CACHE, LENGTHS = torch.zeros(2, K, 48, D), torch.tensor([20, 48])
INDICES = torch.tensor([[[0, 2, -1]] * K, [[0, 5, -1]] * K])


def zeros(*shape):
    return torch.zeros(shape)


def products(queries, keys):
    return queries @ keys.transpose(-1, -2)


SOFTMAX = {"sm_scale": 0.3, "sinks": zeros(H), "softcap": 2.0}
TEACHER = {"q": PACK.q, "k": PACK.k, "cu_seqlens": PACK.cu, **SOFTMAX}
VALUES = TEACHER | {"v": zeros(T, K, D)}
SCORED = {"row_start": 0.5, "recall_budgets": (16,), "lse": zeros(T, H)}
LOSS = TEACHER | SCORED | {"block_size": B, "sink_blocks": 0, "row_stride": 1, "row_shift": 0, "reduction": "row_mean"}
BRANCH = {"norm_weight": zeros(E), "inv_freq": zeros(E // 2), "compressed": zeros(2, K, 6, E), "block_size": B}
BUDGET = {"block_size": B, "token_budget": 16, "sink_blocks": 0}
NEWEST = {"k": zeros(2, K, D), "lengths": LENGTHS, "recent": zeros(2, K, 2 * B, D)}
DECODE = {"q": zeros(2, H, D), "k": CACHE, "v": CACHE, "lengths": LENGTHS, **SOFTMAX}
RIGHT = {
    ops.block_targets: TEACHER | {"block_size": B},
    ops.attention_with_block_targets: VALUES | {"block_size": B},
    ops.packed_attention: VALUES | {"window": 4},
    ops.retained_attention: VALUES | {"log_beta": zeros(T, K), "window": 4},
    ops.gate_kl: LOSS | {"qg": PACK.qg, "kg": PACK.kg, "gate_scale": 1.0},
    ops.scorer_kl: LOSS | {"qs": PACK.qg, "ks": PACK.kg, "scores": products, "entry_tokens": B, "target": "sum"},
    ops.retention_kl: TEACHER | SCORED | {"scores": torch.full((T, K), 0.5), "distance": 3},
    ops.select_blocks: {"scores": zeros(2, K, 6), "lengths": LENGTHS, **BUDGET},
    ops.sparse_decode: DECODE | {"indices": INDICES, "block_size": B, "counts": torch.full((2, K), 2)},
    ops.dense_decode: DECODE,
    ops.pool_keys: {"k": CACHE, "block_size": B, "kinds": ("max",), "lengths": LENGTHS},
    ops.update_compressed_keys: BRANCH | NEWEST | {"weight": zeros(K, D, E), "kinds": ("max",)},
    ops.score_blocks: BRANCH | {"q": zeros(2, H, D), "lengths": LENGTHS, "weight": zeros(K, H // K, D, E)},
}
"""Arguments that are right, all optional ones among them."""
COUNT, INDEX = "a whole number, 1 or greater", "a whole number, 0 or greater"
WRONG = {
    "block_size": ((0, 8.0, True), COUNT),
    "distance": ((0,), COUNT),
    "window": ((0, 1.5, True), COUNT),
    "row_stride": ((0,), COUNT),
    "row_shift": ((-1, 0.5), INDEX),
    "sink_blocks": ((-1,), INDEX),
    "sm_scale": ((0.0, -1, math.nan, math.inf), "a positive number or None"),
    "gate_scale": (("1", math.nan), "a finite number or None"),
    "softcap": ((0.0, -1, math.inf), "a positive number or None"),
    "row_start": ((1.0, -0.1), "at least 0 and less than 1"),
    "reduction": (("mean",), "one of row_mean, published"),
    "recall_budgets": ((64, (2,), (9.5,)), "each must be an integer of at least"),
    "target": (("mean",), "'max' or 'sum'"),
    "entry_tokens": ((3, 0, 1.0), "it must divide block_size (8)"),
    "kinds": ((None, "max", (), ("max", "max"), ("mean",), [[1]]), "it must be"),
    "token_budget": ((7, 16.0), "with block_size 8 and 0 sink blocks it must be an integer of at least 8"),
}
FREE = {"v": {-1}, "compressed": {-2}, "qs": {-1, -2}, "ks": {-1, -2}}
"""Dimensions of any size."""
ANY_SIZE = {(ops.pool_keys, "k"), (ops.select_blocks, "scores")}
OF_ANOTHER_DTYPE = {"v", "compressed", "norm_weight"}


def faults(op, name, value):
    """Wrong values of an argument, each with the beginning and the end of the message."""
    for bad in WRONG.get(name, ((), ""))[0]:
        yield bad, f"{name} is {bad!r}; ", WRONG[name][1]
    if not isinstance(value, torch.Tensor):
        return
    floating = value.is_floating_point()
    rule = "; it must be a tensor" if floating else "; it must be an int32 tensor"
    yield value.tolist(), f"{name} is {'a ' * floating}list", rule
    yield value[None], f"{name} has shape {[1, *value.shape]}; it must be [", ""
    if floating:
        yield value.long(), f"{name} has dtype torch.int64; it must be a floating-point tensor", ""
    else:
        yield value.float(), f"{name} is torch.float32", rule
    if name in OF_ANOTHER_DTYPE or (name == "k" and "q" in RIGHT[op]):
        yield value.half(), f"{name} has dtype torch.float16; it must have ", "'s, torch.float32"
    if name != "cu_seqlens":
        yield value.to("meta"), "is on ", "'s device, "
    for dim in range(-value.ndim, 0):
        if dim not in FREE.get(name, ()) and (op, name) not in ANY_SIZE:
            yield value.new_zeros([n + (i - value.ndim == dim) for i, n in enumerate(value.shape)]), "", "must "


@pytest.mark.parametrize("op", RIGHT, ids=lambda op: op.__name__)
def test_every_argument_is_checked(op):
    op(**RIGHT[op])
    for name, value in RIGHT[op].items():
        for bad, start, end in faults(op, name, value):
            invalid(f"{re.escape(start)}.*{re.escape(end)}", op, **RIGHT[op] | {name: bad})


def integers(*values):
    return torch.tensor(values)


def pages(table, page=8, **changes):
    """Changes that put a cache of 48 tokens in pages."""
    return {"k": zeros(8, K, page, D), "v": zeros(8, K, page, D), "page_table": table, **changes}


NO_RULE = {"token_budget": None}
SHARE = NO_RULE | {"budget_share": 0.5}
ODD = {"weight": zeros(K, D, 5), "compressed": zeros(2, K, 6, 5), "norm_weight": None, "inv_freq": zeros(2)}
TABLE = torch.arange(6).expand(2, 6).int()
CASES = {
    ops.gate_kl: [
        ({"q": zeros(T, H, 0), "k": zeros(T, K, 0)}, "q has shape [24, 4, 0]; its vectors must not be empty"),
        ({"k": zeros(T, 3, D)}, "q has 4 heads; it must have a positive multiple of k's 3"),
        ({"k": zeros(T, 0, D)}, "q has 4 heads; it must have a positive multiple of k's 0"),
        ({"cu_seqlens": integers(0)}, "cu_seqlens has shape [1]; it must be [n + 1] for n >= 1 segments"),
        ({"cu_seqlens": integers(0, 15, 23)}, "it must start at 0, never fall, and end at T = 24"),
        ({"cu_seqlens": integers(1, 15, 24)}, "cu_seqlens is [1, 15, 24]; it must start at 0"),
        ({"cu_seqlens": integers(0, 25, 24)}, "cu_seqlens is [0, 25, 24]; it must start at 0, never fall"),
        ({"row_stride": 2, "reduction": "published"}, "row_stride is 2; with reduction 'published' it must be"),
        ({"sink_blocks": 1, "reduction": "published"}, "sink_blocks is 1; with reduction 'published' it must"),
    ],
    ops.dense_decode: [
        ({"lengths": integers(0, 1)}, "lengths is [0, 1]; each must be in 1..48"),
        (pages(TABLE, lengths=integers(49, 1)), "lengths is [49, 1]; each must be in 1..48"),
        (pages(TABLE.float()), "page_table is torch.float32; it must be an int32 tensor"),
        (pages(TABLE[:1]), "page_table has shape [1, 6]; it must be [2, P]"),
        (pages(TABLE + 3), "page_table has pages 3 to 8; each must be in 0..7"),
        (pages(TABLE - 1), "page_table has pages -1 to 4; each must be in 0..7"),
    ],
    ops.retention_kl: [
        ({"recall_budgets": (2,)}, "recall_budgets is (2,); each must be an integer of at least distance (3)"),
    ],
    ops.scorer_kl: [
        ({"recall_budgets": (7,)}, "recall_budgets is (7,); each must be an integer of at least block_size (8)"),
        ({"entry_tokens": 4}, "ks has shape [4, 2, 6]; it must be [7, J, E]"),
    ],
    ops.select_blocks: [
        ({"lengths": integers(0, 48)}, "lengths is [0, 48]; each must be in 1..48 (NB * block_size)"),
        ({"lengths": integers(20, 49)}, "lengths is [20, 49]; each must be in 1..48"),
        (NO_RULE, "the rules given are none; exactly one of token_budget, budget_share, threshold, top_p"),
        ({"threshold": 0.1}, "the rules given are token_budget and threshold; exactly one"),
        ({"sink_blocks": 2}, "with block_size 8 and 2 sink blocks it must be an integer of at least 24"),
        (NO_RULE | {"threshold": 0.0}, "threshold is 0.0; it must be strictly between 0 and 1"),
        (NO_RULE | {"threshold": 1}, "threshold is 1; it must be strictly between 0 and 1"),
        (NO_RULE | {"top_p": math.nan}, "top_p is nan; it must be strictly between 0 and 1"),
        ({"budget_min": 16}, "budget_min is 16 and budget_max None without a budget_share"),
        (SHARE | {"budget_share": 1.1}, "budget_share is 1.1; it must be a number in 0..1"),
        (SHARE | {"budget_max": 7}, "budget_max is 7; with block_size 8 and 0 sink"),
        (SHARE | {"budget_min": 32, "budget_max": 24}, "budget_max is 24; it must be at least budget_min (32)"),
    ],
    ops.sparse_decode: [
        ({"indices": integers(2, 0, -1).expand(2, K, 3)}, "indices of row 0 and KV head 0 are [2, 0, -1]"),
        ({"indices": integers(0, 2, 2).expand(2, K, 3)}, "they must ascend, each block once"),
        ({"indices": torch.stack((INDICES[0], integers(0, -1, 5).expand(K, 3)))}, "of row 1 and KV head 0 are"),
        ({"counts": torch.full((2, K), 3)}, "of row 0 and KV head 0 is 3; it must be how many of indices"),
        ({"lengths": integers(20, 33)}, "row 1 and KV head 0 is 2; it must be how many of indices, [0, 5, -1]"),
        ({"lengths": integers(20, 49)}, "lengths is [20, 49]; each must be in 1..48 (S)"),
        (pages(TABLE, 12), "k has pages of 12 tokens; it must have a multiple of block_size, 8"),
    ],
    ops.pool_keys: [
        ({"lengths": integers(0, 49)}, "lengths is [0, 49]; each must be in 0..48 (S)"),
    ],
    ops.update_compressed_keys: [
        ({"lengths": integers(20, 56)}, "each must be in 1..55 ((NB + 1) * block_size - 1)"),
        ({"recent": zeros(2, K, 12, D)}, "recent has 12 slots; it must have a multiple of block_size"),
        ({"weight": zeros(K, 3 * D, E)}, "weight has shape [2, 24, 6]; it must be [2, 8, E]"),
        (ODD, "weight has 5 columns; with inv_freq it must have an even number"),
    ],
    ops.score_blocks: [
        ({"lengths": integers(20, 56)}, "each must be in 1..55 ((NB + 1) * block_size - 1)"),
        ({"compressed": zeros(2, 3, 6, E)}, "weight has 2 queries; it must have a multiple of compressed's 3"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [(op, *case) for op in CASES for case in CASES[op]],
    ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else ""),
)
def test_wrong_argument(op, changes, message):
    invalid(re.escape(message), op, **RIGHT[op] | changes)


PLAIN = {"sinks": None, "softcap": None}
NOT_READ = [
    (ops.select_blocks, NO_RULE | {"threshold": 0.1}, [(2, K, 6), (2, K)]),
    (ops.select_blocks, NO_RULE | {"top_p": 0.5}, [(2, K, 6), (2, K)]),
    (ops.select_blocks, NO_RULE | {"budget_share": 0.3}, [(2, K, 2), (2, K)]),
    (ops.select_blocks, {}, [(2, K, 2), (2, K)]),
    (ops.sparse_decode, {}, [(2, H, D)]),
    (ops.sparse_decode, PLAIN | {"counts": None}, [(2, H, D)]),
    (ops.dense_decode, {}, [(2, H, D)]),
    (ops.pool_keys, {}, [(2, K, 6, D)]),
    (ops.update_compressed_keys, {}, []),
    (ops.score_blocks, {}, [(2, K, 6)]),
    (ops.packed_attention, {}, [(T, H, D), (T, H)]),
    (ops.packed_attention, PLAIN | {"window": None}, [(T, H, D), (T, H)]),
    (ops.gate_kl, {}, [()]),
]


@pytest.mark.parametrize(("op", "changes", "shapes"), NOT_READ, ids=lambda x: getattr(x, "__name__", str(x)))
def test_no_value_is_read_from_a_device(op, changes, shapes):
    """On meta tensors reading a value is an error, as it is a stall on an accelerator; borders are in host memory."""
    given = {
        name: x.to("meta").requires_grad_(name == "qg") if isinstance(x, torch.Tensor) and name != "cu_seqlens" else x
        for name, x in (RIGHT[op] | changes).items()
    }
    result = op(**given)
    results = [] if result is None else [result] if isinstance(result, torch.Tensor) else result
    assert [x.shape for x in results if isinstance(x, torch.Tensor)] == shapes
    if op is ops.gate_kl:
        result[0].backward()
        assert result[1].recall.shape == (1, K) and given["qg"].grad.shape == (T, K, E)


def test_borders_on_a_device_are_checked_by_their_shape_alone():
    check_cu_seqlens(torch.zeros(3, dtype=torch.int32, device="meta"), 24)


def test_without_a_scale_products_are_divided_by_the_root_of_their_width():
    """The reference gets the scales that the public ops have made of `None`."""
    pack, root, gate_root = Pack.random([15, 9], dim=D, gate_dim=E, block_size=B), math.sqrt(D), math.sqrt(E)
    inputs = (pack.q, pack.k, pack.k, pack.cu)
    assert torch.equal(ops.packed_attention(*inputs).lse, ops.packed_attention(*inputs, 1 / root).lse)
    inputs = (pack.q, pack.k, pack.qg, pack.kg, pack.cu, B)
    assert ops.gate_kl(*inputs)[0] == ops.gate_kl(*inputs, sm_scale=1 / root, gate_scale=1 / gate_root)[0]
