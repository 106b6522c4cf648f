"""What a handle tells of itself, and what it leaves behind."""

import threading
import time
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import seergate
from seergate import GateBank, GateConfig, Rectify
from tests.decode.test_decode import BLOCK, gates
from tests.support.models import prompt, tiny_model
from tests.support.running import refused


def test_the_plain_model_goes_on_with_a_cache_that_holds_everything(model):
    held, evicted = DynamicCache(), DynamicCache()
    for method, cache in ((gates(model), held), ("streaming_llm", evicted)):
        with seergate.attached(model, method, token_budget=2 * BLOCK), torch.no_grad():
            model(prompt(30), past_key_values=cache)
    model(prompt(1), past_key_values=held)
    refused("which evicted from it; start a new one", model, prompt(1), past_key_values=evicted)


def test_a_correction_is_detached_too(model):
    plain = model.generate(prompt(45), max_new_tokens=12)
    handle = seergate.attach(model, gates(model), token_budget=2 * BLOCK, correction=Rectify(4))
    model.generate(prompt(45), max_new_tokens=12)
    shown = repr(handle)
    assert shown.startswith("<Handle: Gate(") and shown.endswith("attached, 2 layers of Qwen3ForCausalLM>")
    assert handle.stats()["rectification"]["passes"] > 0
    handle.detach()
    assert not model.model._forward_hooks and "detached" in repr(handle)
    assert torch.equal(model.generate(prompt(45), max_new_tokens=12), plain)
    seergate.attach(model, "streaming_llm", token_budget=2 * BLOCK).detach()


@torch.no_grad()
@pytest.mark.parametrize("streams", [True, False])
def test_a_method_that_is_detached_while_another_thread_generates(model, streams):
    """A streamer ends before its `generate` does: detaching waits. If generation goes on, it warns."""
    last, streamer, texts = threading.Event(), Mock(), []
    streamer.end = last.set

    def wait(ids, scores, **_):
        return (not streams and bool(last.set())) or (not streams and time.sleep(2) is not None)

    handle = seergate.attach(model, "quest", token_budget=32)
    options = {"max_new_tokens": 4, "stopping_criteria": [wait]} | ({"streamer": streamer} if streams else {})
    thread = threading.Thread(target=lambda: texts.append(model.generate(prompt(40), **options)))
    thread.start()
    assert last.wait(60)
    with nullcontext() if streams else pytest.warns(UserWarning, match="another thread is in the model's generate"):
        handle.detach()
    thread.join()
    assert len(texts) == 1 and "generate" not in vars(model) and not handle.passes.generate_threads


def test_a_generate_that_a_user_has_replaced_is_called_and_restored(model):
    model.generate = mine = Mock(return_value=1)
    with seergate.attached(model, "quest", token_budget=32):
        assert model.generate(2) == 1
    assert model.generate is mine and mine.call_args.args == (2,)
    del model.generate


def test_a_cache_for_fewer_layers_is_refused(model):
    cache = DynamicCache(config=model.config)
    del cache.layers[1:]
    with seergate.attached(model, "quest", token_budget=32):
        refused("has 1 layers, fewer than the model", model, prompt(20), past_key_values=cache)


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


def test_a_rope_that_overwrites_its_input_is_refused(monkeypatch):
    """Liger's kernel, which is Triton's."""
    from transformers.models.qwen3 import modeling_qwen3

    def rotated(q, k, cos, sin):
        raise AssertionError("not called")

    rotated.__module__ = "liger_kernel.transformers.rope"
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotated)
    refused("Liger's RoPE overwrites .* rope=False", seergate.attach, tiny_model("qwen3"), "quest", token_budget=64)
