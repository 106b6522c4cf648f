"""Adapters: saving and loading, alone and with a base model; an error message for every fault."""

import errno
import os
import re
import stat
import warnings
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import seergate
from seergate import GateBank, GateConfig, SeergateError
from seergate.hub import hub_call
from tests.gates.conftest import CONFIG, GONE, WEIGHTS, same, set_entries
from tests.support.models import prompt, tiny_model
from tests.support.running import invalid, refused


@pytest.fixture
def path(bank, tmp_path):
    """The directory of saved gates; their base model is in `base` beside it."""
    bank.training_record = {"steps": 3}
    bank.save_pretrained(tmp_path / "gates")
    return tmp_path / "gates"


def change(path, what, value):
    """Set a file's bytes, a tensor (without the SHA-256), or an entry such as ``model.layers`` of the record."""
    if what in (CONFIG, WEIGHTS):
        return (path / what).unlink() if value is GONE else (path / what).write_bytes(value)
    if tensors := load_file(path / WEIGHTS) if what.startswith("layers.") else {}:
        save_file({**{k: v for k, v in tensors.items() if k != what}, **({} if value is GONE else {what: value})},
                  path / WEIGHTS)  # fmt: skip
        what, value = "files", GONE
    return set_entries(path / CONFIG, {what: value})


def test_fresh_and_loaded_gates_ignore_the_default_dtype_and_device(bank, path):
    model, before = tiny_model("qwen3"), torch.get_default_dtype()
    torch.manual_seed(0)
    expected = GateBank.for_model(model, GateConfig(8, 16))
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        torch.manual_seed(0)
        fresh, loaded = GateBank.for_model(model, GateConfig(8, 16)), GateBank.from_pretrained(path)
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert same(fresh, expected) and same(loaded, bank)
    assert loaded.gate(0).inv_freq.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_round_trip(bank, path, dtype):
    """``None``: gates of two dtypes are saved in the wider one, since a scorer computes in one dtype."""
    bank.to(dtype or torch.float32)
    for _, gate in bank if dtype is None else ():
        gate.k_proj.bfloat16()
    bank.save_pretrained(path)
    for again in (GateBank.from_pretrained(path), bank.derived()):
        assert again.geometry == bank.geometry and again.training_record == {"steps": 3}
        assert same(again, bank.cast(dtype or torch.float32))
        assert all(torch.equal(gate.inv_freq, bank.gate(layer).inv_freq) for layer, gate in again)
    assert bank.gate(0).k_proj.weight.dtype == (dtype or torch.bfloat16), "the bank itself is not changed"
    assert sorted(p.name for p in path.iterdir()) == ["README.md", "config.json", CONFIG, WEIGHTS]
    keys = load_file(path / WEIGHTS).keys()
    assert keys == {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("q_proj", "k_proj", "q_norm", "k_norm")}


def test_base_and_gates_are_loaded_together_and_saved_apart(bank, path, tmp_path):
    model = seergate.load(path, token_budget=16, use_cache=True, max_position_embeddings=4000)
    assert model.config.max_position_embeddings == 4000, "fields of the model's configuration are options, too"
    direct = tiny_model("qwen3")
    with seergate.attached(direct, bank, token_budget=16):
        expected = direct.generate(input_ids=prompt(60), max_new_tokens=20)
        direct.save_pretrained(tmp_path / "out")
    assert seergate.handle_of(model).stats()["method"] == "gate"
    assert torch.equal(model.generate(input_ids=prompt(60), max_new_tokens=20), expected)
    seergate.handle_of(model).detach()
    refused("no method is attached", seergate.handle_of, model)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() <= direct.state_dict().keys()
    assert "seergate" not in (tmp_path / "out" / "config.json").read_text()
    assert seergate.load(path, token_budget=16, pad_token_id=None, dtype=None).config.pad_token_id is None
    with patch("seergate.models.gated_model.load_base") as read:
        refused("flex_attention", seergate.load, path, token_budget=16, attn_implementation="flex_attention")
    assert not read.called, "before the weights are read"
    for kind in (AutoModelForCausalLM, AutoConfig):
        invalid(r"load them with seergate\.load", kind.from_pretrained, path)
    config = (tmp_path / "base" / "config.json").read_bytes()
    bank.save_pretrained(tmp_path / "base")
    assert (tmp_path / "base" / "config.json").read_bytes() == config, "a model's own is kept"
    both = seergate.load(tmp_path / "base", token_budget=16)
    assert torch.equal(both.get_input_embeddings().weight, direct.get_input_embeddings().weight)


