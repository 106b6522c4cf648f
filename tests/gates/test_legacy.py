"""The published format: imported exactly, decoded as the published code decodes, written back to the same bytes."""

from __future__ import annotations

import copy
import json
import pickle
import zipfile
from dataclasses import replace

import pytest
import torch

import seergate
from seergate import DecodeConfig, GateBank, GateConfig, SeergateError, methods
from seergate.cli.main import main
from seergate.methods import Gate
from seergate.methods.base import LayerSpec, Step
from seergate.models.published import export_published
from tests.gates.test_adapter_safety import Bomb
from tests.support.models import prompt, tiny_model
from tests.support.published import RELEASES, PublishedGate, Release

SMALL = Release("small", "qwen3", 2, 4, 2, 64, 96, 128, 0.0, head_dim=128)


class NoRotation:
    """The base model's RoPE plays no part in gate scores."""

    def rotate(self, x, positions):
        raise AssertionError

    unrotate = rotate


def step(q, k, start):
    """`Step` of one row from raw ``q [H, S, D]``, ``k [K, S, D]``; what scoring does not look at is empty."""
    count = k.shape[1]
    empty = k.new_zeros(1, k.shape[0], 0, k.shape[2])
    lengths = torch.tensor([start + count])
    return Step(q[None], k[None], q[None], k[None], [start], [count], empty, empty, lengths, 1.0)


@pytest.mark.soak
@pytest.mark.plain_empty
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_published_release(release, tmp_path, monkeypatch):
    """True shapes, random tensors: size of the file, scores in prefill and decode, blocks read, and the way back."""
    tensors = release.save(tmp_path / "published")
    assert round(sum(tensor.nbytes for tensor in tensors.values()) / 1e6, 1) == release.megabytes
    assert main(["export", str(tmp_path / "published"), str(tmp_path / "gates")]) == 0
    assert round((tmp_path / "gates" / "gate_model.safetensors").stat().st_size / 1e6, 1) == release.megabytes
    bank = GateBank.from_pretrained(tmp_path / "gates")
    assert bank.decode_defaults == {"compat": "published"} and len(bank) == release.layers
    assert bank.geometry.base_model == f"org/{release.name}" and bank.config == GateConfig()
    assert bank.gate(0).k_proj.weight.dtype == torch.bfloat16

    assert main(["export", str(tmp_path / "gates"), str(tmp_path / "back"), "--format", "published"]) == 0
    again = torch.load(tmp_path / "back" / "attn_gate_weights.pth", weights_only=True)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype and torch.equal(
            again[name].view(torch.int16), tensor.view(torch.int16)
        )
    before, after = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("published", "back"))
    assert before == after

    bank.float()
    for layer in (0, release.layers - 1):
        compare_scores(bank, tensors, layer, release, prompt_length=150, steps=45)


def compare_scores(bank, tensors, layer, release, prompt_length, steps):
    """One sequence through both, token by token; the block that is open after the prompt closes on the way."""
    spec = LayerSpec(
        layer, 1, release.heads, release.kv_heads, release.head_dim, torch.float32, torch.device("cpu"), NoRotation()
    )
    rules = [DecodeConfig(token_budget=128, compat="published"), DecodeConfig(threshold=0.2, compat="published")]
    methods = [Gate.from_config(bank, rule) for rule in rules]
    states = [method.new_state(spec) for method in methods]
    theirs = PublishedGate(tensors, layer)
    q = torch.randn(release.heads, prompt_length + steps, release.head_dim)
    k = torch.randn(release.kv_heads, prompt_length + steps, release.head_dim)
    first = step(q[:, :prompt_length], k[:, :prompt_length], 0)
    for state in states:
        state.append(first)
    theirs.prefill(k[:, :prompt_length])
    closed = 0
    for t in range(prompt_length, prompt_length + steps):
        now = step(q[:, t : t + 1], k[:, t : t + 1], t)
        expected = theirs.decode(q[:, t], k[:, t])
        whole = (t + 1) // 64  # the open block's logit is 0 there, and set when selecting here
        closed += (t + 1) % 64 == 0
        for method, state, rule in zip(methods, states, rules, strict=True):
            state.append(now)
            torch.testing.assert_close(
                state.scores(now)[0, :, :whole].double(), expected[:, :whole], rtol=1e-4, atol=1e-4
            )
            chosen = method.select(state, now)
            found = [{b for b in row if b >= 0} for row in chosen.indices[0].tolist()]
            wanted = theirs.blocks_read(expected, rule.token_budget, rule.threshold or 0.0)
            assert found == wanted, (t, rule)
    assert closed, "no block closed while decoding, so nothing was said about its position"


