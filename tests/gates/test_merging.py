"""Subset and conversion of adapters, and the commands about them."""

import torch

import seergate
from seergate import GateBank
from seergate.fingerprint import fingerprint
from tests.support.models import prompt
from tests.support.running import invalid, output_of, refusal, refused, run_seergate


def filled(like, value, dtype=torch.float32):
    bank = GateBank(like.config, like.geometry, {"value": value}).to(dtype)
    for parameter in bank.parameters():
        parameter.data.fill_(value)
    return bank


def test_subset_and_conversion(bank, model, tmp_path):
    means = {
        "kl_held_out": 0.5,
        "kl_held_out_best": 0.25,
        "kl_last_step": 1.0,
        "recall_held_out": {"64": 0.5},
        "anchor_recall": 0.9,
    }
    bank = bank.derived(training={"tokens_seen": 9, **means})
    half, both = bank.subset([1]), bank.subset([0, 1])
    assert half.training_record == bank.with_anchors([0]).training_record == {"tokens_seen": 9}
    assert both.training_record == bank.training_record, "means over these layers"
    assert half.geometry.layers == (1,) and len(half) == 1
    assert torch.equal(half.gate(1).q_proj.weight, bank.gate(1).q_proj.weight)
    with seergate.attached(model, half, token_budget=16) as handle:
        model.generate(input_ids=prompt(60), max_new_tokens=8)
        density = handle.stats()["density_per_layer"]
    assert density[0] == 1.0 > density[1], "the layer without a gate is dense"
    half.gate(1).q_proj.weight.data.zero_()
    assert bool(bank.gate(1).q_proj.weight.any()), "the subset has its own tensors"
    with seergate.attached(model, bank.with_anchors([0, 1]).subset([1]), token_budget=16) as handle:
        assert handle.method.anchors == (1,), "an anchor without a gate would be refused"
    for layers in ([], [2], [0, 7], [True]):
        refused("it must name some of", bank.subset, layers)
    cast = bank.cast(torch.float16)
    assert fingerprint(cast) == fingerprint(bank.derived().half()) and cast.gate(0).inv_freq.dtype == torch.float32
    cast.save_pretrained(tmp_path)
    for dtype in (None, torch.float32):
        again = GateBank.from_pretrained(tmp_path, dtype=dtype)
        assert again.gate(0).k_proj.weight.dtype == dtype or fingerprint(again) == fingerprint(cast)
    filled(bank, 1e6).save_pretrained(tmp_path)
    message = "these gates in torch.float16: the tensor .* holds values that are not finite"
    refused(message, GateBank.from_pretrained, tmp_path, dtype=torch.float16)
    invalid(r"dtype is 'bfloat16'; it must be torch.bfloat16 or", GateBank.from_pretrained, tmp_path, dtype="bfloat16")
    refused("without an option 'torch_dtype'", GateBank.from_pretrained, tmp_path, torch_dtype=torch.bfloat16)
    refused("dtype torch.int8; it must be one of", bank.cast, torch.int8)


def test_commands(bank, tmp_path):
    filled(bank, 1.0).save_pretrained(tmp_path / "a")
    a, c, half = (str(tmp_path / name) for name in ("a", "c", "half"))

    output_of("export", a, half, "--dtype", "bfloat16", "--layers", "0-1")
    assert GateBank.from_pretrained(half).gate(1).q_proj.weight.dtype == torch.bfloat16
    assert "block size           8" in output_of("info", half)
    card = tmp_path / "a" / "README.md"
    card.write_text("Mine.\n" + card.read_text())
    before = {path: path.read_bytes() for path in card.parent.iterdir()}
    text = output_of("push", a, "org/gates", "--dry-run", "--base-model", "org/model")
    weights = (tmp_path / "a" / "gate_model.safetensors").stat().st_size
    for part in ('seergate.load("org/gates"', "base_model: org/model", "Mine.", "not uploaded: README.md ("):
        assert part in text
    assert f"gate_model.safetensors ({weights:,} bytes)" in text
    assert before == {path: path.read_bytes() for path in card.parent.iterdir()}
    for arguments, message in (
        (["export", a, half], "is not empty"),
        (["export", a, c, "--layers", "x"], "must be layers such as"),
        (["export", a, c, "--layers", "0-"], "must be layers such as"),
        (["export", a, c, "--layers", "0,1-0"], "must be layers such as"),
        (["export", a, c, "--layers", "5"], "must name some of"),
        (["export", a, "~/copy"], "would be in a directory named ~"),
        (["export", str(tmp_path / "nowhere"), c], "there is no directory"),
        (["export", a, c, "--format", "published", "--licence", "mit"], "--licence is for the model card"),
        (["info", str(tmp_path)], "holds no gate_config.json"),
        (["push", "org/name", "org/name"], "is not a directory"),
        (["push", a, "a/b/c"], "org/name"),
        (["push", a, "a/b/c", "--dry-run"], "org/name"),
    ):
        assert message in refusal(run_seergate(*arguments))
    assert not (tmp_path / "c").exists()
