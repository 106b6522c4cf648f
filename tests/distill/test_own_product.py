"""Gates that begin as the model's own product of queries and pooled keys."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from seergate import GateBank, GateConfig
from seergate.distill import TrainConfig, load_train_config, run_distillation
from seergate.distill.base_model import check_model, fresh_gates
from seergate.gates.scorer import INIT_STD
from seergate.models import families
from seergate.models.rope import Rotary
from seergate.ops.gate_math import rotate
from tests.distill.conftest import assert_identical, weights
from tests.support.models import tiny_model

SIZE = 8


@pytest.mark.parametrize("q_pooling", ["proj", "avgproj", "avg", "none"])
@pytest.mark.parametrize("k_pooling", [("max", "min", "avg"), ("avg",)])
def test_scores_are_the_models_own_products(q_pooling, k_pooling):
    model = tiny_model("qwen3")
    gate = GateBank.for_model(model, GateConfig(SIZE, 16, k_pooling, q_pooling, qk_norm=False)).gate(0)
    for parameter in gate.parameters():
        parameter.data.zero_()  # the noise
    gate.begin_as_model()
    q, k = torch.randn(1, gate.num_heads, 1, 16), torch.randn(1, gate.num_kv_heads, 3 * SIZE, 16)
    at, starts = torch.tensor([2 * SIZE + 3]), torch.arange(3) * SIZE
    scores = gate.scores(gate.queries(q, at), gate.keys(gate.pool(k), starts))[0, :, 0]
    blocks = k.unflatten(2, (3, SIZE))
    own = (blocks.amax(3) + blocks.amin(3)) / 4 + blocks.mean(3) / 2 if len(k_pooling) == 3 else blocks.mean(3)
    keys = rotate(own, starts, gate.inv_freq, 1.0)[0]
    queries = rotate(q, at, gate.inv_freq, 1.0)[0, :, 0].unflatten(0, (gate.num_kv_heads, -1))
    products = torch.einsum("kgd,knd->kgn", queries, keys) / 4
    torch.testing.assert_close(scores, products.amax(1) if q_pooling == "none" else products.mean(1))


def test_the_factor_of_the_models_product_is_its_own():
    model = tiny_model("granite", attention_multiplier=0.1)
    settings = TrainConfig(model="x", block_size=SIZE, gate_dim=16, init="model", qk_norm=False, k_pooling=("avg",))
    gate = fresh_gates(settings, model).gate(0)
    torch.testing.assert_close(gate.k_proj.weight, 0.4 * torch.eye(16).expand(2, 16, 16), atol=0.1, rtol=0)


@pytest.mark.parametrize("family", ["llama", "ernie4_5", "cohere2", "smollm3"])
def test_the_product_is_that_of_the_models_rope(family):
    """Of halves, or interleaved; only near to it in a layer without RoPE (Cohere 2's full attention)."""
    model = tiny_model(family)
    dim = families.head_dim_of(model)
    settings = TrainConfig(model="x", block_size=SIZE, gate_dim=dim, init="model", qk_norm=False, q_pooling="none")
    bank = fresh_gates(settings, model)
    layer, attention = families.full_attention_modules(model)[-1]
    text, gate = families.text_config(model), bank.gate(layer)
    kind = families.rope_kind(text, attention)
    rotary = Rotary(families.decoder_of(model), attention, families.layer_type(text, layer), kind)
    for parameter in gate.parameters():
        parameter.data[parameter.abs() < 6 * INIT_STD] = 0  # the noise
        parameter.data[parameter.abs() >= 6 * INIT_STD] = 1
    q, k = torch.randn(1, gate.num_kv_heads, 9, dim), torch.randn(1, gate.num_kv_heads, 9, dim)
    at = torch.arange(9)[None] * 3
    turned = [rotary.rotate(x, at) for x in (q, k)]
    products = turned[0] @ turned[1].transpose(-1, -2)
    weight = gate.q_proj.weight[0, 0]
    own = [rotate(x @ weight, at, gate.inv_freq, gate.attention_scaling) for x in (q, k)]
    scores = own[0] @ own[1].transpose(-1, -2)
    near = torch.corrcoef(torch.stack((products.flatten(), scores.flatten())))[0, 1]
    assert (near > 0.999) == (kind == "plain"), near


def test_a_run_begins_with_it(config: TrainConfig, tmp_path) -> None:
    first = {"max_steps": 1, "eval_steps": 0, "learning_rate": 1e-9, "min_lr": 1e-9}
    runs = {
        init: weights(run_distillation(replace(config, init=init, output_dir=str(tmp_path / init), **first)))
        for init in ("random", "model")
    }
    for name, noise in runs["random"].items():
        begun = runs["model"][name] - noise
        if name.endswith("q_proj.weight"):
            torch.testing.assert_close(begun, torch.eye(16).expand_as(begun) / 2)  # two query heads of a group
        elif name.endswith("k_proj.weight"):
            pooled = torch.cat([share * torch.eye(16) for share in (0.25, 0.25, 0.5)])
            torch.testing.assert_close(begun, pooled.expand_as(begun))
        else:
            assert not begun.any()
    noise = torch.cat([x.flatten() for name, x in runs["random"].items() if "proj" in name])
    assert noise.std().item() == pytest.approx(INIT_STD, rel=0.05)


def test_what_cannot_begin_so_is_refused(config: TrainConfig, model) -> None:
    """Another width before the data is read, and scorers that have no product."""
    other = GateBank.for_model(model, GateConfig(SIZE, 16, scorer="msa")).gate(0)
    narrow, options = replace(config, init="model", gate_dim=8), {"init": "model"}
    elsewhere = "init is 'model'; it must be random with init_gates or a scorer other than"
    for call, message in (
        (partial(check_model, config.model, narrow), r"gate_dim is 8; .* it must be the head dimension \(16\)"),
        (partial(load_train_config, "qwen3-8b", options | {"scorer": "msa"}), elsewhere),
        (partial(load_train_config, "qwen3-8b", options | {"scorer": "fast_kvzip"}), elsewhere),
        (partial(load_train_config, "qwen3-8b", options | {"init_gates": "org/gates"}), elsewhere),
        (other.begin_as_model, "init is 'model'; with scorer 'msa' it must be 'random'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_bank_for_a_model_begins_as_the_papers(config: TrainConfig, model) -> None:
    torch.manual_seed(0)
    plain = GateBank.for_model(model, GateConfig(16, 16)).state_dict()
    torch.manual_seed(0)
    assert_identical(fresh_gates(config, model).state_dict(), plain)
