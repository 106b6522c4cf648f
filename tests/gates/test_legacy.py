"""The published format: read exactly, decoded as the published code decodes, written back to the same bytes."""

import json
import pickle
from dataclasses import replace

import pytest
import torch

import seergate
from seergate import DecodeConfig, GateBank, GateConfig, methods
from seergate.fingerprint import fingerprint
from seergate.methods import Gate, LayerSpec
from seergate.models.published import export_published
from tests.gates.conftest import GONE, set_entries
from tests.gates.test_adapter_safety import Bomb
from tests.support.models import prompt, tiny_model
from tests.support.published import RELEASES, PublishedGate, Release
from tests.support.running import invalid, output_of, refusal, refused, run_seergate
from tests.support.steps import step

SMALL = Release("small", "qwen3", 2, 4, 2, 64, 96, 128, 0.0, head_dim=128)
CONFIG, WEIGHTS = "config.json", "attn_gate_weights.pth"


@pytest.fixture
def published(tmp_path):
    SMALL.save(tmp_path / "published")
    return tmp_path / "published"


@pytest.mark.soak
@pytest.mark.plain_empty
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_published_release(release, tmp_path):
    """True shapes, random tensors: size of the file, scores in prefill and decode, blocks read, and the way back."""
    tensors = release.save(tmp_path / "published")
    assert round(sum(tensor.nbytes for tensor in tensors.values()) / 1e6, 1) == release.megabytes
    output_of("export", str(tmp_path / "published"), str(tmp_path / "gates"))
    assert round((tmp_path / "gates" / "gate_model.safetensors").stat().st_size / 1e6, 1) == release.megabytes
    bank = GateBank.from_pretrained(tmp_path / "gates")
    assert bank.decode_defaults == {"compat": "published"} and len(bank) == release.layers
    assert bank.geometry.base_model == f"org/{release.name}" and bank.config == GateConfig()
    output_of("export", str(tmp_path / "gates"), str(tmp_path / "back"), "--format", "published")
    again = torch.load(tmp_path / "back" / WEIGHTS, weights_only=True)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(again[name].view(torch.int16), tensor.view(torch.int16))
    before, after = (json.loads((tmp_path / place / CONFIG).read_text()) for place in ("published", "back"))
    assert before == after
    for layer in (0, release.layers - 1):
        compare_scores(bank.float(), tensors, layer, release, prompt_length=150, steps=45)


def compare_scores(bank, tensors, layer, release, prompt_length, steps):
    """One sequence through both, token by token; a block that the prompt leaves open closes while decoding."""
    heads, kv_heads, dim = release.heads, release.kv_heads, release.head_dim
    # Gate scores do not use the base model's RoPE.
    spec = LayerSpec(layer, 1, heads, kv_heads, dim, torch.float32, torch.device("cpu"), None)
    rules = [DecodeConfig(token_budget=128, compat="published"), DecodeConfig(threshold=0.2, compat="published")]
    decoders = [Gate.from_config(bank, rule) for rule in rules]
    states = [decoder.new_state(spec) for decoder in decoders]
    theirs = PublishedGate(tensors, layer)
    q = torch.randn(heads, prompt_length + steps, dim)
    k = torch.randn(kv_heads, prompt_length + steps, dim)

    for state in states:
        state.append(step(q[None, :, :prompt_length], k[None, :, :prompt_length], new=prompt_length))
    theirs.prefill(k[:, :prompt_length])
    assert (prompt_length + steps) // 64 > prompt_length // 64, "no block closes while decoding"
    for t in range(prompt_length, prompt_length + steps):
        now, expected, whole = step(q[None, :, t], k[None, :, : t + 1]), theirs.decode(q[:, t], k[:, t]), (t + 1) // 64
        for decoder, state, rule in zip(decoders, states, rules, strict=True):
            state.append(now)
            scores = state.scores(now)[0, :, :whole].double()  # the open block's logit is 0 there, and set in `select`
            torch.testing.assert_close(scores, expected[:, :whole], rtol=1e-4, atol=1e-4)
            blocks = [{b for b in row if b >= 0} for row in decoder.select(state, now).indices[0].tolist()]
            assert blocks == theirs.blocks_read(expected, rule.token_budget, rule.threshold or 0.0), (t, rule)


def test_scores_of_a_small_one(tmp_path):
    tensors = SMALL.save(tmp_path / "published", qk_norm=False)
    bank = GateBank.from_pretrained(tmp_path / "published")
    assert not bank.config.qk_norm
    compare_scores(bank.float(), tensors, 1, SMALL, prompt_length=60, steps=150)