def test_scores_of_a_small_one(tmp_path):
    tensors = SMALL.save(tmp_path / "published", qk_norm=False)
    bank = GateBank.from_pretrained(tmp_path / "published")
    assert not bank.config.qk_norm
    compare_scores(bank.float(), tensors, 1, SMALL, prompt_length=60, steps=150)


def test_it_decodes_as_published_unless_told_otherwise(tmp_path):
    SMALL.save(tmp_path / "published")
    base = tiny_model("qwen3", head_dim=128)
    base.save_pretrained(tmp_path / "base")
    bank = GateBank.from_pretrained(tmp_path / "published")
    bank.geometry = replace(bank.geometry, base_model=str(tmp_path / "base"))
    record = bank.training_record
    assert "rope" not in record["published_config"] and record["imported_from"] == "published"
    # its RoPE base is that of the configuration, which the tiny model does not share
    base.config.rope_parameters["rope_theta"] = 1e6
    base.save_pretrained(tmp_path / "base")
    bank.save_pretrained(tmp_path / "gates")

    def compat(model):
        return seergate.handle_of(model).method.compat

    assert compat(seergate.load(tmp_path / "gates", token_budget=128)) == "published"
    assert compat(seergate.load(tmp_path / "gates", token_budget=128, compat=None)) is None
    assert compat(seergate.load(tmp_path / "gates", config=DecodeConfig(token_budget=128))) == "published"
    assert compat(seergate.load(tmp_path / "gates", config=DecodeConfig(token_budget=128, compat=None))) is None
    for wrong in ({"top_p": 0.9}, {"config": DecodeConfig(top_p=0.9)}):
        with pytest.raises(ValueError, match='compat is "published".*or pass compat=None'):
            seergate.load(tmp_path / "gates", **wrong)
    assert compat(seergate.load(tmp_path / "gates", top_p=0.9, compat=None)) is None
    model = seergate.load(tmp_path / "gates", token_budget=128)
    model.generate(input_ids=prompt(300), max_new_tokens=5)
    assert seergate.handle_of(model).stats()["method"] == "gate"
    bank = GateBank.from_pretrained(tmp_path / "gates")
    seergate.handle_of(model).detach()
    for arguments, options in (
        ((bank,), {"token_budget": 128}),
        ((bank, DecodeConfig(token_budget=128)), {}),
        (("gate",), {"bank": bank, "token_budget": 128}),
        ((methods.Gate(bank=bank, token_budget=128),), {}),
    ):
        with seergate.attached(model, *arguments, **options) as handle:
            assert handle.method.compat == "published"
    with seergate.attached(model, bank, DecodeConfig(token_budget=128, compat=None)) as handle:
        assert handle.method.compat is None
    bank.decode_defaults = {"threshold": 0.25}
    assert methods.make_method("gate", bank=bank).threshold == 0.25
    assert methods.make_method("gate", bank=bank, token_budget=128).threshold is None


