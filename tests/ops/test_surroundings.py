"""What the program around an op has switched on must not change its result: autocast, default dtype, create_graph."""

import pytest
import torch

import seergate
from seergate import GateBank, GateConfig, ops
from seergate.config import SCORERS, is_retention
from tests.support.models import prompt
from tests.support.op_inputs import Pack, decode_inputs

PACK = Pack.random([37, 0, 59], block_size=16, group=4, gate_dim=16, dtype=torch.float32)
INDICES, LENGTHS = torch.tensor([[[0, 2], [1, 3]]] * 2), torch.tensor([64, 50])


def results(op, q, k, v):
    if op == "gate_kl":
        loss, _, *gradients = PACK.run(ops.gate_kl)
        return loss, *gradients
    if op == "block_targets":
        return (ops.block_targets(PACK.q, PACK.k, PACK.cu, 16),)
    where = (INDICES, LENGTHS, 16) if op == "sparse_decode" else (LENGTHS,)
    return [getattr(ops, op)(q, k, v, *where, softcap=softcap) for softcap in (None, 3.0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["gate_kl", "block_targets", "sparse_decode", "dense_decode"])
def test_autocast_changes_nothing(op, dtype):
    step = decode_inputs(group=4, capacity=64, dtype=torch.float32)
    want = results(op, *step)
    with torch.autocast("cpu", dtype):
        got = results(op, *step)
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
