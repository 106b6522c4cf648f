"""Cases that a review of the decode engine brought up: each was wrong once."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import DecodeConfig, GateBank, GateConfig, SeergateError, methods
from seergate.hf.call import ATTENTION_NAME
from seergate.models import families
from tests.host.test_decode import BLOCK, all_methods, gates
from tests.models import FAMILIES, left_padded, prompt, tiny_model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_budget_for_everything_is_the_plain_model_in_every_family(family):
    """Also in layers that do not rotate, or normalise after rotating."""
    model = tiny_model(family)
    batch = left_padded([prompt(19, 1), prompt(11, 2)])
    plain = model.generate(**batch, max_new_tokens=10, return_dict_in_generate=True, output_logits=True)
    kind = families.rope_kind(model.config.get_text_config(), families.full_attention_modules(model)[0][1])
    for method in all_methods(model, 4096):
        if method.name == "streaming_llm" and kind == "other":
            with pytest.raises(SeergateError, match="re-positions keys"):
                seergate.attach(model, method)
            continue
        with seergate.attached(model, method):
            found = model.generate(**batch, max_new_tokens=10, return_dict_in_generate=True, output_logits=True)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(plain.logits), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "gemma4_text"])
def test_deep_crops_that_cannot_be_undone_are_refused(family):
    model = tiny_model(family)
    bank = gates(model, gate_dim=families.head_dim_of(model))
    with seergate.attached(model, bank, token_budget=2 * BLOCK):
        cache = DynamicCache()
        model(input_ids=prompt(60), past_key_values=cache)
        with pytest.raises(SeergateError, match="cannot be re-positioned"):
            cache.crop(-31)


def test_a_deep_crop_in_a_layer_without_rope():
    model = tiny_model("cohere2")
    method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
    layer = method.bank.geometry.layers[0]
    with seergate.attached(model, method):
        cropped, straight = DynamicCache(), DynamicCache()
        model(input_ids=prompt(60, 1), past_key_values=cropped)
        cropped.layers[layer].crop(-35)
        model(input_ids=prompt(60, 1)[:, :25], past_key_values=straight)
        one, other = (cache.layers[layer].state.rows["recent"][:, :, 24 % 16] for cache in (cropped, straight))
    torch.testing.assert_close(one, other)


def test_a_deep_crop_of_padded_rows_whose_positions_were_not_given():
    """Without position_ids transformers counts padding: the rows are rotated by more than their content says."""
    model = tiny_model("qwen3")
    batch = left_padded([prompt(60, 1), prompt(52, 2)])
    with seergate.attached(model, gates(model), token_budget=2 * BLOCK):
        raw = []
        for length, removed in ((60, 29), (31, 0)):
            cache = DynamicCache()
            model(**{name: tensor[:, :length] for name, tensor in batch.items()}, past_key_values=cache)
            cache.crop(-removed)
            raw.append(cache.layers[0].state.rows["recent"])
    for row, end in ((0, 31), (1, 23)):
        slots = torch.arange(end - end % BLOCK, end) % (2 * BLOCK)
        torch.testing.assert_close(raw[0][row, :, slots], raw[1][row, :, slots], rtol=1e-4, atol=1e-5)


def test_an_emptied_cache_may_serve_another_method_and_batch():
    model = tiny_model("qwen3")
    cache = DynamicCache()
    with seergate.attached(model, "quest", token_budget=32, block_size=16, dense_layers=()):
        model(input_ids=prompt(40), past_key_values=cache)
    for empty in (cache.reset, lambda: cache.crop(-41)):
        with seergate.attached(model, "oracle", token_budget=16, block_size=8):
            empty()
            fresh, results = DynamicCache(), []
            for used in (cache, fresh):
                model(input_ids=prompt(40).expand(2, -1), past_key_values=used)
                results.append(model(input_ids=prompt(1).expand(2, -1), past_key_values=used).logits)
        assert torch.equal(*results)


def test_the_plain_model_cannot_continue_where_something_was_evicted():
    model = tiny_model("qwen3")
    cache = DynamicCache()
    with seergate.attached(model, "streaming_llm", token_budget=16):
        model(input_ids=prompt(40), past_key_values=cache)
    with pytest.raises(SeergateError, match="evicted"):
        model(input_ids=prompt(1), past_key_values=cache)


def test_gates_of_a_model_with_the_same_heads_are_refused():
    model = tiny_model("qwen3")
    bank = gates(model)
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    for options, message in (
        ({"hidden_size": 32}, "hidden_size is 32"),
        ({"num_hidden_layers": 3}, "num_layers is 3"),
        (theta, "RoPE frequencies"),
    ):
        with pytest.raises(SeergateError, match=message):
            seergate.attach(tiny_model("qwen3", **options), bank)


def test_a_masked_token_in_the_middle_of_decoding_is_not_stored():
    model = tiny_model("qwen3")
    ids, mask = prompt(20, 1).expand(2, -1), torch.ones(2, 20, dtype=torch.long)
    results = []
    for attach in (True, False):
        cache = DynamicCache()
        handle = seergate.attach(model, "dense") if attach else None
        for i in range(18, 20):
            if i == 18:
                model(input_ids=ids[:, :18], attention_mask=mask[:, :18], past_key_values=cache)
            paused = mask[:, : i + 1].clone()
            paused[1, 18] = 0
            out = model(input_ids=ids[:, i : i + 1], attention_mask=paused, past_key_values=cache).logits
        results.append(out)
        if handle is not None:
            handle.detach()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gate", "quest", "oracle", "random", "dense"])
def test_padding_that_arrives_token_by_token(name):
    """The first slots of a left-padded batch as a prompt, the rest one by one: a row may have no real token yet."""
    model = tiny_model("qwen3")
    batch = left_padded([prompt(40, 1), prompt(9, 2)])
    method = next(m for m in all_methods(model, 4096) if m.name == name)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with seergate.attached(model, method):
        cache = DynamicCache()
        for start, end in [(0, 20), *((i, i + 1) for i in range(20, 40))]:
            out = model(
                input_ids=batch["input_ids"][:, start:end],
                attention_mask=batch["attention_mask"][:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
            ).logits[:, -1]
    whole = model(**batch, position_ids=positions).logits[:, -1]
    torch.testing.assert_close(out, whole, rtol=2e-4, atol=2e-4)
    if name == "gate":
        with seergate.attached(model, method):
            straight = DynamicCache()
            model(**batch, position_ids=positions, past_key_values=straight)
        for a, b in zip(cache.layers, straight.layers, strict=True):
            torch.testing.assert_close(
                a.state.rows["kg"][0, :, :5], b.state.rows["kg"][0, :, :5], rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(
                a.state.rows["kg"][1, :, :1], b.state.rows["kg"][1, :, :1], rtol=1e-4, atol=1e-5
            )


def test_published_selection_breaks_ties_alike_in_any_batch():
    from seergate.methods.gate import published_selection

    rule = DecodeConfig(token_budget=16, compat="published")
    alone = published_selection(torch.zeros(1, 1, 4), torch.tensor([30]), 8, rule)
    padded = torch.zeros(2, 1, 9)
    together = published_selection(padded, torch.tensor([30, 70]), 8, rule)
    assert alone.indices[0, 0].tolist() == [i for i in together.indices[0, 0].tolist() if i >= 0] == [0, 1, 3]


def test_gates_accept_a_model_that_was_converted():
    model = tiny_model("qwen3")
    bank = gates(model)
    seergate.attach(model.to(torch.bfloat16), bank).detach()


def test_the_dense_implementation_sees_its_own_name():
    """transformers' FlashAttention wrapper looks up which version to run in the module's configuration."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def spy(module, *args, **kwargs):
        seen.append(module.config._attn_implementation)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("spy", spy)
    model = tiny_model("qwen3")
    model.config._attn_implementation_internal = "spy"
    with seergate.attached(model, gates(model), token_budget=16):
        model.generate(input_ids=prompt(20), max_new_tokens=2)
        assert families.full_attention_modules(model)[0][1].config._attn_implementation == ATTENTION_NAME
    assert set(seen) == {"spy"}


