"""Adapters: a round trip changes nothing, and whatever is wrong with one is said in a sentence."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import seergate
from seergate import GateBank, GateConfig, SeergateError
from tests.models import prompt, tiny_model


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


def test_load_puts_base_and_gates_together(saved):
    bank, path = saved
    model = seergate.load(path, token_budget=16)
    assert seergate.handle_of(model).stats()["method"] == "gate"
    direct = tiny_model("qwen3")
    with seergate.attached(direct, bank, token_budget=16):
        expected = direct.generate(input_ids=prompt(60), max_new_tokens=20)
    assert torch.equal(model.generate(input_ids=prompt(60), max_new_tokens=20), expected)
    seergate.handle_of(model).detach()
    with pytest.raises(SeergateError, match="no method is attached"):
        seergate.handle_of(model)


def test_a_newer_adapter_warns_and_loads(saved):
    _, path = saved
    edit(path, lambda record: (record["gate"].update(sparkle=1), record.update(schema_version=2)))
    with pytest.warns(UserWarning, match="sparkle|schema_version 2"):
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
        (lambda path: edit(path, lambda r: r["gate"].update(gate_dim=8)), "inv_freq has shape"),
        (
            lambda path: edit_tensors(path, lambda t: t.pop("layers.0.q_norm.weight")),
            "layers.0.q_norm.weight is missing",
        ),
        (
            lambda path: edit_tensors(path, lambda t: t.update({"layers.0.k_proj.weight": torch.zeros(2, 3, 16)})),
            r"layers.0.k_proj.weight has shape \(2, 3, 16\); it must be \(2, 32, 16\)",
        ),
        (lambda path: (path / "gate_model.safetensors").write_bytes(b"\0" * 100), "not a readable safetensors"),
        (
            lambda path: (path / "gate_model.safetensors").write_bytes(
                (path / "gate_model.safetensors").read_bytes()[:-50]
            ),
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
        (tmp_path / "nowhere", "neither a directory here nor a Hub repository"),
        (tmp_path / "file", "is a file"),
        ("org/does-not-exist", "could not be read from the Hub"),
    ):
        with pytest.raises(SeergateError, match=message):
            GateBank.from_pretrained(source)
    with pytest.raises(SeergateError, match="is a file"):
        GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16)).save_pretrained(tmp_path / "file")


def test_saving_the_base_never_leaks_gates(saved, tmp_path):
    bank, _ = saved
    model = tiny_model("qwen3")
    with seergate.attached(model, bank, token_budget=16):
        model.save_pretrained(tmp_path / "out")
    plain = load_file(tmp_path / "out" / "model.safetensors")
    assert plain.keys() <= tiny_model("qwen3").state_dict().keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "seergate" not in json.dumps(config)
