"""Taps are bit-equal to what each family rotates; unsupported models are refused with the reason."""

from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import seergate
from seergate import GateBank, GateConfig
from seergate.models import families
from seergate.models.hooks import QKHook
from seergate.models.rope import modeling_module
from tests.support.models import FAMILIES, left_padded, prompt, tiny_model
from tests.support.running import refused

UNROTATED = ("cohere2", "exaone4")
"""Families whose full-attention layers do not rotate."""


def tapped(model, attention, name):
    """While the model reads: what the hook of an attention module takes, (q, k), and the calls of a function."""
    module, calls, qk_hook = modeling_module(attention), [], QKHook(model, attention)
    original = getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
        # as many tokens as heads: a layout guessed from sizes would pass anything else and fail here
        model(input_ids=prompt(model.config.get_text_config().num_attention_heads))
    taken = qk_hook.take()
    qk_hook.remove()
    return taken, calls


@pytest.mark.parametrize("family", UNROTATED)
def test_taps_of_layers_that_do_not_rotate_are_what_attention_gets(family):
    """The full-attention layer of these families attends with its queries and keys as they are; the other rotates."""
    model = tiny_model(family, attn_implementation="eager")
    sliding, full = (layer.self_attn for layer in model.get_decoder().layers)
    assert families.full_attention_modules(model) == [(1, full)]
    for attention, kind in ((sliding, "plain"), (full, "none")):
        assert families.rope_kind(model.config, attention) == kind
        (q, k), calls = tapped(model, attention, "eager_attention_forward")
        ((_, attended_q, attended_k, *_),) = (args for args in calls if args[0] is attention)
        assert torch.equal(q, attended_q) == torch.equal(k, attended_k) == (kind == "none")


@pytest.mark.parametrize("family", sorted(set(families.FAMILIES) - set(UNROTATED)))
def test_taps_are_the_rope_inputs(family):
    model = tiny_model(family)
    (q, k), calls = tapped(model, families.full_attention_modules(model)[0][1], "apply_rotary_pos_emb")
    if family == "gemma4_text":  # rotates q and k in separate calls, tokens first
        rotated = [call[0].transpose(1, 2) for call in calls]
        assert any(torch.equal(q, x) for x in rotated if x.shape == q.shape)
        assert any(torch.equal(k, x) for x in rotated if x.shape == k.shape)
    else:
        assert any(torch.equal(call[0], q) and torch.equal(call[1], k) for call in calls)


def test_every_supported_family_is_tested():
    assert set(families.FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_gates_fit_every_family(family):
    model = tiny_model(family)
    layers = [layer for layer, _ in families.full_attention_modules(model)]
    types = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"] * 2
    assert layers == [i for i, kind in enumerate(types) if kind == "full_attention"]
    bank = GateBank.for_model(model)
    assert bank.geometry.layers == tuple(layers)
    assert bank.config.gate_dim == families.head_dim_of(model)
    small = GateBank.for_model(model, GateConfig(8, bank.config.gate_dim))
    loss = small.distill_loss(model, input_ids=prompt(60))
    loss.backward()
    assert 0 < loss < torch.inf and all(p.grad.isfinite().all() for p in small.parameters())


DEEPSEEK = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
DEEPSEEK |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 2}
DEEPSEEK |= {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
DEEPSEEK |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 0}