def test_it_is_read_wherever_gates_are_and_decodes_as_published_unless_told_otherwise(published, tmp_path):
    base = tiny_model("qwen3", head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    base.save_pretrained(tmp_path / "base")
    set_entries(published / CONFIG, {"base_model": str(tmp_path / "base")})
    output_of("export", str(published), str(tmp_path / "gates"))
    bank, converted = (GateBank.from_pretrained(place) for place in (published, tmp_path / "gates"))
    assert bank.record() == converted.record() and fingerprint(bank) == fingerprint(converted)
    record = bank.training_record
    assert "rope" not in record["published_config"] and record["imported_from"] == "published"
    tokens = []
    for arguments, options, compat in (
        ((published,), {"token_budget": 128}, "published"),
        ((tmp_path / "gates",), {"token_budget": 128}, "published"),
        ((bank, DecodeConfig(token_budget=128)), {}, "published"),
        (("gate",), {"bank": bank, "token_budget": 128}, "published"),
        ((methods.Gate(bank=bank, token_budget=128),), {}, "published"),
        ((bank, DecodeConfig(token_budget=128, compat=None)), {}, None),
    ):
        with seergate.attached(base, *arguments, **options) as handle:
            assert handle.method.compat == compat
            tokens.append(base.generate(input_ids=prompt(300), max_new_tokens=8) if options else tokens[0])
    for options, compat in (
        ({"token_budget": 128}, "published"),
        ({"token_budget": 128, "compat": None}, None),
        ({"config": DecodeConfig(token_budget=128)}, "published"),
        ({"config": DecodeConfig(token_budget=128, compat=None)}, None),
        ({"top_p": 0.9, "compat": None}, None),
    ):
        model = seergate.load(published, **options)
        assert seergate.handle_of(model).method.compat == compat
        if options == {"token_budget": 128}:
            tokens.append(model.generate(input_ids=prompt(300), max_new_tokens=8))
    assert all(torch.equal(each, tokens[0]) for each in tokens)
    for wrong in ({"top_p": 0.9}, {"config": DecodeConfig(top_p=0.9)}):
        invalid('compat is "published".*or pass compat=None', seergate.load, published, **wrong)
    bank.decode_defaults = {"threshold": 0.25}
    assert methods.make_method("gate", bank=bank).threshold == 0.25
    assert methods.make_method("gate", bank=bank, token_budget=128).threshold is None
    assert "{'compat': 'published'}" in output_of("info", str(published))
    assert "is not empty" in refusal(run_seergate("export", str(published), str(published)))


def test_our_own_gates_in_the_published_format(tmp_path):
    model = tiny_model("qwen3", head_dim=128)
    model.save_pretrained(tmp_path / "base")
    bank = GateBank.for_model(type(model).from_pretrained(tmp_path / "base"), GateConfig(block_size=32))
    export_published(bank, tmp_path / "published")
    config = json.loads((tmp_path / "published" / CONFIG).read_text())
    assert config["seerattn_gate_block_size"] == 32 and config["rope_theta"] and config["rope_scaling"] is None
    assert "rope_parameters" not in config and config["base_model"] == str(tmp_path / "base")
    again = GateBank.from_pretrained(tmp_path / "published")
    assert fingerprint(again) == fingerprint(bank) and again.config == bank.config
    assert not bank.geometry.mismatches(again.geometry)
    bank.geometry = replace(bank.geometry, attention_scaling=1.2)  # trained with --rope-scaling
    refused("not what these gates were trained on: the model's RoPE", export_published, bank, tmp_path / "other")
    bank.decode_defaults = {"dense_layers": [1]}
    refused(r"cannot use these gates: dense_layers is \[1\] by default", export_published, bank, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_scaled_rope_comes_along(key, published):
    yarn = {"factor": 4.0, "original_max_position_embeddings": 1024}
    set_entries(published / CONFIG, {"rope_scaling": {**yarn, key: "yarn"}})
    geometry, rope = GateBank.from_pretrained(published).geometry, {**yarn, "rope_type": "yarn", "rope_theta": 1e6}
    model = tiny_model("qwen3", head_dim=128, rope_parameters=rope, max_position_embeddings=40960)
    expected = GateBank.for_model(model, GateConfig()).geometry
    assert geometry.attention_scaling == expected.attention_scaling != 1.0
    assert geometry.inv_freq == expected.inv_freq
    set_entries(published / CONFIG, {"rope_theta": None})  # transformers' default
    assert GateBank.from_pretrained(published).geometry.attention_scaling == expected.attention_scaling


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3", GateConfig(block_size=8, gate_dim=16), "block_size is 8 .*"),
        ("qwen3", GateConfig(block_size=32, gate_dim=8), "gate_dim is 8"),
        ("qwen3", GateConfig(block_size=32, gate_dim=16, k_pooling=("avg", "max")), "k_pooling is"),
        ("qwen3", GateConfig(32, 16, q_pooling="none"), r"q_pooling is 'none' \(they have proj, avgproj, avg\)"),
        ("llama", GateConfig(block_size=16, gate_dim=16), "model_type is 'llama'"),
    ],
)
def test_gates_that_the_published_code_cannot_use(family, options, message, tmp_path):
    refused(message, export_published, GateBank.for_model(tiny_model(family), options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("method", "written"), [("token_budget", "threshold"), ("nz_ratio", "nz_ratio")])
def test_a_sparsity_method_that_the_published_constructor_refuses_is_not_written(method, written, published, tmp_path):
    """It takes threshold and nz_ratio only; some files have token_budget, which is set after construction."""
    set_entries(published / CONFIG, {"seerattn_sparsity_method": method})
    bank = GateBank.from_pretrained(published)
    assert bank.training_record["published_config"].get("seerattn_sparsity_method", "gone") == method
    export_published(bank, tmp_path / "back")
    assert json.loads((tmp_path / "back" / CONFIG).read_text())["seerattn_sparsity_method"] == written
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    refused("of something else", export_published, bank, tmp_path / "model")


def tensor(name, change):
    """A harm: the tensor of this name becomes ``change`` of it, or goes if that is ``None``."""

    def harm(path):
        weights = torch.load(path / WEIGHTS, weights_only=True)
        weights[name] = change(weights.pop(name, torch.zeros(2)))
        torch.save({key: value for key, value in weights.items() if value is not None}, path / WEIGHTS)

    return harm


Q0 = "model.layers.0.self_attn.attn_gate.attngate_linear_q.weight"
K1 = "model.layers.1.self_attn.attn_gate.attngate_linear_k.weight"
NORM0 = "model.layers.0.self_attn.attn_gate.attngate_qnorm.weight"
UNREADABLE = "not a readable file of PyTorch tensors"
DAMAGE = [
    ({"seerattn_gate_type": "Qavg_Kmaxminavg"}, "sparse prefill"),
    ({"seerattn_use_qk_norm": False}, "seerattn_use_qk_norm is False, but the weights have"),
    ({"seerattn_gate_block_size": 3}, "block_size is 3"),
    ({"seerattn_gate_hidden_size": 64}, r"has shape \(128,\); it must be \(64,\)"),
    ({"seerattn_k_seq_pooling_type": "Kmaxavg"}, r"has shape \(2, 384, 128\)"),
    ({"seerattn_k_seq_pooling_type": "Kmaxmedian"}, "must be like 'Kmaxminavg'"),
    ({"seerattn_q_head_pooling_type": "Qorig"}, "is 'Qorig'"),
    ({"seerattn_q_head_pooling_type": "Qavg"}, "attngate|q_proj.weight belongs to no gate"),
    ({"num_key_value_heads": 4}, "has shape"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000"),
    ({"model_type": "gpt2"}, "no model can be built|not supported"),
    ({"model_type": GONE}, "no model can be built"),
    ({"base_model": ["x"]}, "base_model is"),
    (lambda p: (p / CONFIG).unlink(), r"holds no config\.json"),
    (lambda p: (p / CONFIG).write_text("{"), "not readable JSON"),
    (lambda p: (p / CONFIG).write_text('{"model_type": "qwen3"}'), "no seerattn_ entries"),
    (tensor(Q0, lambda w: None), "layers.0.q_proj.weight is missing"),
    (tensor(NORM0, lambda w: None), "layers.0.q_norm.weight is missing"),
    (tensor("lm_head.weight", lambda w: w), "belongs to no gate"),
    (tensor(Q0.replace("0", "7"), lambda w: w), "of 3 layers"),
    (tensor(Q0.replace("attngate_linear_q", "mask_linear_q"), lambda w: w), "sparse prefill"),
    (tensor(Q0, lambda w: w[:, 0]), "layers.0.q_proj.weight has shape"),
    (tensor(K1, lambda w: w[0]), "layers.1.k_proj.weight has shape"),
    (tensor(NORM0, lambda w: w[1:]), r"\(127,\); it must be \(128,\)$"),
    (tensor(Q0, lambda w: w.int()), "has dtype"),
    (tensor(Q0, lambda w: w * torch.nan), "not finite"),
    (tensor(Q0, lambda w: w.to_sparse()), "must hold a dictionary of dense tensors"),
    (tensor(Q0, lambda w: w.to("meta")), "must hold a dictionary of dense tensors"),
    (lambda p: torch.save({}, p / WEIGHTS), "holds no tensors"),
    (lambda p: torch.save([1, 2], p / WEIGHTS), "must hold a dictionary of dense tensors"),
    (lambda p: torch.save({Q0: "text"}, p / WEIGHTS), "must hold a dictionary of dense tensors"),
    (lambda p: torch.save({Q0: Bomb(p / "exploded")}, p / WEIGHTS), UNREADABLE),
    (lambda p: (p / WEIGHTS).write_bytes(pickle.dumps(Bomb(p / "exploded"))), UNREADABLE),
    (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-999]), UNREADABLE),
    (lambda p: (p / WEIGHTS).write_bytes(b""), UNREADABLE),
    (lambda p: (p / WEIGHTS).unlink(), r"holds no attn_gate_weights\.pth"),
]


@pytest.mark.parametrize(("harm", "message"), DAMAGE)
def test_damage_is_named(harm, message, published):
    set_entries(published / CONFIG, harm) if isinstance(harm, dict) else harm(published)
    refused(message, GateBank.from_pretrained, published)
    assert not (published / "exploded").exists(), "a pickle was run"