@pytest.mark.parametrize("quantised", [False, True])
def test_loading_with_options_is_attaching_to_a_model_loaded_with_them(bank, path, quantised):
    """Device map, dtype and quantisation: the same logits, which differ from those without and of dense decoding."""
    options: dict = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    if quantised:
        quantization, transformers = pytest.importorskip("torchao.quantization"), pytest.importorskip("transformers")
        options["quantization_config"] = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    logits = {"max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}

    def scores(model):
        return torch.stack(model.generate(input_ids=prompt(60), **logits).logits)

    model = seergate.load(path, token_budget=16, **options)
    direct = AutoModelForCausalLM.from_pretrained(path.parent / "base", **options).eval()
    dense = scores(direct)
    with seergate.attached(direct, bank, token_budget=16):
        assert torch.equal(scores(direct), scores(model)) and not torch.equal(dense, scores(model))
    plain = {"dtype": torch.bfloat16 if quantised else torch.float32}
    assert not torch.equal(scores(seergate.load(path, token_budget=16, **plain)).float(), scores(model).float())
    assert type(model.get_decoder().layers[0].self_attn.q_proj.weight).__name__ == "Int8Tensor" or not quantised
    assert {p.dtype for p in seergate.handle_of(model).method.bank.parameters()} == {torch.float32}
    # So the map does reach transformers.
    refused("could not be loaded: .*nowhere", seergate.load, path, token_budget=16, device_map={"": "nowhere"})


def test_a_newer_adapter_warns_and_loads(bank, path):
    """One warning for each, and none for a sound adapter."""
    before = (path / CONFIG).read_bytes()
    for what, value, message in (
        ("gate.sparkle", 1, "ignoring unknown sparkle$"),
        ("model.glitter", 1, "ignoring unknown glitter$"),
        ("decode_defaults", {"sparkle": 1}, "ignoring unknown sparkle$"),
        ("sparkles", {}, "ignoring unknown sparkles$"),
        ("schema_version", 2, "has schema_version 2; this seergate knows 1"),
        ("model.glitter", GONE, None),
    ):
        (path / CONFIG).write_bytes(before)
        change(path, what, value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert GateBank.from_pretrained(path).geometry == bank.geometry
        matches = [bool(re.search(message or "", str(entry.message))) for entry in caught]
        assert matches == ([True] if message else []), what


@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        (WEIGHTS, GONE, "holds no gate_model.safetensors"),
        (CONFIG, GONE, "holds no gate_config.json"),
        (CONFIG, b"{", "not readable JSON"),
        (CONFIG, b"[]", "must be a JSON object"),
        (WEIGHTS, b"\0" * 100, "its SHA-256 is another"),
        ("files", [], "its SHA-256 is another"),
        ("schema_version", "x", "schema_version 'x'"),
        ("gate.block_size", 0, "block_size is 0"),
        ("gate.gate_dim", 8, "inv_freq has 8 frequencies"),
        ("model.num_heads", GONE, "num_heads"),
        ("model.num_kv_heads", 3, "num_heads is 4"),
        ("model.layers", [0], "layers.1.k_norm.weight belongs to no gate"),
        ("model.layers", [0, 1, 2], "layers.2.k_norm.weight is missing"),
        ("layers.0.q_norm.weight", GONE, "layers.0.q_norm.weight is missing"),
        ("layers.0.k_proj.weight", torch.zeros(2, 3, 16), r"has shape \(2, 3, 16\); it must be \(2, 48, 16\)"),
        ("results", {"a": 1}, "results is .*; it must be a list"),
        ("results", [1], "results holds 1"),
        ("results", [{"accuracy": "high"}], "accuracy of a result is 'high'"),
        ("results", [{"accuracy": 10**400}], "accuracy of a result is 1000.*; it must be a number"),
        ("license", {"license": 1}, "license must be an object of texts"),
        ("training", [], "training is .*; it must be an object"),
        ("decode_defaults", {"token_budget": 0}, "gate_config.json: token_budget is 0"),
    ],
)
def test_damage_is_named(path, what, value, message):
    change(path, what, value)
    refused(message, GateBank.from_pretrained, path)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's own
