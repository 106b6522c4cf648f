"""Wrong arguments: one sentence that names the argument, what it is and what it must be."""

from __future__ import annotations

import math

import pytest
import torch

from seergate import ops
from seergate.ops.arguments import check_cu_seqlens, check_lengths
from tests.support.op_inputs import Pack

T, H, K, D, E, B = 24, 4, 2, 8, 6, 8


def teacher(**changes):
    pack = Pack.random([15, 9], dim=D, gate_dim=E, block_size=B, dtype=torch.float32)
    return {"q": pack.q, "k": pack.k, "cu_seqlens": pack.cu, "block_size": B} | changes


def attention(**changes):
    pack = Pack.random([15, 9], dim=D, dtype=torch.float32)
    return {"q": pack.q, "k": pack.k, "v": torch.zeros(T, K, D), "cu_seqlens": pack.cu} | changes


def gate(**changes):
    pack = Pack.random([15, 9], dim=D, gate_dim=E, block_size=B, dtype=torch.float32)
    return teacher() | {"qg": pack.qg, "kg": pack.kg} | changes


def selection(**changes):
    base = {"scores": torch.zeros(2, K, 6), "lengths": torch.tensor([20, 48]), "block_size": B, "token_budget": 16}
    return base | changes


def decode(**changes):
    cache = torch.zeros(2, K, 48, D)
    base = {
        "q": torch.zeros(2, H, D),
        "k": cache,
        "v": cache,
        "indices": torch.tensor([0, 2, -1]).int().expand(2, K, 3),
    }
    return base | {"lengths": torch.tensor([20, 48]), "block_size": B} | changes


def pooling(**changes):
    return {"k": torch.zeros(2, K, 48, D), "block_size": B, "kinds": ("max",)} | changes


def compression(**changes):
    base = {"k": torch.zeros(2, K, D), "lengths": torch.tensor([20, 48]), "recent": torch.zeros(2, K, 2 * B, D)}
    base |= {"compressed": torch.zeros(2, K, 6, E), "weight": torch.zeros(K, D, E), "kinds": ("max",)}
    return base | {"block_size": B} | changes


