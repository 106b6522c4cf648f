"""Average, subset, conversion and difference of adapters."""

from __future__ import annotations

import math

import pytest
import torch

import seergate
from seergate import GateBank, GateConfig, SeergateError
from seergate.cli.main import main
from tests.support.models import prompt, tiny_model


@pytest.fixture
def model():
    return tiny_model("qwen3")


@pytest.fixture
def bank(model):
    return GateBank.for_model(model, GateConfig(8, 16))


def filled(like: GateBank, value: float, dtype: torch.dtype = torch.float32) -> GateBank:
    bank = GateBank(like.config, like.geometry, {"value": value}).to(dtype)
    for parameter in bank.parameters():
        parameter.data.fill_(value)
    return bank


def test_average(bank):
    mean = GateBank.average([filled(bank, 1.0), filled(bank, 3.0)])
    assert all(bool((p == 2.0).all()) for p in mean.parameters())
    mean = GateBank.average([filled(bank, 1.0), filled(bank, 3.0), filled(bank, 5.0)], [1, 0, 3])
    assert all(bool((p == 4.0).all()) for p in mean.parameters())
    assert mean.training_record["average_of"] == [{"value": 1.0}, {"value": 3.0}, {"value": 5.0}]
    assert mean.training_record["weights"] == [0.25, 0.0, 0.75]
    same = GateBank.average([bank, bank])
    assert same.diff(bank).same_weights


def test_average_of_bfloat16_is_rounded_once(bank):
    """1 + 1/128 is a bfloat16, its sum with 1 is not: an average in bfloat16 would lose it."""
    parts = [filled(bank, value, torch.bfloat16) for value in (1.0, 1.0078125, 1.0078125, 1.0)]
    mean = GateBank.average(parts, [1, 1, 1, 0.001])
    assert mean.gate(0).k_proj.weight.dtype == torch.bfloat16
    expected = torch.tensor((1 + 2 * 1.0078125 + 0.001) / 3.001).bfloat16()
    assert bool((mean.gate(0).k_proj.weight == expected).all())


def test_average_names_what_differs(bank, model):
    other = GateBank.for_model(model, GateConfig(16, 16))
    with pytest.raises(SeergateError, match="gates 2 cannot be averaged .*: block_size is 8 and 16"):
        GateBank.average([bank, other])
    with pytest.raises(SeergateError, match="model_type is qwen3 and qwen2; num_heads is 4 and 8"):
        GateBank.average([bank, GateBank.for_model(tiny_model("qwen2"), GateConfig(8, 16))])
    with pytest.raises(SeergateError, match="needs two or more"):
        GateBank.average([bank])
    for weights in ([1], [1, -1], [0, 0], [1, float("nan")]):
        with pytest.raises(ValueError, match="2 numbers with a positive sum"):
            GateBank.average([bank, bank], weights)


def test_subset(bank, model):
    half = bank.subset([1])
    assert half.geometry.layers == (1,) and len(half) == 1
    assert torch.equal(half.gate(1).q_proj.weight, bank.gate(1).q_proj.weight)
    half.gate(1).q_proj.weight.data.zero_()
    assert bool(bank.gate(1).q_proj.weight.any()), "the subset has its own tensors"
    with seergate.attached(model, bank.subset([1]), token_budget=16) as handle:
        model.generate(input_ids=prompt(60), max_new_tokens=8)
        density = handle.stats()["density_per_layer"]
    assert density[0] == 1.0 > density[1], "the layer without a gate is dense"
    for layers in ([], [2], [0, 7], [True]):
        with pytest.raises(SeergateError, match="it must name some of"):
            bank.subset(layers)


def test_conversion(bank, tmp_path):
    half = bank.cast(torch.float16)
    by_module = bank.derived().half()
    assert half.diff(by_module).same_weights and half.gate(0).inv_freq.dtype == torch.float32
    by_module.save_pretrained(tmp_path)
    again = GateBank.from_pretrained(tmp_path)
    assert again.gate(0).k_proj.weight.dtype == torch.float16 and again.diff(half).same_weights
    assert GateBank.from_pretrained(tmp_path, dtype=torch.float32).gate(0).k_proj.weight.dtype == torch.float32
    with pytest.raises(SeergateError, match="holds values that are not finite"):
        filled(bank, 1e6).cast(torch.float16)
    with pytest.raises(SeergateError, match="dtype torch.int8; it must be one of"):
        bank.cast(torch.int8)