def test_peft_and_gates_live_together(bank, path):
    """Gates on a LoRA model, and LoRA on a model with gates; neither loads the files of the other."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)  # older ones are refused by transformers
    random = peft.LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False)
    lora = peft.get_peft_model(tiny_model("qwen3"), random)
    lora.save_pretrained(path.parent / "lora")
    refused("looks like an adapter of PEFT", GateBank.from_pretrained, path.parent / "lora")
    with pytest.raises(ValueError, match="adapter_config.json|Can't find"):
        peft.PeftModel.from_pretrained(tiny_model("qwen3"), path)
    merged = lora.merge_and_unload()
    with seergate.attached(merged, bank, token_budget=16) as handle:
        merged.generate(input_ids=prompt(60), max_new_tokens=4)
        assert handle.stats()["method"] == "gate"
    model = seergate.load(path, token_budget=16)
    model.add_adapter(peft.LoraConfig(target_modules=["v_proj"], r=2))
    assert model.generate(input_ids=prompt(60), max_new_tokens=4).shape == (1, 64)


def test_file_systems_without_fsync_of_directories(bank, tmp_path, monkeypatch):
    """Such as CIFS, gocryptfs and rclone's: what was written is there."""

    def fsync(handle, of_file=os.fsync):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        of_file(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    bank.save_pretrained(tmp_path / "gates")
    assert same(GateBank.from_pretrained(tmp_path / "gates"), bank)


def test_a_base_in_a_relative_directory_is_found_from_elsewhere(bank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bank = GateBank.for_model(AutoModelForCausalLM.from_pretrained("base"), GateConfig(8, 16))
    assert bank.geometry.base_model == "base"
    bank.save_pretrained("gates")
    with seergate.attached(tiny_model("qwen3"), "gates", token_budget=16) as handle:  # a name without a slash
        assert same(handle.method.bank, bank)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert seergate.load("../gates", token_budget=16).config.hidden_size == 64
    (tmp_path / "base").rename(tmp_path / "moved")
    refused("which is not here; pass base_model=", seergate.load, "../gates", token_budget=16)
    assert seergate.load("../gates", token_budget=16, base_model=tmp_path / "moved").config.hidden_size == 64


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen2", {"num_attention_heads": 4}, "model_type is 'qwen2' in the model and 'qwen3' in the gates"),
        ("qwen3", {"num_key_value_heads": 1}, "num_kv_heads is 1 in the model and 2 in the gates"),
        ("qwen3", {"hidden_size": 32}, "hidden_size is 32 in the model and 64 in the gates"),
        ("qwen3", {"num_hidden_layers": 3}, "num_layers is 3 in the model and 2 in the gates"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "the model's RoPE frequencies"),
    ],
)
def test_another_base_is_refused_field_by_field(bank, path, tmp_path, family, options, message):
    model = tiny_model(family, **options)
    refused(message, seergate.attach, model, bank, token_budget=16)
    model.save_pretrained(tmp_path / "other")
    refused(message, seergate.load, path, token_budget=16, base_model=tmp_path / "other")


