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


def test_repr_and_summary():
    model = tiny_model("qwen3")
    with seergate.attached(model, "oracle", token_budget=2 * BLOCK, block_size=BLOCK) as handle:
        assert repr(handle).startswith("<Handle: Oracle(token_budget=")
        assert repr(handle).endswith("attached, 2 layers of Qwen3ForCausalLM>")
        assert handle.summary() == repr(handle), "nothing has been read"
        model.generate(**INPUTS, max_new_tokens=NEW)
        stats, summary = handle.stats(), handle.summary()
    assert f"11 decode steps read {100 * stats['density']:.1f} % of the tokens before them" in summary
    assert f"layer 1: {100 * stats['density_per_layer'][1]:.1f} %" in summary
    assert f"{stats['resident_bytes_peak'] / 1e6:.3g} MB held at most" in summary


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_is_saved_with_its_gates(tmp_path, compiled):
    """Loading the gates beside a model gives this model, not the one that they name."""
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    bank = GateBank.for_model(model, GateConfig(BLOCK, 16))
    assert bank.geometry.base_model == str(tmp_path / "base")
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.v_proj.weight.mul_(2)
    used = torch.compile(model, backend="eager") if compiled else model
    with seergate.attached(used, bank, token_budget=2 * BLOCK):
        used.save_pretrained(tmp_path / "rank1", is_main_process=False)
        used.save_pretrained(tmp_path / "saved")
        with pytest.raises(SeergateError, match=r"without its gates; use model\.push_to_hub"):
            used.save_pretrained(tmp_path / "pushed", push_to_hub=True)
    assert not (tmp_path / "rank1" / "gates").exists() and "save_pretrained" not in vars(model)
    for loaded in (
        seergate.load(tmp_path / "saved" / "gates"),
        seergate.load(tmp_path / "saved", subfolder="gates"),
    ):
        assert torch.equal(loaded.model.layers[0].self_attn.v_proj.weight, weight)
    named = seergate.load(tmp_path / "saved" / "gates", base_model=tmp_path / "base")
    assert not torch.equal(named.model.layers[0].self_attn.v_proj.weight, weight)
    for config in ('{"port": 80}', '{"model_type": "llama"}'):  # of something else than the gates' model
        (tmp_path / "saved" / "config.json").write_text(config)
        other = seergate.load(tmp_path / "saved" / "gates")
        assert not torch.equal(other.model.layers[0].self_attn.v_proj.weight, weight)
