"""Scorers with a key per token: against the equations in float64, trained, decoded, saved."""

import json
import math
from functools import partial

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import GateBank, GateConfig
from seergate.distill.losses.teacher_forward import distill_step
from seergate.fingerprint import fingerprint
from seergate.models.published import export_published
from seergate.ops import reference
from tests.gates.conftest import attention_calls, queries_and_keys
from tests.support.models import gates, left_padded, prompt, tiny_model
from tests.support.op_inputs import cu_seqlens
from tests.support.running import refused

SIZE = 8
TOKEN_SCORERS = ("msa", "indexer")
CONFIGS = [{"scorer": "attn_gate", "q_pooling": "none"}, *({"scorer": name} for name in TOKEN_SCORERS)]
BY_TOKEN = pytest.mark.parametrize("scorer", TOKEN_SCORERS)


def rotated(x, position, gate):
    """The rotate-half form of RoPE, number by number."""
    if gate.inv_freq is None:
        return x
    out, half = x.clone(), len(x) // 2
    for i, frequency in enumerate(gate.inv_freq.tolist()):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[i], out[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
    return out


def rms(x, weight):
    return x / math.sqrt(float(x.square().mean()) + 1e-6) * weight


def token_score(gate, query_HD, keys_KD, t, s, kv_head):
    """What a token's key is worth to a query, from the papers' equations in float64."""
    config, width = gate.config, gate.config.gate_dim
    weights = {name: tensor.double() for name, tensor in gate.state_dict().items()}
    key = keys_KD.flatten() @ weights["k_proj.weight"][0]
    if config.scorer == "msa":
        group = query_HD.unflatten(0, (gate.num_kv_heads, -1))[kv_head]
        query = sum(q @ w for q, w in zip(group, weights["q_proj.weight"][kv_head], strict=True))
        if config.qk_norm:
            query, key = rms(query, weights["q_norm.weight"]), rms(key, weights["k_norm.weight"])
        return float(rotated(query, t, gate) @ rotated(key, s, gate)) / math.sqrt(width)
    if config.qk_norm:
        centred = key - key.mean()
        key = centred / math.sqrt(float(centred.square().mean()) + 1e-6) * weights["k_norm.weight"]
        key = key + weights["k_norm.bias"]
    total, heads = 0.0, gate.num_heads // gate.num_kv_heads // 2
    for i in range(kv_head * heads, (kv_head + 1) * heads):
        query = query_HD.flatten() @ weights["q_proj.weight"][0][:, i * width : (i + 1) * width]
        weight = math.log1p(math.exp(query_HD.flatten() @ weights["head_weights.weight"][0][:, i]))
        product = float(rotated(query, t, gate) @ rotated(key, s, gate)) / math.sqrt(width)
        total += weight * max(0.0, product) / math.sqrt(heads)
    return total


@BY_TOKEN
@pytest.mark.parametrize("options", [{}, {"qk_norm": False}, {"rope": False}])
def test_against_the_equations(model, scorer, options):
    gate = gates(model, scorer=scorer, **options).double().gate(0)
    tokens, at = 2 * SIZE + 3, 30
    q = torch.randn(1, gate.num_heads, 1, gate.head_dim).double()
    k = torch.randn(1, gate.num_kv_heads, tokens, gate.head_dim).double()
    scores = gate.scores(gate.queries(q, torch.tensor([at])), gate.keys(gate.pool(k), torch.arange(tokens)))
    assert scores.shape == (1, gate.num_kv_heads, 1, 3)
    for g in range(gate.num_kv_heads):
        values = [token_score(gate, q[0, :, 0], k[0, :, s], at, s, g) for s in range(tokens)]
        blocks = [max(values[n : n + SIZE]) for n in range(0, tokens, SIZE)]
        assert scores[0, g, 0].tolist() == pytest.approx(blocks, rel=1e-5, abs=1e-7)


def test_an_indexer_tells_blocks_apart_for_every_kv_head(model):
    """With negative weights the highest score of every block was 0, and all KV heads had the same scores."""
    gate = gates(model, scorer="indexer").double().gate(0)
    gate.head_weights.weight.data.fill_(-0.1)
    gate.k_norm.bias.data.zero_()  # a large one makes all products negative
    q = torch.rand(1, gate.num_heads, 1, gate.head_dim).double()
    k = torch.randn(1, gate.num_kv_heads, 4 * SIZE, gate.head_dim).double()
    scores = gate.scores(gate.queries(q, torch.tensor([40])), gate.keys(gate.pool(k), torch.arange(4 * SIZE)))
    assert scores.unique().numel() == 4 * gate.num_kv_heads > 4
    (gradient,) = torch.autograd.grad(scores.max(), gate.head_weights.weight)
    assert gradient.any()


@BY_TOKEN
def test_entries_of_a_prompt_are_those_of_single_tokens(model, scorer):
    ids, bank, keys = prompt(3 * SIZE + 5), gates(model, scorer=scorer), []
    for first in (1, 2 * SIZE, ids.shape[1]):
        cache = DynamicCache()
        with seergate.attached(model, bank, token_budget=512):
            rest = ids[:, first:].split(1, 1) if first < ids.shape[1] else ()
            for part in (ids[:, :first], *rest):
                model(input_ids=part, past_key_values=cache)
        keys.append(cache.layers[0].state.rows["kg"][:, :, : ids.shape[1]])
    for entries in keys[:-1]:
        torch.testing.assert_close(entries, keys[-1], rtol=1e-4, atol=1e-4)
    state = cache.layers[0].state
    state.block_shared(0, slice(2, 3), slice(0, 1))
    kg = state.rows["kg"][0, 0]
    assert torch.equal(kg[2 * SIZE : 3 * SIZE], kg[:SIZE]) and torch.equal(kg[: 2 * SIZE], keys[-1][0, 0, : 2 * SIZE])


@pytest.mark.parametrize("config", CONFIGS)
def test_decoding(model, config):
    """A budget for everything is dense; a small one is the same in a padded batch, static, paged and drafted."""
    bank, ids = gates(model, **config), prompt(37, 1)
    run = partial(model.generate, max_new_tokens=24, do_sample=False)
    dense = run(ids)
    with seergate.attached(model, bank, token_budget=512):
        assert torch.equal(run(ids), dense)
    with seergate.attached(model, bank, token_budget=2 * SIZE) as handle:
        sparse = run(ids)
        stats = handle.stats()
        batch = left_padded([ids, prompt(60, 2), prompt(5, 3)])
        assert torch.equal(run(**batch)[0, -24:], sparse[0, -24:])
        assert torch.equal(run(ids, cache_implementation="static"), sparse)
        assert torch.equal(run(ids, prompt_lookup_num_tokens=3), sparse)
    assert not torch.equal(sparse, dense) and stats["density"] < 0.6
    on_evictor = seergate.methods.make_method("h2o+gate", bank=bank, token_budget=32, read_budget=2 * SIZE)
    with seergate.attached(model, on_evictor) as handle:
        assert run(ids).shape == dense.shape and handle.stats()["density"] < 0.6
    with seergate.attached(model, bank, token_budget=2 * SIZE, storage=seergate.Paging(block_size=2 * SIZE)):
        assert torch.equal(run(ids), sparse)


@pytest.mark.parametrize("config", [{"scorer": "attn_gate"}, *CONFIGS])
@pytest.mark.parametrize("target", ["max", "sum"])
def test_gradients_of_all_parameters(model, config, target):
    """The trainer's loss and gradients are those of autograd through the whole scorer and the reference."""
    bank = gates(model, **config).requires_grad_(True)
    model, bank = model.double(), bank.double()
    lengths, ids = [41, 1, 26], prompt(68, 4)
    borders = cu_seqlens(lengths)
    options = {"target": target, "row_start": 0.25}
    out = distill_step(bank, model, ids, borders, recall_budgets=(16,), **options)
    gradients = torch.autograd.grad(out.loss, [*bank.parameters()])

    calls, losses = attention_calls(model, ids.split(lengths, 1)), []
    for layer, gate in bank:
        each = *queries_and_keys(calls[layer]), *queries_and_keys(calls[layer], gate)
        how = {"scores": gate.scores, "entry_tokens": gate.entry_tokens}
        losses.append(reference.scorer_kl(*each, borders, SIZE, **how, **options)[0])
    loss = torch.stack(losses).mean()
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert out.recall.min() > 0 and out.recall.max() <= 1 + 1e-6
    torch.testing.assert_close(gradients, torch.autograd.grad(loss, [*bank.parameters()]), rtol=1e-4, atol=1e-7)
    assert all(gradient.any() for gradient in gradients)


@BY_TOKEN
def test_adapters(model, scorer, tmp_path):
    bank = gates(model, scorer=scorer)
    bank.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "gate_config.json").read_text())["gate"]
    assert record == {"block_size": SIZE, "gate_dim": 16, "qk_norm": True, "rope": True, "scorer": scorer}
    assert f"| scorer | {scorer} |" in (tmp_path / "README.md").read_text()
    again = GateBank.from_pretrained(tmp_path)
    assert again.config == bank.config and fingerprint(again) == fingerprint(bank)
    assert [*bank.subset([1]).state_dict()] == [name for name in bank.state_dict() if name.startswith("layers.1.")]
    other = gates(model, scorer="msa" if scorer == "indexer" else "indexer")
    refused(r"scorer is .* \(they have attn_gate\)", export_published, bank, tmp_path / "published")
    wrong = "is missing" if scorer == "msa" else "belongs to no gate"
    refused(rf"layers\.0\.head_weights\.weight {wrong}", other.derived, bank.state_dict())


def test_the_gate_is_recorded_as_before():
    config = GateConfig()
    assert [*config.to_dict()] == ["block_size", "gate_dim", "k_pooling", "q_pooling", "qk_norm", "rope"]
    assert GateConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BY_TOKEN
def test_narrow_gates_decode(scorer, dtype):
    model = tiny_model("qwen3", dtype=dtype)
    with seergate.attached(model, gates(model, scorer=scorer).to(dtype), token_budget=2 * SIZE):
        assert model.generate(prompt(37, 1), max_new_tokens=4, do_sample=False).shape == (1, 41)