def scoring(**changes):
    base = {"q": torch.zeros(2, H, D), "lengths": torch.tensor([20, 48]), "compressed": torch.zeros(2, K, 6, E)}
    return base | {"weight": torch.zeros(K, H // K, D, E), "block_size": B} | changes


MAKERS = {
    ops.block_targets: teacher,
    ops.attention_with_block_targets: lambda **changes: teacher(v=torch.zeros(T, K, D)) | changes,
    ops.packed_attention: attention,
    ops.gate_kl: gate,
    ops.select_blocks: selection,
    ops.sparse_decode: decode,
    ops.pool_keys: pooling,
    ops.update_compressed_keys: compression,
    ops.score_blocks: scoring,
}


@pytest.mark.parametrize("op", MAKERS, ids=lambda op: op.__name__)
def test_the_unchanged_arguments_are_right(op):
    op(**MAKERS[op]())


TEACHER = [
    ({"q": torch.zeros(T, H)}, r"q has shape \[24, 4\]; it must be \[T, H, d\]"),
    ({"q": [[1.0]]}, "q is a list; it must be a tensor"),
    (
        {"q": torch.zeros(T, H, 0), "k": torch.zeros(T, K, 0)},
        r"q has shape \[24, 4, 0\]; its vectors must not be empty",
    ),
    ({"q": torch.zeros(T, H, D, dtype=torch.long)}, "q has dtype torch.int64; it must be a floating-point tensor"),
    ({"k": torch.zeros(T + 1, K, D)}, r"k has shape \[25, 2, 8\]; it must be \[24, Hkv, 8\]"),
    ({"k": torch.zeros(T, K, D + 1)}, r"k has shape \[24, 2, 9\]"),
    ({"k": torch.zeros(T, 3, D)}, "q has 4 heads; it must have a positive multiple of k's 3"),
    ({"k": torch.zeros(T, 0, D)}, "q has 4 heads; it must have a positive multiple of k's 0"),
    ({"k": torch.zeros(T, K, D, dtype=torch.bfloat16)}, "k has dtype torch.bfloat16; it must have q's, torch.float32"),
    ({"k": torch.zeros(T, K, D, device="meta")}, "k is on meta; it must be on q's device, cpu"),
    ({"cu_seqlens": [0, 24]}, "cu_seqlens is list; it must be an int32 tensor"),
    ({"cu_seqlens": torch.tensor([0.0, 24.0])}, "cu_seqlens is torch.float32; it must be an int32 tensor"),
    ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens has shape \[1\]; it must be \[n \+ 1\]"),
    ({"cu_seqlens": torch.tensor([[0, 24]])}, r"cu_seqlens has shape \[1, 2\]"),
    (
        {"cu_seqlens": torch.tensor([0, 15, 23])},
        r"cu_seqlens is \[0, 15, 23\]; it must start at 0, never fall, and end at T = 24",
    ),
    ({"cu_seqlens": torch.tensor([1, 15, 24])}, r"cu_seqlens is \[1, 15, 24\]; it must start at 0"),
    ({"cu_seqlens": torch.tensor([0, 25, 24])}, r"cu_seqlens is \[0, 25, 24\]; it must start at 0, never fall"),
    ({"block_size": 0}, "block_size is 0; it must be a whole number, 1 or greater"),
    ({"block_size": 8.0}, "block_size is 8.0; it must be a whole number"),
    ({"block_size": True}, "block_size is True; it must be a whole number"),
    ({"sm_scale": math.nan}, "sm_scale is nan; it must be a finite number or None"),
    ({"sinks": torch.zeros(3)}, r"sinks has shape \[3\]; it must be \[4\]"),
    ({"softcap": 0.0}, "softcap is 0.0; it must be a positive number or None"),
]
ATTENTION = [
    ({"v": torch.zeros(T, H, D)}, r"v has shape \[24, 4, 8\]; it must be \[24, 2, dv\]"),
    ({"v": torch.zeros(T, K, D, dtype=torch.float64)}, "v has dtype torch.float64; it must have q's"),
    ({"block_size": 0}, "block_size is 0; it must be a whole number, 1 or greater"),
]
GATE = [
    ({"qg": torch.zeros(T, H, E)}, r"qg has shape \[24, 4, 6\]; it must be \[24, 2, dg\]"),
    ({"kg": torch.zeros(3, K, E)}, r"kg has shape \[3, 2, 6\]; it must be \[4, 2, 6\]"),
    ({"kg": torch.zeros(4, K, E + 1)}, r"kg has shape \[4, 2, 7\]; it must be \[4, 2, 6\]"),
    ({"lse": torch.zeros(T, K)}, r"lse has shape \[24, 2\]; it must be \[24, 4\]"),
    ({"lse": torch.zeros(T, H, device="meta")}, "lse is on meta; it must be on q's device, cpu"),
    ({"gate_scale": "1"}, "gate_scale is '1'; it must be a finite number or None"),
    ({"row_start": 1.0}, "row_start is 1.0; it must be at least 0 and less than 1"),
    ({"row_start": -0.1}, "row_start is -0.1; it must be at least 0"),
    ({"reduction": "mean"}, "reduction is 'mean'; it must be one of row_mean, published"),
    ({"recall_budgets": 64}, "recall_budgets is 64; each must be an integer"),
    ({"recall_budgets": (4,)}, r"recall_budgets is \(4,\); each must be an integer of at least block_size \(8\)"),
]
SELECTION = [
    ({"scores": torch.zeros(2, K)}, r"scores has shape \[2, 2\]; it must be \[B, Hkv, NB\]"),
    ({"scores": torch.zeros(2, K, 6, dtype=torch.int32)}, "scores has dtype torch.int32"),
    ({"lengths": torch.tensor([20])}, r"lengths has shape \[1\]; it must be \[2\]"),
    ({"lengths": [20, 48]}, "lengths is list; it must be an int32 tensor"),
    ({"lengths": torch.tensor([0, 48])}, r"lengths is \[0, 48\]; each must be in 1..48 \(NB \* block_size\)"),
    ({"lengths": torch.tensor([20, 49])}, r"lengths is \[20, 49\]; each must be in 1..48"),
    ({"block_size": -1}, "block_size is -1"),
    (
        {"token_budget": None},
        "the rules given are none; exactly one of token_budget, budget_share, threshold, top_p",
    ),
    ({"threshold": 0.1}, "the rules given are token_budget and threshold; exactly one"),
    (
        {"token_budget": 7},
        "token_budget is 7; with block_size 8 and 0 sink blocks it must be an integer of at least 8",
    ),
    ({"token_budget": 16, "sink_blocks": 2}, "token_budget is 16; with block_size 8 and 2 sink blocks .* at least 24"),
    ({"token_budget": 16.0}, "token_budget is 16.0"),
    ({"token_budget": None, "threshold": 0.0}, "threshold is 0.0; it must be strictly between 0 and 1"),
    ({"token_budget": None, "threshold": 1}, "threshold is 1; it must be strictly between 0 and 1"),
    ({"token_budget": None, "top_p": 1.5}, "top_p is 1.5; it must be strictly between 0 and 1"),
    ({"token_budget": None, "top_p": math.nan}, "top_p is nan"),
    ({"sink_blocks": -1}, "sink_blocks is -1; it must be a whole number, 0 or greater"),
    ({"budget_share": 0.1}, "the rules given are token_budget and budget_share; exactly one"),
    ({"budget_min": 16}, "budget_min is 16 and budget_max None without a budget_share"),
    ({"token_budget": None, "budget_share": 1.1}, "budget_share is 1.1; it must be a number in 0..1"),
    ({"token_budget": None, "budget_share": 0.5, "budget_max": 7}, "budget_max is 7; with block_size 8 and 0 sink"),
    (
        {"token_budget": None, "budget_share": 0.5, "budget_min": 32, "budget_max": 24},
        r"budget_max is 24; it must be at least budget_min \(32\)",
    ),
]
DECODE = [
    ({"q": torch.zeros(2, 1, H, D)}, r"q has shape \[2, 1, 4, 8\]; it must be \[B, H, d\]"),
    ({"k": torch.zeros(3, K, 48, D)}, r"k has shape \[3, 2, 48, 8\]; it must be \[2, Hkv, S, 8\]"),
    ({"v": torch.zeros(2, K, 47, D)}, r"v has shape \[2, 2, 47, 8\]; it must be \[2, 2, 48, dv\]"),
    ({"v": torch.zeros(2, K, 48, D, dtype=torch.float64)}, "v has dtype torch.float64; it must have q's"),
    ({"q": torch.zeros(2, 3, D)}, "q has 3 heads; it must have a positive multiple of k's 2"),
    ({"indices": torch.zeros(2, K, 3)}, r"indices is torch.float32; it must be an int32 tensor \[2, 2, K\]"),
    ({"indices": torch.tensor([2, 0, -1]).expand(2, K, 3)}, r"indices of row 0 and KV head 0 are \[2, 0, -1\]"),
    ({"indices": torch.tensor([[[0, 1, 2]] * K, [[0, 1, 2], [0, -1, 2]]])}, "row 1 and KV head 1 .* they must ascend"),
    ({"indices": torch.tensor([0, 2, 2]).int().expand(2, K, 3)}, "they must ascend, each block once"),
    ({"indices": torch.zeros(2, H, 3, dtype=torch.int32)}, r"indices has shape \[2, 4, 3\]; it must be \[2, 2, K\]"),
    ({"lengths": torch.tensor([20, 49])}, r"lengths is \[20, 49\]; each must be in 1..48 \(S\)"),
    ({"lengths": torch.tensor([0, 1])}, r"lengths is \[0, 1\]; each must be in 1..48"),
    ({"lengths": torch.tensor([20.0, 48.0])}, "lengths is torch.float32"),
    ({"counts": torch.zeros(2, K)}, r"counts is torch.float32; it must be an int32 tensor \[2, 2\]"),
    ({"counts": torch.zeros(2, H).int()}, r"counts has shape \[2, 4\]; it must be \[2, 2\]"),
    (
        {"counts": torch.full((2, K), 3)},
        r"counts of row 0 and KV head 0 is 3; it must be how many of indices, \[0, 2, -1\]",
    ),
    ({"counts": torch.full((2, K), 2)}, "row 1 and KV head 0 is 2; .* are blocks, and the last one the current, 5"),
    ({"block_size": 0}, "block_size is 0"),
    ({"sm_scale": math.inf}, "sm_scale is inf"),
    ({"sinks": torch.zeros(2)}, r"sinks has shape \[2\]; it must be \[4\]"),
    ({"softcap": -1}, "softcap is -1; it must be a positive number"),
]
POOLING = [
    ({"kinds": None}, "kinds is None; it must be one or more of"),
    ({"kinds": [[1]]}, r"kinds is \[\[1\]\]; it must be one or more of"),
    ({"k": torch.zeros(K, 48, D)}, r"k has shape \[2, 48, 8\]; it must be \[B, Hkv, S, d\]"),
    ({"block_size": 0}, "block_size is 0"),
    ({"kinds": "max"}, r"kinds is 'max'; it must be a sequence such as \('max',\)"),
    ({"kinds": ()}, r"kinds is \(\); it must be one or more of"),
    ({"kinds": ("max", "max")}, "each at most once"),
    ({"kinds": ("mean",)}, r"kinds is \('mean',\)"),
    ({"lengths": torch.tensor([0, 49])}, r"lengths is \[0, 49\]; each must be in 0..48 \(S\)"),
]
COMPRESSION = [
    ({"k": torch.zeros(2, K, 1, D)}, r"k has shape \[2, 2, 1, 8\]; it must be \[B, Hkv, d\]"),
    ({"lengths": torch.tensor([20, 56])}, r"lengths is \[20, 56\]; each must be in 1..55 \(\(NB \+ 1\) \* block_size"),
    ({"recent": torch.zeros(2, K, 12, D)}, "recent has 12 slots; it must have a multiple of block_size, 8"),
    ({"recent": torch.zeros(2, K, 16, D + 1)}, r"recent has shape \[2, 2, 16, 9\]; it must be \[2, 2, R, 8\]"),
    ({"weight": torch.zeros(K, 3 * D, E)}, r"weight has shape \[2, 24, 6\]; it must be \[2, 8, E\]"),
    ({"kinds": ()}, r"kinds is \(\); it must be one or more of"),
    ({"compressed": torch.zeros(2, K, 6, E + 1)}, r"compressed has shape \[2, 2, 6, 7\]; it must be \[2, 2, NB, 6\]"),
    (
        {"compressed": torch.zeros(2, K, 6, E, dtype=torch.float16)},
        "compressed has dtype torch.float16; it must have weight's, torch.float32",
    ),
    ({"weight": torch.zeros(K, D, E, device="meta")}, "weight is on meta; it must be on k's device, cpu"),
    ({"norm_weight": torch.zeros(D)}, r"norm_weight has shape \[8\]; it must be \[6\]"),
    ({"inv_freq": torch.zeros(E)}, r"inv_freq has shape \[6\]; it must be \[3\]"),
    (
        {"weight": torch.zeros(K, D, 5), "compressed": torch.zeros(2, K, 6, 5), "inv_freq": torch.zeros(2)},
        "weight has 5 columns; with inv_freq it must have an even number",
    ),
    ({"host_lengths": [20]}, "host_lengths has 1 numbers; it must have 2, those of lengths"),
    ({"block_size": 0}, "block_size is 0"),
]
SCORING = [
    ({"q": torch.zeros(2, H, 1, D)}, r"q has shape \[2, 4, 1, 8\]; it must be \[B, 4, 8\]"),
    ({"weight": torch.zeros(K, D, E)}, r"weight has shape \[2, 8, 6\]; it must be \[Hkv, G, d, E\]"),
    ({"lengths": torch.tensor([20, 56])}, r"lengths is \[20, 56\]; each must be in 1..55 \(\(NB \+ 1\) \* block_size"),
    ({"compressed": torch.zeros(2, K, 6, E + 1)}, r"compressed has shape \[2, 2, 6, 7\]; it must be \[2, 2, NB, 6\]"),
    ({"compressed": torch.zeros(2, K, 6, E).half()}, "compressed has dtype torch.float16; it must have weight's"),
    ({"norm_weight": torch.zeros(D)}, r"norm_weight has shape \[8\]; it must be \[6\]"),
    ({"inv_freq": torch.zeros(E)}, r"inv_freq has shape \[6\]; it must be \[3\]"),
    ({"block_size": 0}, "block_size is 0"),
]
WINDOWS = [({"window": bad}, f"window is {bad!r}; it must be a whole number, 1 or greater") for bad in (0, 1.5, True)]
CASES = [
    (op, changes, message)
    for op, cases in (
        (ops.block_targets, TEACHER),
        (ops.attention_with_block_targets, ATTENTION),
        (ops.packed_attention, [case for case in ATTENTION if "block_size" not in case[0]] + WINDOWS),
        (ops.gate_kl, TEACHER + GATE),
        (ops.select_blocks, SELECTION),
        (ops.sparse_decode, DECODE),
        (ops.pool_keys, POOLING),
        (ops.update_compressed_keys, COMPRESSION),
        (ops.score_blocks, SCORING),
    )
    for changes, message in cases
]


@pytest.mark.parametrize(("op", "changes", "message"), CASES, ids=[f"{op.__name__}-{text}" for op, _, text in CASES])
def test_wrong_argument(op, changes, message):
    with pytest.raises(ValueError, match=message):
        op(**MAKERS[op](**changes))


def on_meta(arguments):
    return {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize(
    "rule", [{"token_budget": 16}, {"budget_share": 0.3}, {"threshold": 0.1}, {"top_p": 0.5}], ids=str
)
def test_selection_reads_no_value_from_a_device(rule):
    """On meta tensors reading a value is an error, as it is a stall on an accelerator."""
    chosen = ops.select_blocks(**on_meta(selection(**{"token_budget": None} | rule)))
    assert chosen.indices.shape == (2, K, 6 if {"threshold", "top_p"} & rule.keys() else 2)


@pytest.mark.parametrize("extras", [{}, {"sinks": torch.zeros(H), "softcap": 2.0}], ids=["plain", "sinks and softcap"])
def test_decode_reads_no_value_from_a_device(extras):
    assert ops.sparse_decode(**on_meta(decode(**extras))).shape == (2, H, D)


def test_pooling_reads_no_value_from_a_device():
    assert ops.pool_keys(**on_meta(pooling(lengths=torch.tensor([3, 48])))).shape == (2, K, 6, D)


def test_the_update_of_compressed_keys_reads_no_value_from_a_device():
    extras = {"norm_weight": torch.zeros(E), "inv_freq": torch.zeros(E // 2)}
    assert ops.update_compressed_keys(**on_meta(compression(**extras))) is None


def test_scoring_reads_no_value_from_a_device():
    extras = {"norm_weight": torch.zeros(E), "inv_freq": torch.zeros(E // 2)}
    assert ops.score_blocks(**on_meta(scoring(**extras))).shape == (2, K, 6)


def test_gate_kl_reads_no_value_from_a_device_when_the_borders_are_in_host_memory():
    arguments = gate(recall_budgets=(16,))
    qg = arguments["qg"].to("meta").requires_grad_()
    loss, stats = ops.gate_kl(**on_meta(arguments) | {"qg": qg, "cu_seqlens": arguments["cu_seqlens"]})
    loss.backward()
    assert loss.shape == () and stats.recall.shape == (1, K) and qg.grad.shape == (T, K, E)


@pytest.mark.parametrize("extras", [{}, {"sinks": torch.zeros(H), "softcap": 2.0, "window": 4}], ids=["plain", "all"])
def test_attention_of_a_pack_reads_no_value_from_a_device_when_the_borders_are_in_host_memory(extras):
    arguments = attention(**extras)
    found = ops.packed_attention(**on_meta(arguments) | {"cu_seqlens": arguments["cu_seqlens"]})
    assert found.output.shape == (T, H, D) and found.lse.shape == (T, H)


def test_checks_pass_on_shapes_alone_where_values_lie_on_a_device():
    check_cu_seqlens(torch.zeros(3, dtype=torch.int32, device="meta"), 24)
    check_lengths(torch.zeros(3, dtype=torch.int64, device="meta"), 3, 48, "S")


def test_without_a_scale_products_are_divided_by_the_root_of_their_width():
    """Said here once: the reference gets the scales that the public ops have made of `None`."""
    pack, root, gate_root = Pack.random([15, 9], dim=D, gate_dim=E, block_size=B), math.sqrt(D), math.sqrt(E)
    inputs = (pack.q, pack.k, pack.k, pack.cu)
    assert torch.equal(ops.packed_attention(*inputs).lse, ops.packed_attention(*inputs, 1 / root).lse)
    inputs = (pack.q, pack.k, pack.qg, pack.kg, pack.cu, B)
    assert ops.gate_kl(*inputs)[0] == ops.gate_kl(*inputs, sm_scale=1 / root, gate_scale=1 / gate_root)[0]