@pytest.mark.parametrize("name", ["gate", "quest", "streaming_llm"])
def test_autocast(name):
    model = tiny_model("llama")
    method = next(m for m in all_methods(model, 16) if m.name == name)
    with seergate.attached(model, method), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.generate(input_ids=prompt(40), max_new_tokens=12).shape == (1, 52)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_evicting_method_on_a_static_cache(implementation):
    model = tiny_model("qwen3", attn_implementation=implementation)
    batch = left_padded([prompt(30, 1), prompt(17, 2)])
    with seergate.attached(model, "streaming_llm", token_budget=16, interval=4):
        dynamic = model.generate(**batch, max_new_tokens=12)
        static = model.generate(**batch, max_new_tokens=12, cache_implementation="static")
    assert torch.equal(dynamic, static)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_an_attached_model_work(duplicate):
    model = tiny_model("qwen3")
    with seergate.attached(model, gates(model), token_budget=16):
        expected = model.generate(input_ids=prompt(40), max_new_tokens=8)
        twin = duplicate(model)
        assert torch.equal(twin.generate(input_ids=prompt(40), max_new_tokens=8), expected)
    assert torch.equal(twin.generate(input_ids=prompt(40), max_new_tokens=8), expected)


def test_streaming_llm_reports_what_it_attends_and_the_prompt_it_held():
    model = tiny_model("qwen3")
    with seergate.attached(model, "streaming_llm", token_budget=20, interval=16) as handle:
        model.generate(input_ids=prompt(2000), max_new_tokens=40)
        stats = handle.stats()
    seen = [2000 + i for i in range(1, 40)]
    assert stats["density"] == pytest.approx(20 * 39 / sum(seen))
    per_token = 2 * 16 * 4 * 2 * 2  # key and value, width, bytes, heads, layers
    assert stats["bytes_read_per_step"] == pytest.approx(20 * per_token)
    assert stats["resident_bytes_peak"] >= 2000 * per_token
    assert stats["resident_bytes_mean"] < 1000 * per_token