def test_difference(bank, model):
    other = bank.derived()
    assert bank.diff(other).same_weights and bank.diff(other).fields == []
    other.gate(0).k_norm.weight.data *= 1.5
    found = bank.diff(other)
    assert list(found.tensors) == ["layers.0.k_norm.weight"]
    entry = found.tensors["layers.0.k_norm.weight"]
    assert entry.largest == 0.5 and entry.relative == pytest.approx(0.5) and entry.cosine == pytest.approx(1.0)
    other.gate(0).k_norm.weight.data.zero_()
    for first, second, relative in ((bank, other, 1.0), (other, bank, math.inf)):
        entry = first.diff(second).tensors["layers.0.k_norm.weight"]
        assert (entry.largest, entry.relative, entry.cosine) == (1.0, relative, 0.0)
    found = bank.diff(GateBank.for_model(model, GateConfig(16, 16, qk_norm=False)))
    assert found.fields[:2] == ["block_size is 8 and 16", "qk_norm is True and False"]
    assert "layers.0.q_norm.weight" in found.only_first and not found.only_second


def test_commands(bank, tmp_path, capsys):
    filled(bank, 1.0).save_pretrained(tmp_path / "a")
    filled(bank, 3.0).save_pretrained(tmp_path / "b")
    sources = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    assert (
        main(["export", sources, str(tmp_path / "mean"), "--weights", "1,3", "--dtype", "bfloat16", "--layers", "0-1"])
        == 0
    )
    mean = GateBank.from_pretrained(tmp_path / "mean")
    assert bool((mean.gate(1).q_proj.weight == 2.5).all()) and mean.gate(1).q_proj.weight.dtype == torch.bfloat16
    capsys.readouterr()
    assert main(["info", str(tmp_path / "a"), "--diff", str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "block size           8" in text and "layers.0.k_norm.weight: 200 % of its norm, cosine 1.000000" in text
    names = len(bank.state_dict())
    assert f"  in all: {names} of {names} tensors differ, at most by 200 % of their norm (" in text.splitlines()[-1]
    assert main(["info", str(tmp_path / "a"), "--diff", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.endswith("difference\n  none\n")
    (tmp_path / "a" / "README.md").write_text("Mine.\n" + (tmp_path / "a" / "README.md").read_text())
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert main(["push", str(tmp_path / "a"), "org/gates", "--dry-run", "--base-model", "org/model"]) == 0
    shown = capsys.readouterr().out
    assert 'seergate.load("org/gates"' in shown and "base_model: org/model" in shown and "Mine." in shown
    weights = (tmp_path / "a" / "gate_model.safetensors").stat().st_size
    assert "not uploaded: README.md (" in shown and f"gate_model.safetensors ({weights:,} bytes)" in shown
    assert before == {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    for arguments, message in (
        (["export", str(tmp_path / "a"), str(tmp_path / "mean")], "is not empty"),
        (["export", str(tmp_path / "a"), str(tmp_path / "c"), "--weights", "1"], "weights are for an average"),
        (["export", str(tmp_path / "a"), str(tmp_path / "c"), "--layers", "x"], "must be layers such as"),
        (["export", str(tmp_path / "a"), str(tmp_path / "c"), "--layers", "5"], "must name some of"),
        (["export", str(tmp_path / "nowhere"), str(tmp_path / "c")], "there is no directory"),
        (["info", str(tmp_path)], "holds no gate_config.json"),
        (["push", "org/name", "org/name"], "is not a directory"),
        (["push", str(tmp_path / "a"), "a/b/c"], "org/name"),
        (["push", str(tmp_path / "a"), "a/b/c", "--dry-run"], "org/name"),
    ):
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = exit.code
        assert code == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "c").exists()