def test_arguments_that_cannot_be(model, bank, path, tmp_path):
    """Wrong decode options are named before the gates are read or the model is loaded."""
    (tmp_path / "file").write_text("")
    ids, read, loss = torch.ones(1, 40, dtype=torch.long), GateBank.from_pretrained, bank.distill_loss
    unserialisable = bank.derived()
    unserialisable.training_record = {"model": torch.nn.Linear(1, 1)}
    model.config.save_pretrained(weightless := tmp_path / "weightless")
    before = (path / CONFIG).read_bytes()
    no_model, unknown = "it must be a causal language model of transformers", "no decode option '.*'; did you mean"
    for call, arguments, options, message in (
        *((GateBank.for_model, (wrong,), {}, no_model) for wrong in (None, "Qwen/Qwen3-8B", torch.nn.Linear(2, 2))),
        (GateBank.for_model, (model, {"block_size": 8}), {}, "config is a dict; it must be a GateConfig"),
        (seergate.attach, (None, "quest"), {}, no_model),
        (loss, (None,), {"input_ids": ids}, no_model),
        (loss, (model,), {"input_ids": ids + 127}, r"input_ids holds 128; the model has the ids 0\.\.127"),
        (loss, (model,), {"input_ids": -ids}, "input_ids holds -1"),
        (loss, (model,), {"input_ids": ids.float()}, "input_ids is torch.float32"),
        (loss, (model,), {"input_ids": ids.bool()}, "input_ids is torch.bool"),
        (loss, (model,), {"input_ids": ids[:, :0]}, "it must hold token ids"),
        (loss, (model,), {"input_ids": [1, 2]}, "input_ids is a list"),
        (loss, (model,), {"input_ids": ids, "cu_seqlens": [0, 40]}, "cu_seqlens is list; it must be an int32 tensor"),
        (loss, (model,), {"input_ids": ids, "cu_seqlens": torch.ones(2)}, "cu_seqlens is torch.float32"),
        (read, (tmp_path / "nowhere",), {}, "there is no directory .*nowhere"),
        (read, (tmp_path / "file",), {}, "is a file"),
        (read, ("runs/none",), {}, r"there is no directory runs/none, and .*: the Hub could not be asked \("),
        *((read, (name,), {}, "there is no directory") for name in ("x" * 5000, "nul\0", "org/name/more")),
        (bank.save_pretrained, (tmp_path / "file",), {}, "is a file"),
        (unserialisable.save_pretrained, (path,), {}, "not JSON"),
        (seergate.attach, (model, "runs/none"), {"budget": 16}, f"{unknown} 'token_budget'"),
        (seergate.attach, (model, "runs/none"), {"token_budget": -3}, "token_budget is -3"),
        (seergate.attach, (model, "runs/none"), {"token_budget": 16}, "runs/none"),
        (seergate.load, ("org/does-not-exist",), {"token_budget": -3}, "token_budget is -3"),
        (seergate.load, (path,), {"tokenbudget": 16}, f"{unknown} 'token_budget'"),
        (seergate.load, (path,), {"method": "quest", "token_budget": 16}, "no decode option 'method'; there are"),
        (seergate.load, (path,), {"quantization_config": 4, "token_budget": 16}, "could not be loaded"),
        (seergate.load, (path,), {"base_model": "/nope"}, "there is no such directory"),
        (seergate.load, (path,), {"base_model": weightless, "dense_layers": (9,)}, r"dense_layers names \[9\]"),
        (seergate.load, (path,), {"base_model": weightless, "storage": "paged"}, "storage is 'paged'; it must be"),
        (seergate.load, (path,), {"base_model": weightless, "correction": 4}, "correction is 4; it must be"),
        (seergate.load, (path,), {"config": {"token_budget": 16}}, "config is a dict; it must be a DecodeConfig"),
        (seergate.load, (path,), {"config": seergate.DecodeConfig(), "top_p": 0.5}, "config is given beside top_p"),
        (seergate.load, (path,), {"revision": "x"}, "revision is 'x', but .* is a directory"),
    ):
        invalid(message, call, *arguments, **options)
    assert (path / CONFIG).read_bytes() == before


def test_why_the_hub_gave_nothing_is_told_of_errors_that_are_each_other_s_cause():
    unasked = "the Hub could not be asked (no route)"
    for cause, reason in ((ConnectionError("no route"), unasked), (KeyError(), "none")):
        error = ValueError("none")
        cause.__context__ = error
        with pytest.raises(SeergateError, match=re.escape(f"no rows: {reason}")), hub_call("no rows", asks=False):
            raise error from cause
