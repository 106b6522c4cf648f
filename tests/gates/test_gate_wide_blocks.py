"""The widest blocks that are allowed, 256 tokens: the gates' loss, and decoding, over block borders."""

import pytest
import torch

from seergate import methods, ops
from seergate.config import MAX_BLOCK_SIZE
from seergate.ops import reference
from tests.decode.test_decode import gates
from tests.support.decoding import forced_run
from tests.support.models import prompt, tiny_model
from tests.support.op_inputs import Pack, relative
from tests.support.reference_decoder import ReferenceRow, Rule

SIZE = MAX_BLOCK_SIZE
LENGTHS = [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE + 63]


def test_the_loss_and_its_gradients_against_the_reference():
    pack = Pack.random(LENGTHS, block_size=SIZE, group=2, dim=8, gate_dim=6, dtype=torch.float32)
    loss, _, *gradients = pack.run(ops.gate_kl)
    expected, _, *others = pack.to(torch.float64).run(reference.gate_kl)
    assert relative(loss, expected) < 1e-5
    for gradient, other in zip(gradients, others, strict=True):
        assert relative(gradient, other) < 1e-5 and float(other.norm()) > 0


@pytest.mark.parametrize("name", ["gate", "quest"])
def test_decoding_against_a_slow_decoder(name):
    """Steps over the border of a third block, with room for two."""
    model = tiny_model("qwen3", dtype=torch.float64, num_hidden_layers=1)
    bank = gates(model, SIZE).double()
    method = {
        "gate": lambda: methods.Gate(bank=bank, token_budget=2 * SIZE),
        "quest": lambda: methods.Quest(token_budget=2 * SIZE, block_size=SIZE, dense_layers=()),
    }[name]()
    rows, forced = [prompt(3 * SIZE - 3, 1), prompt(2 * SIZE - 2, 2)], prompt(6, 3)
    gated = {0: bank.gate(0)} if name == "gate" else None
    expected = []
    with torch.inference_mode():
        for row in rows:
            twin = ReferenceRow(model, Rule(name, SIZE, token_budget=2 * SIZE), gated)
            twin.read(row[0].tolist())
            expected.append(twin.decode(forced[0].tolist()))
    logits, _, stats = forced_run(model, method, rows, forced.expand(2, -1))
    torch.testing.assert_close(logits[:, 1:], torch.stack(expected), rtol=1e-9, atol=1e-9)
    assert stats["density"] < 0.9, "something is left out"
