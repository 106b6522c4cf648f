"""Adapters: a round trip changes nothing, and every fault is named in one sentence."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.peft import MIN_PEFT_VERSION

import seergate
from seergate import GateBank, GateConfig, SeergateError
from seergate.hub import hub_call
from tests.support.models import prompt, tiny_model


@pytest.fixture
def saved(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "base")
    base = type(model).from_pretrained(tmp_path / "base")
    bank = GateBank.for_model(base, GateConfig(8, 16, ("avg", "max")))
    bank.training_record = {"steps": 3}
    bank.save_pretrained(tmp_path / "gates")
    return bank, tmp_path / "gates"


def edit(path, change):
    record = json.loads((path / "gate_config.json").read_text())
    change(record)
    (path / "gate_config.json").write_text(json.dumps(record))


def edit_tensors(path, change):
    tensors = load_file(path / "gate_model.safetensors")
    change(tensors)
    save_file(tensors, path / "gate_model.safetensors")
    edit(path, lambda record: record.pop("files"))


def test_fresh_and_loaded_gates_ignore_the_default_dtype_and_device(saved, monkeypatch):
    bank, path = saved
    model, before = tiny_model("qwen3"), torch.get_default_dtype()
    torch.manual_seed(0)
    expected = GateBank.for_model(model, GateConfig(8, 16)).state_dict()
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        torch.manual_seed(0)
        fresh, loaded = GateBank.for_model(model, GateConfig(8, 16)), GateBank.from_pretrained(path)
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    for name, tensor in fresh.state_dict().items():
        assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu") and torch.equal(tensor, expected[name])
    for found, tensor in zip(loaded.parameters(), bank.parameters(), strict=True):
        assert found.device.type == "cpu" and torch.equal(found, tensor)
    assert loaded.gate(0).inv_freq.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(saved, dtype):
    bank, path = saved
    bank.to(dtype).save_pretrained(path)
    again = GateBank.from_pretrained(path)
    assert again.config == bank.config and again.geometry == bank.geometry and again.training_record == {"steps": 3}
    for (name, a), (other, b) in zip(bank.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and a.dtype == b.dtype and torch.equal(a, b)
    for layer, gate in again:
        assert torch.equal(gate.inv_freq, bank.gate(layer).inv_freq)
    names = ["README.md", "config.json", "gate_config.json", "gate_model.safetensors"]
    assert sorted(p.name for p in path.iterdir()) == names
    keys = load_file(path / "gate_model.safetensors").keys()
    assert keys == {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("q_proj", "k_proj", "q_norm", "k_norm")}


def test_gates_of_several_dtypes_are_saved_in_the_widest(saved):
    """Scorers compute in the dtype of their own weights, of which there must be one."""
    bank, path = saved
    for _, gate in bank:
        gate.k_proj.bfloat16()
    bank.save_pretrained(path)
    assert json.loads((path / "gate_config.json").read_text())["dtype"] == "float32"
    for again in (GateBank.from_pretrained(path), bank.derived()):
        assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
        assert torch.equal(again.gate(0).k_proj.weight, bank.gate(0).k_proj.weight.float())
    assert bank.gate(0).k_proj.weight.dtype == torch.bfloat16, "the bank itself stays as it is"


def test_load_puts_base_and_gates_together(saved):
    bank, path = saved
    model = seergate.load(path, token_budget=16, use_cache=True, max_position_embeddings=4000)
    assert model.config.max_position_embeddings == 4000, "fields of the model's configuration are options, too"
    assert seergate.handle_of(model).stats()["method"] == "gate"
    direct = tiny_model("qwen3")
    with seergate.attached(direct, bank, token_budget=16):
        expected = direct.generate(input_ids=prompt(60), max_new_tokens=20)
    assert torch.equal(model.generate(input_ids=prompt(60), max_new_tokens=20), expected)
    seergate.handle_of(model).detach()
    with pytest.raises(SeergateError, match="no method is attached"):
        seergate.handle_of(model)


def test_attach_takes_the_place_of_gates(model, saved, monkeypatch):
    bank, path = saved
    monkeypatch.chdir(path.parent)
    for place in (path, str(path), "gates"):
        with seergate.attached(model, place, token_budget=16) as handle:
            assert handle.method.token_budget == 16 and isinstance(handle.method.bank, GateBank)
            assert handle.method.bank.geometry == bank.geometry
    for wrong in ({"budget": 16}, {"token_budgets": 16}):  # named before the adapter is read
        with pytest.raises(SeergateError, match="no decode option '.*'; did you mean 'token_budget'"):
            seergate.attach(model, "runs/none", **wrong)
    with pytest.raises(ValueError, match="token_budget is -3"):
        seergate.attach(model, "runs/none", token_budget=-3)
    with pytest.raises(SeergateError, match="runs/none"):
        seergate.attach(model, "runs/none", token_budget=16)


def test_a_newer_adapter_warns_and_loads(saved):
    """Each entry that this seergate does not know is named, and nothing else is complained about."""
    bank, path = saved
    before = (path / "gate_config.json").read_text()
    for change, message in (
        (lambda record: record["gate"].update(sparkle=1), "ignoring unknown sparkle$"),
        (lambda record: record["model"].update(glitter=1), "ignoring unknown glitter$"),
        (lambda record: record.update(sparkles={}, glow=None), "ignoring unknown glow, sparkles$"),
        (lambda record: record.update(schema_version=2), "has schema_version 2; this seergate knows 1"),
    ):
        (path / "gate_config.json").write_text(before)
        edit(path, change)
        with pytest.warns(UserWarning) as caught:
            assert GateBank.from_pretrained(path).geometry == bank.geometry
        assert [bool(re.search(message, str(entry.message))) for entry in caught] == [True], message
    (path / "gate_config.json").write_text(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GateBank.from_pretrained(path)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: (path / "gate_model.safetensors").unlink(), "holds no gate_model.safetensors"),
        (lambda path: (path / "gate_config.json").unlink(), "holds no gate_config.json"),
        (lambda path: (path / "gate_config.json").write_text("{"), "not readable JSON"),
        (lambda path: (path / "gate_config.json").write_text("[]"), "must be a JSON object"),
        (lambda path: edit(path, lambda r: r.update(schema_version="x")), "schema_version 'x'"),
        (lambda path: edit(path, lambda r: r["gate"].update(block_size=0)), "block_size is 0"),
        (lambda path: edit(path, lambda r: r["model"].pop("num_heads")), "num_heads"),
        (lambda path: edit(path, lambda r: r["model"].update(num_kv_heads=3)), "num_heads is 4"),
        (
            lambda path: edit(path, lambda r: r["model"].update(layers=[0])),
            "layers.1.k_norm.weight belongs to no gate",
        ),
        (lambda path: edit(path, lambda r: r["model"].update(layers=[0, 1, 2])), "layers.2.k_norm.weight is missing"),
        (lambda path: edit(path, lambda r: r["gate"].update(gate_dim=8)), "inv_freq has 8 frequencies"),
        (
            lambda path: edit_tensors(path, lambda t: t.pop("layers.0.q_norm.weight")),
            "layers.0.q_norm.weight is missing",
        ),
        (
            lambda path: edit_tensors(path, lambda t: t.update({"layers.0.k_proj.weight": torch.zeros(2, 3, 16)})),
            r"layers.0.k_proj.weight has shape \(2, 3, 16\); it must be \(2, 32, 16\)",
        ),
        (lambda path: (path / "gate_model.safetensors").write_bytes(b"\0" * 100), "its SHA-256 is another"),
        (
            lambda path: [
                (path / "gate_model.safetensors").write_bytes(b"\0" * 100),
                edit(path, lambda record: record.pop("files")),
            ],
            "not a readable safetensors",
        ),
    ],
)
def test_damage_is_named(saved, harm, message):
    _, path = saved
    harm(path)
    with pytest.raises(SeergateError, match=message):
        GateBank.from_pretrained(path)


def test_missing_places(tmp_path):
    (tmp_path / "file").write_text("")
    for source, message in (
        (tmp_path / "nowhere", "there is no directory .*nowhere"),
        ("runs/none", r"there is no directory runs/none, and .*: the Hub could not be asked \("),
        (tmp_path / "file", "is a file"),
        ("org/does-not-exist", "could not be read from the Hub"),
    ):
        with pytest.raises(SeergateError, match=message):
            GateBank.from_pretrained(source)
    with pytest.raises(SeergateError, match="is a file"):
        GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16)).save_pretrained(tmp_path / "file")


def test_saving_the_base_never_leaks_gates(model, saved, tmp_path):
    bank, _ = saved
    with seergate.attached(model, bank, token_budget=16):
        model.save_pretrained(tmp_path / "out")
    plain = load_file(tmp_path / "out" / "model.safetensors")
    assert plain.keys() <= tiny_model("qwen3").state_dict().keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "seergate" not in json.dumps(config)


def test_saving_a_model_with_gates_saves_both(saved, tmp_path):
    bank, _ = saved
    model = tiny_model("qwen3")
    own = model.save_pretrained
    with seergate.attached(model, bank, token_budget=16):
        model.save_pretrained(tmp_path / "out")
    assert model.save_pretrained == own, "detached, it is the model's own again"
    again = type(model).from_pretrained(tmp_path / "out")
    with seergate.attached(again, tmp_path / "out" / "gates", token_budget=16) as handle:
        found, kept = handle.method.bank.state_dict(), bank.state_dict()
        assert found.keys() == kept.keys() and all(torch.equal(found[name], kept[name]) for name in kept)


def test_transformers_says_what_to_do(saved):
    _, path = saved
    from transformers import AutoConfig, AutoModelForCausalLM

    for kind in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(ValueError, match=r"load them with seergate\.load"):
            kind.from_pretrained(path)


def test_a_models_own_configuration_is_left_alone(saved, tmp_path):
    bank, _ = saved
    before = (tmp_path / "base" / "config.json").read_text()
    bank.save_pretrained(tmp_path / "base")
    assert (tmp_path / "base" / "config.json").read_text() == before
    assert torch.equal(GateBank.from_pretrained(tmp_path / "base").gate(0).q_proj.weight, bank.gate(0).q_proj.weight)
    model = seergate.load(tmp_path / "base", token_budget=16)
    assert torch.equal(model.get_input_embeddings().weight, tiny_model("qwen3").get_input_embeddings().weight)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's own
def test_peft_and_gates_live_together(saved):
    """A LoRA model under gates, and gates beside an adapter of PEFT: neither sees the other's files."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)  # older ones are refused by transformers
    bank, path = saved
    base = tiny_model("qwen3")
    lora = peft.get_peft_model(base, peft.LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False))
    lora.save_pretrained(path.parent / "lora")
    with pytest.raises(SeergateError, match="looks like an adapter of PEFT"):
        GateBank.from_pretrained(path.parent / "lora")
    with pytest.raises(ValueError, match="adapter_config.json|Can't find"):
        peft.PeftModel.from_pretrained(tiny_model("qwen3"), path)
    merged = lora.merge_and_unload()
    with seergate.attached(merged, bank, token_budget=16) as handle:
        merged.generate(input_ids=prompt(60), max_new_tokens=4)
        assert handle.stats()["method"] == "gate"
    model = seergate.load(path, token_budget=16)
    model.add_adapter(peft.LoraConfig(target_modules=["v_proj"], r=2))
    assert model.generate(input_ids=prompt(60), max_new_tokens=4).shape == (1, 64)