def test_padding_does_not_make_decoding_copy_the_cache(monkeypatch):
    from seergate.cache.layer import GatedLayer

    model = tiny_model("qwen3")
    copies = []
    original = GatedLayer.slot_view
    monkeypatch.setattr(GatedLayer, "slot_view", lambda self: copies.append(1) or original(self))
    with seergate.attached(model, gates(model), token_budget=16):
        model.generate(**left_padded([prompt(30, 1), prompt(17, 2)]), max_new_tokens=12)
    assert not copies


def test_load_takes_every_decode_option(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "base")
    base = type(model).from_pretrained(tmp_path / "base")
    GateBank.for_model(base, GateConfig(8, 16)).save_pretrained(tmp_path / "gates")
    loaded = seergate.load(tmp_path / "gates", token_budget=16, dense_layers=(0,), compat="published")
    method = seergate.handle_of(loaded).method
    assert (method.token_budget, method.dense_layers, method.compat) == (16, (0,), "published")
    other = tiny_model("qwen3", hidden_size=32)
    other.save_pretrained(tmp_path / "other")
    for options, message in (
        ({"base_model": tmp_path / "nowhere"}, "could not be loaded"),
        ({"base_model": "checkpoints/nope"}, "could not be loaded"),
        ({"base_model": tmp_path / "other"}, "another model.*hidden_size is 32"),
        ({"config": DecodeConfig(), "top_p": 0.5}, "config is given beside top_p"),
        ({"token_budget": 7}, "token_budget is 7"),
    ):
        with pytest.raises(ValueError, match=message):
            seergate.load(tmp_path / "gates", **options)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: methods.StreamingLLM(token_budget=20.5), "token_budget is 20.5"),
        (lambda: methods.StreamingLLM(token_budget="x"), "token_budget is 'x'"),
        (lambda: methods.Oracle(block_size=True), "block_size is True"),
        (lambda: methods.Gate(bank=None), "bank is a NoneType; it must be a GateBank"),
        (lambda: methods.Gate(bank=gates(tiny_model("qwen3")), block_size=64), "block_size is 64.*blocks of 8"),
        (lambda: methods.Random(seed="a"), "seed is 'a'"),
        (lambda: DecodeConfig(dense_layers=3), "dense_layers is 3"),
        (lambda: DecodeConfig(top_p=0.9, compat="published"), "neither top_p.*or pass compat=None"),
        (lambda: DecodeConfig(compat="publishd"), "compat is 'publishd'"),
        (lambda: GateConfig(k_pooling=None), "k_pooling is None"),
        (lambda: GateConfig(k_pooling=[["max"]]), "k_pooling is"),
        (lambda: seergate.attach(tiny_model("qwen3"), "oracle", dense_layers=(99,)), r"dense_layers names \[99\]"),
        (lambda: seergate.attach(tiny_model("qwen3"), "quest", DecodeConfig()), "goes with gates"),
    ],
)
def test_refusals(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()
