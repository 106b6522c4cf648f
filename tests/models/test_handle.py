"""What a handle tells of itself, and how it steps aside."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import seergate
from seergate import GateBank, GateConfig, Rectify, SeergateError
from tests.decode.test_decode import BLOCK, gates
from tests.support.models import prompt, tiny_model

INPUTS, NEW = {"input_ids": prompt(45)}, 12


@pytest.mark.parametrize(("name", "correction"), [("gate", None), ("gate", Rectify(4)), ("streaming_llm", None)])
def test_disabled_is_the_plain_model(name, correction):
    model = tiny_model("qwen3")
    plain = model.generate(**INPUTS, max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True)
    method, budget = (gates(model) if name == "gate" else name), 2 * BLOCK
    with seergate.attached(model, method, token_budget=budget, correction=correction) as handle:
        before = model.generate(**INPUTS, max_new_tokens=NEW)
        steps = handle.stats()["steps"]
        for cache in (None, StaticCache(config=model.config, max_cache_len=80)):
            with handle.disable(), handle.disable():
                output = model.generate(
                    **INPUTS,
                    max_new_tokens=NEW,
                    return_dict_in_generate=True,
                    output_logits=True,
                    past_key_values=cache,
                )
                assert "disabled" in repr(handle)
            assert torch.equal(output.sequences, plain.sequences)
            if cache is None:
                assert all(map(torch.equal, output.logits, plain.logits))
        assert handle.stats()["steps"] == steps, "nothing is counted"
        assert torch.equal(model.generate(**INPUTS, max_new_tokens=NEW), before) and "attached" in repr(handle)
        assert handle.stats()["steps"] == 2 * steps
    if correction is None:
        assert not torch.equal(before, plain.sequences), "or nothing would tell the two apart"


def test_caches_go_with_the_one_or_the_other():
    model = tiny_model("qwen3")
    for method, refused_meanwhile in ((gates(model), False), ("streaming_llm", True)):
        with seergate.attached(model, method, token_budget=2 * BLOCK) as handle, torch.no_grad():
            with handle.disable():
                model(prompt(30), past_key_values=(plain := DynamicCache()))
            with pytest.raises(SeergateError, match="filled by the plain model"):
                model(prompt(1), past_key_values=plain)
            model(prompt(30), past_key_values=(ours := DynamicCache()))
            with handle.disable():
                if refused_meanwhile:
                    with pytest.raises(SeergateError, match="which evicted from it; start a new one"):
                        model(prompt(1), past_key_values=ours)
                else:
                    model(prompt(1), past_key_values=ours)


def test_detached_while_disabled():
    model = tiny_model("qwen3")
    handle = seergate.attach(model, gates(model), token_budget=2 * BLOCK, correction=Rectify())
    with handle.disable():
        handle.detach()
    assert not model.model._forward_hooks and "detached" in repr(handle)
    seergate.attach(model, "streaming_llm", token_budget=2 * BLOCK).detach()


def test_repr():
    model = tiny_model("qwen3")
    with seergate.attached(model, "oracle", token_budget=2 * BLOCK, block_size=BLOCK) as handle:
        assert repr(handle).startswith("<Handle: Oracle(token_budget=")
        assert repr(handle).endswith("attached, 2 layers of Qwen3ForCausalLM>")


def test_gates_saved_beside_a_model_are_loaded_with_it(tmp_path):
    """As the base model is named; without that, the gates' own is loaded."""
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    bank = GateBank.for_model(model, GateConfig(BLOCK, 16))
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.v_proj.weight.mul_(2)
    with seergate.attached(model, bank, token_budget=2 * BLOCK):
        model.save_pretrained(tmp_path / "saved")
        bank.save_pretrained(tmp_path / "saved" / "gates")
    for options, expected in (({"base_model": tmp_path / "saved"}, True), ({}, False)):
        loaded = seergate.load(tmp_path / "saved", subfolder="gates", **options)
        assert torch.equal(loaded.model.layers[0].self_attn.v_proj.weight, weight) == expected