def test_a_base_in_a_relative_directory_is_found_from_elsewhere(saved, tmp_path, monkeypatch):
    _, path = saved
    monkeypatch.chdir(tmp_path)
    model = type(tiny_model("qwen3")).from_pretrained("base")
    bank = GateBank.for_model(model, GateConfig(8, 16))
    assert bank.geometry.base_model == "base"
    bank.save_pretrained("gates")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert seergate.load(path, token_budget=16).config.hidden_size == 64
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(SeergateError, match="which is not here; pass base_model="):
        seergate.load(path, token_budget=16)
    assert seergate.load(path, token_budget=16, base_model=tmp_path / "moved").config.hidden_size == 64


def test_a_shipped_base_keeps_its_short_name(tmp_path):
    from seergate.models.loading import load_base
    from seergate.paths import shipped

    bank = GateBank.for_model(load_base(shipped("checkpoints/tiny-reasoner")), GateConfig(8, 16))
    bank.save_pretrained(tmp_path)
    assert (
        json.loads((tmp_path / "gate_config.json").read_text())["model"]["base_model"] == "checkpoints/tiny-reasoner"
    )


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
def test_another_base_is_refused_field_by_field(saved, tmp_path, family, options, message):
    bank, path = saved
    model = tiny_model(family, **options)
    with pytest.raises(SeergateError, match=message):
        seergate.attach(model, bank, token_budget=16)
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(SeergateError, match=message):
        seergate.load(path, token_budget=16, base_model=tmp_path / "other")


