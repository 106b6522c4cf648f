"""What the program around an op has switched on must not change its result: autocast, default dtype, create_graph."""

import pytest
import torch

from seergate import GateBank, GateConfig, ops
from seergate.config import SCORERS, is_retention
from tests.support.models import prompt

CU = torch.tensor([0, 37, 37, 96], dtype=torch.int32)


def gate_inputs(block_size=16):
    torch.manual_seed(0)
    blocks = int((CU.diff() + block_size - 1).div(block_size, rounding_mode="floor").sum())
    q, k = torch.randn(96, 8, 16), torch.randn(96, 2, 16)
    qg, kg = (torch.randn(n, 2, 16, requires_grad=True) for n in (96, blocks))
    return q, k, qg, kg, CU, block_size


def decode_inputs():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 8, 16), torch.randn(2, 2, 64, 16), torch.randn(2, 2, 64, 16)
    return q, k, v, torch.tensor([[[0, 2], [1, 3]]] * 2), torch.tensor([64, 50]), 16


def results(op):
    if op == "gate_kl":
        inputs = gate_inputs()
        loss, _ = ops.gate_kl(*inputs)
        return loss, *torch.autograd.grad(loss, inputs[2:4])
    if op == "block_targets":
        return (ops.block_targets(*gate_inputs()[:2], CU, 16),)
    if op == "sparse_decode":
        return ops.sparse_decode(*decode_inputs()), ops.sparse_decode(*decode_inputs(), softcap=3.0)
    q, k, v, _, lengths, _ = decode_inputs()
    return ops.dense_decode(q, k, v, lengths), ops.dense_decode(q, k, v, lengths, softcap=3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["gate_kl", "block_targets", "sparse_decode", "dense_decode"])
def test_autocast_changes_nothing(op, dtype):
    want = results(op)
    with torch.autocast("cpu", dtype):
        got = results(op)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_whole_lesson_under_autocast(model, dtype):
    bank = GateBank.for_model(model, GateConfig(block_size=8, gate_dim=16))
    plain = bank.distill_loss(model, input_ids=prompt(80))
    with torch.autocast("cpu", dtype):
        loss = bank.distill_loss(model, input_ids=prompt(80))
        loss.backward()
    torch.testing.assert_close(loss.float(), plain, rtol=0.05, atol=1e-3)
    assert all(torch.isfinite(parameter.grad).all() for parameter in bank.parameters())


@pytest.mark.parametrize("scorer", [name for name in SCORERS if not is_retention(name)])
def test_gates_without_a_norm_decode_under_autocast(model, scorer):
    import seergate

    bank = GateBank.for_model(model, GateConfig(block_size=8, gate_dim=16, qk_norm=False, scorer=scorer))
    with seergate.attached(model, bank, token_budget=32), torch.autocast("cpu", torch.bfloat16):
        assert model.generate(prompt(60), max_new_tokens=20).shape[1] == 80


def test_tables_of_a_pack_do_not_follow_the_defaults():
    pytest.importorskip("triton")
    from seergate.ops.triton_impl import packs

    pieces = [packs.Piece(0, 0, range(40), 0.1)]

    def tables():
        return packs.row_tiles(pieces, 16), packs.row_tiles([], 16), packs.column_tiles(pieces, 2, 8)

    want, default = tables(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            got = tables()
    finally:
        torch.set_default_dtype(default)
    for ours, theirs in zip(got, want, strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