def test_our_own_gates_in_the_published_format(tmp_path):
    model = tiny_model("qwen3", head_dim=128)
    model.save_pretrained(tmp_path / "base")
    bank = GateBank.for_model(type(model).from_pretrained(tmp_path / "base"), GateConfig(block_size=32))
    export_published(bank, tmp_path / "published")
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    assert config["seerattn_gate_block_size"] == 32 and config["rope_theta"] and config["rope_scaling"] is None
    assert "rope_parameters" not in config and config["base_model"] == str(tmp_path / "base")
    again = GateBank.from_pretrained(tmp_path / "published")
    assert again.config == bank.config and not bank.geometry.mismatches(again.geometry)
    for name, tensor in bank.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_scaled_rope_comes_along(tmp_path):
    SMALL.save(tmp_path / "published")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    path = tmp_path / "published" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": yarn}))
    geometry = GateBank.from_pretrained(tmp_path / "published").geometry
    model = tiny_model(
        "qwen3", head_dim=128, rope_parameters={**yarn, "rope_theta": 1e6}, max_position_embeddings=40960
    )
    expected = GateBank.for_model(model, GateConfig()).geometry
    assert geometry.attention_scaling == expected.attention_scaling != 1.0
    assert geometry.inv_freq == expected.inv_freq


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (GateConfig(block_size=8, gate_dim=16), "block_size is 8 .*"),
        (GateConfig(block_size=32, gate_dim=8), "gate_dim is 8"),
        (GateConfig(block_size=32, gate_dim=16, k_pooling=("avg", "max")), "k_pooling is"),
    ],
)
def test_gates_that_the_published_code_cannot_use(options, message, tmp_path):
    bank = GateBank.for_model(tiny_model("qwen3"), options)
    with pytest.raises(SeergateError, match=message):
        export_published(bank, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_families_and_directories_are_refused(tmp_path):
    llama = GateBank.for_model(tiny_model("llama"), GateConfig(block_size=16, gate_dim=16))
    with pytest.raises(SeergateError, match="model_type is 'llama'"):
        export_published(llama, tmp_path / "out")
    SMALL.save(tmp_path / "published")
    bank = GateBank.from_pretrained(tmp_path / "published")
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    with pytest.raises(SeergateError, match="of something else"):
        export_published(bank, tmp_path / "model")


@pytest.mark.parametrize(("method", "written"), [("token_budget", "threshold"), ("nz_ratio", "nz_ratio")])
def test_a_sparsity_method_that_the_published_constructor_refuses_is_not_written(method, written, tmp_path):
    """It takes threshold and nz_ratio only; some files have token_budget, which is set after construction."""
    SMALL.save(tmp_path / "published")
    edit_config(tmp_path / "published", seerattn_sparsity_method=method)
    bank = GateBank.from_pretrained(tmp_path / "published")
    assert bank.training_record["published_config"].get("seerattn_sparsity_method", "gone") == method
    export_published(bank, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["seerattn_sparsity_method"] == written


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


def edit_weights(path, change):
    weights = torch.load(path / "attn_gate_weights.pth", weights_only=True)
    change(weights)
    torch.save(weights, path / "attn_gate_weights.pth")


Q0 = "model.layers.0.self_attn.attn_gate.attngate_linear_q.weight"
K1 = "model.layers.1.self_attn.attn_gate.attngate_linear_k.weight"
NORM0 = "model.layers.0.self_attn.attn_gate.attngate_qnorm.weight"


def compressed(path):
    file = path / "attn_gate_weights.pth"
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def overlapping(path):
    """Ten more entries, all of them the same bytes."""
    with zipfile.ZipFile(path / "attn_gate_weights.pth", "a") as archive:
        largest = max(archive.filelist, key=lambda entry: entry.file_size)
        for number in range(10):
            archive.filelist.append(copy.copy(largest))
            archive.filelist[-1].filename = f"archive/data/x{number}"
        archive._didModify = True


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: (p / "config.json").unlink(), r"holds no config\.json"),
        (lambda p: (p / "attn_gate_weights.pth").unlink(), r"holds no attn_gate_weights\.pth"),
        (lambda p: (p / "config.json").write_text("{"), "not readable JSON"),
        (lambda p: (p / "config.json").write_text('{"model_type": "qwen3"}'), "no seerattn_ entries"),
        (lambda p: edit_config(p, seerattn_gate_type="Qavg_Kmaxminavg"), "sparse prefill"),
        (lambda p: edit_config(p, seerattn_use_qk_norm=False), "seerattn_use_qk_norm is False, but the weights have"),
        (lambda p: edit_config(p, seerattn_gate_block_size=3), "block_size is 3"),
        (lambda p: edit_config(p, seerattn_gate_hidden_size=64), r"has shape \(128,\); it must be \(64,\)"),
        (lambda p: edit_config(p, seerattn_k_seq_pooling_type="Kmaxavg"), r"has shape \(2, 384, 128\)"),
        (lambda p: edit_config(p, seerattn_k_seq_pooling_type="Kmaxmedian"), "must be like 'Kmaxminavg'"),
        (lambda p: edit_config(p, seerattn_q_head_pooling_type="Qorig"), "is 'Qorig'"),
        (lambda p: edit_config(p, seerattn_q_head_pooling_type="Qavg"), "attngate|q_proj.weight belongs to no gate"),
        (lambda p: edit_config(p, num_key_value_heads=4), "has shape"),
        (lambda p: edit_config(p, num_hidden_layers=10**7), "num_hidden_layers is 10000000"),
        (lambda p: edit_config(p, model_type="gpt2"), "no model can be built|not supported"),
        (lambda p: edit_config(p, model_type="gone"), "no model can be built"),
        (lambda p: edit_config(p, base_model=["x"]), "base_model is"),
        (lambda p: edit_weights(p, lambda w: w.pop(Q0)), "layers.0.q_proj.weight is missing"),
        (lambda p: edit_weights(p, lambda w: w.pop(NORM0)), "layers.0.q_norm.weight is missing"),
        (lambda p: edit_weights(p, lambda w: w.update({"lm_head.weight": torch.zeros(2)})), "belongs to no gate"),
        (lambda p: edit_weights(p, lambda w: w.update({Q0.replace("0", "7"): w[Q0]})), "of 3 layers"),
        (
            lambda p: edit_weights(p, lambda w: w.update({Q0.replace("attngate_linear_q", "mask_linear_q"): w[Q0]})),
            "sparse prefill",
        ),
        (
            lambda p: edit_weights(p, lambda w: w.update({Q0: w[Q0][:, 0]})),
            r"layers.0.q_proj.weight has shape .*\(gates for sparse prefill\?\)$",
        ),
        (
            lambda p: edit_weights(p, lambda w: w.update({K1: w[K1][0]})),
            r"layers.1.k_proj.weight has shape .*\(gates for sparse prefill\?\)$",
        ),
        (lambda p: edit_weights(p, lambda w: w.update({NORM0: w[NORM0][1:]})), r"\(127,\); it must be \(128,\)$"),
        (lambda p: edit_weights(p, lambda w: w.update({Q0: w[Q0].int()})), "has dtype"),
        (lambda p: edit_weights(p, lambda w: w.update({Q0: w[Q0] * torch.nan})), "not finite"),
        (lambda p: edit_weights(p, lambda w: w.clear()), "holds no tensors"),
        (lambda p: torch.save([1, 2], p / "attn_gate_weights.pth"), "must hold a dictionary of tensors"),
        (lambda p: torch.save({Q0: "text"}, p / "attn_gate_weights.pth"), "must hold a dictionary of tensors"),
        (
            lambda p: (p / "attn_gate_weights.pth").write_bytes((p / "attn_gate_weights.pth").read_bytes()[:-999]),
            "not a readable file of PyTorch tensors",
        ),
        (lambda p: (p / "attn_gate_weights.pth").write_bytes(b""), "not a readable file of PyTorch tensors"),
        (compressed, "it is compressed"),
        (overlapping, "its entries are larger than the file"),
    ],
)
def test_damage_is_named(harm, message, tmp_path):
    SMALL.save(tmp_path / "published")
    harm(tmp_path / "published")
    with pytest.raises(SeergateError, match=message):
        GateBank.from_pretrained(tmp_path / "published")