def test_decode_defaults(saved):
    bank, path = saved
    bank.decode_defaults = {"threshold": 0.1, "dense_layers": [0]}
    bank.save_pretrained(path)
    again = GateBank.from_pretrained(path)
    assert again.decode_config().threshold == 0.1 and again.decode_config().dense_layers == (0,)
    assert again.decode_config(token_budget=16).threshold is None
    assert seergate.handle_of(seergate.load(path)).method.threshold == 0.1
    edit(path, lambda record: record["decode_defaults"].update(sparkle=1))
    with pytest.warns(UserWarning, match="ignoring unknown sparkle"):
        GateBank.from_pretrained(path)
    edit(path, lambda record: record.update(decode_defaults={"threshold": 7}))
    with pytest.raises(SeergateError, match="gate_config.json: threshold is 7"):
        GateBank.from_pretrained(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"results": {"a": 1}}, "results is .*; it must be a list"),
        ({"results": [1]}, "results holds 1"),
        ({"results": [{"accuracy": "high"}]}, "accuracy of a result is 'high'"),
        ({"license": {"license": 1}}, "license must be an object of texts"),
        ({"training": []}, "training is .*; it must be an object"),
        ({"files": []}, "its SHA-256 is another"),
        ({"decode_defaults": {"token_budget": 0}}, "gate_config.json: token_budget is 0"),
        ({"results": [{"accuracy": 10**400}]}, "accuracy of a result is 1000.*; it must be a number"),
    ],
)
def test_records_that_cannot_be(saved, changes, message):
    _, path = saved
    edit(path, lambda record: record.update(changes))
    with pytest.raises(SeergateError, match=message):
        GateBank.from_pretrained(path)