def test_mla_is_refused_with_the_reason():
    config = AutoConfig.for_model("deepseek_v3", **DEEPSEEK)
    model = AutoModelForCausalLM.from_config(config)
    refused("deepseek_v3.*multi-head latent attention", GateBank.for_model, model)


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
MIXED = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "gated"),
    [
        ("phi3", {"sliding_window": 128}, (0, 1)),
        ("mistral", {"sliding_window": 500}, (0, 1)),
        ("mistral", {"sliding_window": 127}, ()),
        ("mistral", {"sliding_window": 128, "rope_parameters": LINEAR}, ()),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, (0, 1)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "layer_types": MIXED}, (0, 1)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 127, "layer_types": MIXED}, (1,)),
        ("cohere2", {"sliding_window": 128}, (0, 1)),  # RoPE in the layers with a window only
        ("gemma3_text", {"sliding_window": 128}, (1,)),  # another RoPE in the layers with a window
    ],
)
def test_a_window_as_long_as_all_positions_is_full_attention(family, changes, gated):
    model = tiny_model(family, **{"max_position_embeddings": 128, **changes})
    if not gated:
        for call in (GateBank.for_model, partial(seergate.attach, method="dense")):
            refused("no layer of this mistral model has full attention", call, model)
        return
    batch = left_padded([prompt(110), prompt(60, seed=1)])
    plain = model.generate(**batch, max_new_tokens=8)
    bank = GateBank.for_model(model, GateConfig(block_size=8, gate_dim=16))
    assert bank.geometry.layers == gated
    for cache in ("dynamic", "static"):
        with seergate.attached(model, bank, token_budget=128) as handle:
            assert torch.equal(model.generate(**batch, max_new_tokens=8, cache_implementation=cache), plain)
            assert handle.stats()["layers"] == list(gated)
    if family == "phi3":
        with seergate.attached(model, bank, token_budget=32):
            refused("129 tokens, more than layer 0 attends to", model, input_ids=prompt(129), use_cache=True)


@pytest.mark.parametrize("method", ["dense", "quest", "h2o"])
def test_generate_passes_the_length_at_which_longrope_changes(method):
    """There transformers computes Phi-3's cache again."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    changes = {"original_max_position_embeddings": 64, "max_position_embeddings": 256}
    model, ids = tiny_model("phi3", rope_parameters=rope, **changes), prompt(50)
    plain = model.generate(ids, max_new_tokens=30)
    with seergate.attached(model, method, **({} if method == "dense" else {"token_budget": 512})):
        assert torch.equal(model.generate(ids, max_new_tokens=30), plain)


def test_keys_before_changing_rope_are_not_recovered_beyond_its_length():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model("qwen3", rope_parameters=rope, max_position_embeddings=64)
    bank = GateBank.for_model(model, GateConfig(block_size=8, gate_dim=16))
    with seergate.attached(model, bank, token_budget=32):
        fitting, longer = (model(input_ids=prompt(n), use_cache=True).past_key_values for n in (64, 65))
        fitting.crop(20)
        refused("other frequencies beyond 64", longer.crop, 20)


def test_a_tensor_parallel_model_is_refused(model):
    """`_tp_size` is what transformers' loader sets when it splits the projections."""
    for size in (None, 1):
        model._tp_size = size
        bank = GateBank.for_model(model)
        seergate.attach(model, "dense").detach()
    model._tp_size = 2
    refused("split over 2 devices", GateBank.for_model, model)
    for method in (bank, "dense"):
        refused("split over 2 devices.* load it without tp_plan", seergate.attach, model, method)
    assert not hasattr(model, "_seergate_handle")


def test_a_factor_of_null_is_that_of_the_lengths():
    rope = {"rope_type": "yarn", "factor": None, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    config = tiny_model("qwen3", rope_parameters=rope, max_position_embeddings=256).config
    assert families.model_positions(config) == 256


def test_attention_of_another_kind_is_refused():
    """As PEFT's adaption prompts put it around the model's own."""
    model = tiny_model("qwen3")
    model.model.layers[1].self_attn = torch.nn.Identity()
    refused("layer 1 has Identity as its attention", seergate.attach, model, "dense")


def test_gate_frequencies_are_the_models_own_at_its_width_and_plain_at_another():
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 1024}
    model = tiny_model("qwen3", rope_parameters=scaling)
    own = families.gate_geometry(model, GateConfig(gate_dim=16))
    rotary = families.decoder_of(model).rotary_emb
    assert own.inv_freq == tuple(rotary.inv_freq.tolist())
    assert own.attention_scaling == rotary.attention_scaling != 1.0
    other = families.gate_geometry(model, GateConfig(gate_dim=8))
    assert other.inv_freq == pytest.approx([10000.0 ** (-i / 8) for i in (0, 2, 4, 6)])