@pytest.mark.parametrize("as_archive", [True, False])
def test_a_pickle_that_does_something_is_not_run(as_archive, tmp_path):
    SMALL.save(tmp_path / "published")
    bomb, target = tmp_path / "published" / "attn_gate_weights.pth", tmp_path / "exploded"
    if as_archive:
        torch.save({Q0: Bomb(target)}, bomb)
    else:
        bomb.write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(SeergateError, match="not a readable file of PyTorch tensors"):
        GateBank.from_pretrained(tmp_path / "published")
    assert not target.exists()
    torch.load(bomb, weights_only=False) if as_archive else pickle.loads(bomb.read_bytes())
    assert target.exists(), "the bomb of this test is none"


def test_it_is_read_directly_wherever_gates_are(tmp_path, capsys):
    """By its place: as a bank, by `attach`, `seergate.load` and the commands; the same as converted first."""
    SMALL.save(tmp_path / "published")
    base = tiny_model("qwen3", head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    base.save_pretrained(tmp_path / "base")
    edit_config(tmp_path / "published", base_model=str(tmp_path / "base"))
    assert main(["export", str(tmp_path / "published"), str(tmp_path / "gates")]) == 0
    direct, converted = (GateBank.from_pretrained(tmp_path / place) for place in ("published", "gates"))
    assert direct.diff(converted).fields == [] and direct.diff(converted).same_weights
    tokens = []
    for place in ("published", "gates"):
        with seergate.attached(base, tmp_path / place, token_budget=128) as handle:
            tokens.append(base.generate(input_ids=prompt(300), max_new_tokens=8))
            assert handle.method.compat == "published"
    model = seergate.load(tmp_path / "published", token_budget=128)
    tokens.append(model.generate(input_ids=prompt(300), max_new_tokens=8))
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])
    capsys.readouterr()
    assert main(["info", str(tmp_path / "published")]) == 0
    assert "{'compat': 'published'}" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "published"), str(tmp_path / "published")]) == 2
    assert "is not empty" in capsys.readouterr().err