def test_what_is_not_json_is_not_saved(saved):
    bank, path = saved
    before = (path / "gate_config.json").read_bytes()
    bank.training_record = {"model": torch.nn.Linear(1, 1)}
    with pytest.raises(SeergateError, match="not JSON"):
        bank.save_pretrained(path)
    assert (path / "gate_config.json").read_bytes() == before


def test_arguments_that_cannot_be(model, saved, tmp_path):
    bank, path = saved
    for wrong in (None, "Qwen/Qwen3-8B", torch.nn.Linear(2, 2)):
        with pytest.raises(SeergateError, match="it must be a causal language model of transformers"):
            GateBank.for_model(wrong)
    for ids, message in (
        (torch.full((1, 40), 128), r"input_ids holds 128; the model has the ids 0\.\.127"),
        (torch.full((1, 40), -1), "input_ids holds -1"),
        (torch.zeros(1, 40), "input_ids is torch.float32"),
        (torch.zeros(1, 0, dtype=torch.long), "it must hold token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            bank.distill_loss(model, input_ids=ids)
    with pytest.raises(ValueError, match="token_budget is -3"):
        seergate.load("org/does-not-exist", token_budget=-3)
    for source in ("x" * 5000, "a/" * 3000, "nul\0", "org/name/more"):
        with pytest.raises(SeergateError, match="there is no directory"):
            GateBank.from_pretrained(source)
    with pytest.raises(SeergateError, match="needs push_to_hub=True"):
        bank.save_pretrained(tmp_path / "x", private=True)
    with pytest.raises(SeergateError, match="could not be loaded"):
        seergate.load(path, token_budget=16, quantization_config=4)
    for name in ("tokenbudget", "token_budgets"):
        with pytest.raises(SeergateError, match=f"no decode option '{name}'; did you mean 'token_budget'"):
            seergate.load(path, **{name: 16})
    for options in ({"budget": 16}, {"method": "quest", "token_budget": 16}):  # named before the model is built
        with pytest.raises(SeergateError, match="there is no decode option '(budget'; did you|method'; there are)"):
            seergate.load(path, **options)
    with pytest.raises(SeergateError, match="there is no such directory"):
        seergate.load(path, base_model="/nope")
    with pytest.raises(SeergateError, match="config is a dict; it must be a DecodeConfig"):
        seergate.load(path, config={"token_budget": 16})
    with pytest.raises(SeergateError, match="revision is 'x', but .* is a directory"):
        seergate.load(path, revision="x")
    with pytest.raises(SeergateError, match="repo_id needs push_to_hub=True"):
        bank.save_pretrained(tmp_path / "x", repo_id="org/name")


def test_arguments_of_another_type(saved):
    bank, _ = saved
    model, ids = tiny_model("qwen3"), torch.ones(1, 40, dtype=torch.long)
    for other in (None, torch.nn.Linear(2, 2)):
        for attempt in (lambda: seergate.attach(other, "quest"), lambda: bank.distill_loss(other, input_ids=ids)):  # noqa: B023
            with pytest.raises(SeergateError, match="it must be a causal language model of transformers"):
                attempt()
    with pytest.raises(SeergateError, match="config is a dict; it must be a GateConfig"):
        GateBank.for_model(model, {"block_size": 8})
    for wrong, message in (
        ({"input_ids": [1, 2]}, "input_ids is a list"),
        ({"input_ids": None}, "input_ids is a NoneType"),
        ({"input_ids": ids.bool()}, "input_ids is torch.bool"),
        ({"cu_seqlens": [0, 40]}, "cu_seqlens is list; it must be an int32 tensor"),
        ({"cu_seqlens": torch.tensor([0.0, 40.0])}, "cu_seqlens is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            bank.distill_loss(model, **{"input_ids": ids, **wrong})


@pytest.mark.parametrize(
    ("cause", "reason"),
    [(ConnectionError("no route"), "the Hub could not be asked (no route)"), (KeyError("x"), "none")],
)
def test_why_the_hub_gave_nothing_is_told_of_errors_that_are_each_other_s_cause(cause, reason):
    error = ValueError("none")
    cause.__context__ = error
    with pytest.raises(SeergateError, match=re.escape(f"no rows: {reason}")), hub_call("no rows", asks=False):
        raise error from cause
