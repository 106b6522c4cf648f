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
def bank(model):
    return GateBank.for_model(model, GateConfig(8, 16))


def filled(like, value, dtype=torch.float32):
    bank = GateBank(like.config, like.geometry, {"value": value}).to(dtype)
    for parameter in bank.parameters():
        parameter.data.fill_(value)
    return bank


def test_average(bank, model):
    mean = GateBank.average([filled(bank, value) for value in (1.0, 3.0, 5.0)], [1, 0, 3])
    assert all(bool((p == 4.0).all()) for p in mean.parameters())
    assert mean.training_record["average_of"] == [{"value": 1.0}, {"value": 3.0}, {"value": 5.0}]
    assert mean.training_record["weights"] == [0.25, 0.0, 0.75]
    assert GateBank.average([bank, bank]).diff(bank).same_weights
    # 1 + 1/128 is a bfloat16, its sum with 1 is not: an average in bfloat16 would lose it.
    parts = [filled(bank, value, torch.bfloat16) for value in (1.0, 1.0078125, 1.0078125, 1.0)]
    weight = GateBank.average(parts, [1, 1, 1, 0.001]).gate(0).k_proj.weight
    assert bool((weight == torch.tensor((1 + 2 * 1.0078125 + 0.001) / 3.001).bfloat16()).all())
    wide, qwen2 = (GateBank.for_model(tiny_model(name), GateConfig(16, 16)) for name in ("qwen3", "qwen2"))
    for banks, weights, message in (
        ([bank, wide], None, "gates 2 cannot be averaged .*: block_size is 8 and 16"),
        ([wide, qwen2], None, "model_type is qwen3 and qwen2; num_heads is 4 and 8"),
        ([bank], None, "needs two or more"),
        *(([bank, bank], w, "2 numbers with a positive sum") for w in ([1], [1, -1], [0, 0], [1, math.nan])),
    ):
        with pytest.raises(ValueError, match=message):  # of which SeergateError is one
            GateBank.average(banks, weights)


def test_subset_and_conversion(bank, model, tmp_path):
    half = bank.subset([1])
    assert half.geometry.layers == (1,) and len(half) == 1
    assert torch.equal(half.gate(1).q_proj.weight, bank.gate(1).q_proj.weight)
    with seergate.attached(model, half, token_budget=16) as handle:
        model.generate(input_ids=prompt(60), max_new_tokens=8)
        density = handle.stats()["density_per_layer"]
    assert density[0] == 1.0 > density[1], "the layer without a gate is dense"
    half.gate(1).q_proj.weight.data.zero_()
    assert bool(bank.gate(1).q_proj.weight.any()), "the subset has its own tensors"
    for layers in ([], [2], [0, 7], [True]):
        with pytest.raises(SeergateError, match="it must name some of"):
            bank.subset(layers)
    cast = bank.cast(torch.float16)
    assert cast.diff(bank.derived().half()).same_weights and cast.gate(0).inv_freq.dtype == torch.float32
    cast.save_pretrained(tmp_path)
    for dtype in (None, torch.float32):
        again = GateBank.from_pretrained(tmp_path, dtype=dtype)
        assert again.gate(0).k_proj.weight.dtype == dtype or again.diff(cast).same_weights
    with pytest.raises(SeergateError, match="holds values that are not finite"):
        filled(bank, 1e6).cast(torch.float16)
    with pytest.raises(SeergateError, match="dtype torch.int8; it must be one of"):
        bank.cast(torch.int8)


def test_difference(bank, model):
    other, name = bank.derived(), "layers.0.k_norm.weight"
    assert bank.diff(other).same_weights and bank.diff(other).fields == []
    other.gate(0).k_norm.weight.data *= 1.5
    found = bank.diff(other).tensors
    assert list(found) == [name] and found[name].largest == 0.5
    assert (found[name].relative, found[name].cosine) == pytest.approx((0.5, 1.0))
    other.gate(0).k_norm.weight.data.zero_()
    for first, second, relative in ((bank, other, 1.0), (other, bank, math.inf)):
        entry = first.diff(second).tensors[name]
        assert (entry.largest, entry.relative, entry.cosine) == (1.0, relative, 0.0)
    found = bank.diff(GateBank.for_model(model, GateConfig(16, 16, qk_norm=False)))
    assert found.fields[:2] == ["block_size is 8 and 16", "qk_norm is True and False"]
    assert "layers.0.q_norm.weight" in found.only_first and not found.only_second


def test_commands(bank, tmp_path, capsys):
    filled(bank, 1.0).save_pretrained(tmp_path / "a")
    filled(bank, 3.0).save_pretrained(tmp_path / "b")
    a, b, c, mean = (str(tmp_path / name) for name in ("a", "b", "c", "mean"))

    def shown(*arguments):
        capsys.readouterr()
        assert main([*arguments]) == 0
        return capsys.readouterr().out

    shown("export", f"{a},{b}", mean, "--weights", "1,3", "--dtype", "bfloat16", "--layers", "0-1")
    weight = GateBank.from_pretrained(mean).gate(1).q_proj.weight
    assert bool((weight == 2.5).all()) and weight.dtype == torch.bfloat16
    text, names = shown("info", a, "--diff", b), len(bank.state_dict())
    assert "block size           8" in text and "layers.0.k_norm.weight: 200 % of its norm, cosine 1.000000" in text
    assert f"  in all: {names} of {names} tensors differ, at most by 200 % of their norm (" in text.splitlines()[-1]
    assert shown("info", a, "--diff", a).endswith("difference\n  none\n")
    card = tmp_path / "a" / "README.md"
    card.write_text("Mine.\n" + card.read_text())
    before = {path: path.read_bytes() for path in card.parent.iterdir()}
    text = shown("push", a, "org/gates", "--dry-run", "--base-model", "org/model")
    weights = (tmp_path / "a" / "gate_model.safetensors").stat().st_size
    for part in ('seergate.load("org/gates"', "base_model: org/model", "Mine.", "not uploaded: README.md ("):
        assert part in text
    assert f"gate_model.safetensors ({weights:,} bytes)" in text
    assert before == {path: path.read_bytes() for path in card.parent.iterdir()}
    for arguments, message in (
        (["export", a, mean], "is not empty"),
        (["export", a, c, "--weights", "1"], "weights are for an average"),
        (["export", a, c, "--layers", "x"], "must be layers such as"),
        (["export", a, c, "--layers", "5"], "must name some of"),
        (["export", str(tmp_path / "nowhere"), c], "there is no directory"),
        (["info", str(tmp_path)], "holds no gate_config.json"),
        (["push", "org/name", "org/name"], "is not a directory"),
        (["push", a, "a/b/c"], "org/name"),
        (["push", a, "a/b/c", "--dry-run"], "org/name"),
    ):
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = exit.code
        error = capsys.readouterr().err
        assert code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "c").exists()
