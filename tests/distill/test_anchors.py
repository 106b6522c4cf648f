"""Gates of anchors learn from the attention of every layer that reads their choice."""

import pytest
import torch

from seergate import GateBank, SeergateError
from seergate.distill.base_model import fresh_gates, given_gates
from seergate.distill.config import TrainConfig
from seergate.distill.losses.distill_loss import DistillSpec
from seergate.distill.losses.teacher_forward import distill_steps
from seergate.ops import reference
from tests.decode.test_decode import BLOCK, gates
from tests.gates.conftest import attention_calls, queries_and_keys
from tests.support.models import prompt, tiny_model

LENGTHS, ENDS = (40, 61), torch.tensor([0, 40, 101], dtype=torch.int32)
IDS = torch.cat([prompt(length, length) for length in LENGTHS], 1)


@pytest.fixture(scope="module")
def deep():
    return tiny_model("qwen3", num_hidden_layers=4).double()


def losses_by_hand(model, bank, source):
    """Layer -> the KL from its target of the gate of ``source[layer]``, with queries and keys of the gate's layer."""
    calls, losses = attention_calls(model, IDS.split(LENGTHS, 1)), {}
    for layer, anchor in source.items():
        each = *queries_and_keys(calls[layer]), *queries_and_keys(calls[anchor], bank.gate(anchor))
        losses[layer] = reference.gate_kl(*each, ENDS, BLOCK, row_start=0.5, sm_scale=calls[layer][0].sm_scale)[0]
    return losses


@pytest.mark.parametrize(
    ("anchors", "source"), [((0, 2), [0, 0, 2, 2]), ((0,), [0, 0, 0, 0]), ((1, 3), [None, 1, 1, 3])]
)
def test_loss_and_gradients_are_those_of_all_layers_served(deep, anchors, source):
    bank = gates(deep).with_anchors(anchors).double()
    served = {layer: gate for layer, gate in enumerate(source) if gate is not None}
    (out,) = distill_steps([DistillSpec(bank, recall_budgets=(2 * BLOCK,))], deep, IDS, ENDS)
    gradients = torch.autograd.grad(out.loss, [*bank.parameters()])
    want = losses_by_hand(deep, bank, served)
    torch.testing.assert_close(out.loss, (sum(want.values()) / len(want)).float(), rtol=1e-5, atol=1e-6)
    mean = [sum(want[layer] for layer in served if served[layer] == gate) / source.count(gate) for gate in anchors]
    torch.testing.assert_close(out.kl_per_layer, torch.stack(mean).detach().float(), rtol=1e-5, atol=1e-6)
    assert out.recall.shape[:2] == (1, len(anchors))
    by_hand = torch.autograd.grad(sum(want.values()) / len(want), [*bank.parameters()])
    torch.testing.assert_close(gradients, by_hand, rtol=1e-4, atol=1e-8)


def test_gates_of_every_layer_learn_from_their_own(deep):
    """Whatever anchors they decode with by default."""
    bank = gates(deep).double()
    named = bank.derived(decode_defaults={"anchors": [0]})
    plain, anchored = distill_steps([DistillSpec(bank), DistillSpec(named)], deep, IDS, ENDS)
    assert torch.equal(plain.loss, anchored.loss) and torch.equal(plain.kl_per_layer, anchored.kl_per_layer)


def test_a_run_trains_the_gates_of_its_anchors_alone(tmp_path):
    """Fresh ones, or those of a bank that has more; other layers are refused."""
    model = tiny_model("qwen3", num_hidden_layers=4)
    config = TrainConfig(model="x", block_size=BLOCK, anchors=(0, 2), gate_dim=16)
    fresh = fresh_gates(config, model)
    assert fresh.geometry.layers == (0, 2) and fresh.decode_config().anchors == (0, 2)
    whole = GateBank.for_model(model, config.gates(16))
    whole.save_pretrained(tmp_path)
    bank = given_gates(TrainConfig(**{**vars(config), "init_gates": str(tmp_path)}), fresh)
    assert bank.geometry.layers == (0, 2)
    assert all(torch.equal(bank.state_dict()[name], whole.state_dict()[name]) for name in bank.state_dict())
    with pytest.raises(SeergateError, match=r"layers is \[9\]; it must name some of"):
        fresh_gates(TrainConfig(model="x", block_size=BLOCK, anchors=(0, 9), gate_dim=16), model)
    with pytest.raises(ValueError, match=r"anchors is \(-1,\); it must be layers, 0 or greater"):
        TrainConfig(model="x", anchors=(-1,))
    with pytest.raises(ValueError, match="anchors is .*; it must be left out with scorer 'trim_kv', which evicts"):
        TrainConfig(model="x", scorer="trim_kv", anchors=(0,), target_budget=64)
