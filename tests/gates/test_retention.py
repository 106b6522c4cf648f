"""Retention gates: trained, saved, attached, refused. What they keep is held to simulations in tests/methods."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import GateBank, GateConfig
from seergate.distill.averages import Averages
from seergate.distill.config import TrainConfig
from seergate.distill.losses.distill_loss import DistillSpec
from seergate.distill.losses.teacher_forward import distill_step, distill_steps
from seergate.fingerprint import fingerprint
from seergate.models.packed_forward import intercepted_attention
from seergate.ops import reference
from tests.gates.conftest import attention_calls, queries_and_keys
from tests.support.models import prompt, tiny_model
from tests.support.naive_views import retention_for
from tests.support.op_inputs import cu_seqlens
from tests.support.running import invalid, output_of, refused
from tests.support.steps import spec, step

SIZE = 8
KINDS = ["fast_kvzip", "trim_kv"]


@pytest.fixture(params=KINDS)
def scorer(request):
    """Each kind of retention gates."""
    return request.param


@pytest.fixture
def bank(model, scorer):
    return retention_for(model, scorer)


def test_fast_kvzip_learns_the_attention_that_tokens_receive(model):
    """Loss, recall and gradients are those of autograd through the gate and the reference, sequence by sequence."""
    model, bank = model.double(), retention_for(model, "fast_kvzip").double()
    lengths, ids = [41, 1, 26], prompt(68, 4)
    options = {"row_start": 0.25, "recall_budgets": (16,)}
    out = distill_step(bank, model, ids, cu_seqlens(lengths), **options)
    gradients = torch.autograd.grad(out.loss, [*bank.parameters()])

    losses, recall = [], []
    for layer, calls in attention_calls(model, ids.split(lengths, 1)).items():
        scores = torch.cat([bank.gate(layer)(call.hidden_BSW)[0].T for call in calls])
        loss, stats = reference.retention_kl(*queries_and_keys(calls), scores, cu_seqlens(lengths), SIZE, **options)
        losses.append(loss)
        recall.append(stats.recall)
    loss = torch.stack(losses).mean()
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(out.kl_per_layer, torch.stack(losses).detach().float())
    torch.testing.assert_close(out.recall, torch.stack(recall, 1).float())
    torch.testing.assert_close(gradients, torch.autograd.grad(loss, [*bank.parameters()]), rtol=1e-4, atol=1e-9)
    assert all(gradient.any() for gradient in gradients)


def test_trim_kv_learns_from_the_whole_model(model):
    """Loss and gradients are those of autograd through a model whose attention is the reference's."""
    model, bank = model.double(), retention_for(model, "trim_kv").double()
    for _, gate in bank:
        gate.linear2.bias.data += 2.0  # ages of up to 40 leave something
    lengths, ids, room = [41, 1, 26], prompt(68, 4), 6
    out = distill_step(bank, model, ids, cu_seqlens(lengths), row_start=0.25, target_budget=room)
    gradients = torch.autograd.grad(out.loss, [*bank.parameters()])

    excess = []

    def attend(call):
        q, k, v = (x[0].transpose(0, 1) for x in (call.query_BHSD, call.key_BKSD, call.value_BKSD))
        log_beta = bank.gate(call.layer)(call.hidden_BSW)[0].T
        output, weight_sums = reference.retained_attention(q, k, v, log_beta, cu_seqlens([len(q)]), call.sm_scale)
        excess.append((weight_sums - room).clamp(min=0).mean())
        return output[None]

    kl, ce, capacity, rows, followed = 0.0, 0.0, 0.0, 0, 0
    for part in ids[0].split(lengths):
        with torch.no_grad():
            plain = model(input_ids=part[None], use_cache=False).logits[0].log_softmax(-1)
        excess.clear()
        with intercepted_attention(model, {}, attend):
            gated = model(input_ids=part[None], use_cache=False).logits[0].log_softmax(-1)
        for row in range(int(len(part) * 0.25), len(part)):
            kl, rows = kl + (plain[row].exp() * (plain[row] - gated[row])).sum(), rows + 1
            if row + 1 < len(part):
                ce, followed = ce - gated[row, part[row + 1]], followed + 1
        capacity = capacity + sum(excess) / len(excess)  # a sequence's rows, each over its length: its mean
    loss = kl / rows + ce / followed + capacity / len(ids[0])
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert out.kl_per_layer.tolist() == pytest.approx([loss.item()] * 2, rel=1e-6)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss, [*bank.parameters()]), rtol=1e-3, atol=1e-8)
    assert all(gradient.any() for gradient in gradients)


def test_recall_does_not_depend_on_packing(model, bank):
    """A long text counts as much in a pack with short ones as in its own."""
    world, lengths = SimpleNamespace(device=torch.device("cpu"), sum=lambda sums: sums), [41, 20, 26]
    options = {"row_start": 0.25, "target_budget": 6, "recall_budgets": (16,)}
    together = [distill_step(bank, model, prompt(87, 4), cu_seqlens(lengths), **options)]
    apart = [distill_step(bank, model, ids, **options) for ids in prompt(87, 4).split(lengths, 1)]
    one, several = (Averages.over(bank, (16,), world, packs, len(packs)).recall[16] for packs in (together, apart))
    torch.testing.assert_close(torch.tensor(one), torch.tensor(several))


@pytest.mark.parametrize("broken", ["gates", "model"])
def test_what_is_not_finite_teaches_nothing(model, bank, broken):
    """The loss says so, as that of other gates does; a run leaves the pack out."""
    parameters = bank.parameters() if broken == "gates" else model.model.layers[0].self_attn.k_proj.parameters()
    next(parameters).data.flatten()[0] = torch.nan
    out = distill_step(bank, model, prompt(40, 3), target_budget=4, recall_budgets=(16,))
    out.loss.backward()
    assert out.loss.isnan() and not any(parameter.grad.any() for parameter in bank.parameters())


def fading(model, betas, dtype=torch.float32):
    """The state of TRIM-KV in which tokens with these betas have come, and the step that brought them."""
    bank = GateBank.for_model(model, GateConfig(SIZE, scorer="trim_kv"))
    for parameter in bank.parameters():
        parameter.data.zero_()
    gate = bank.gate(0)
    gate.linear1.weight.data[0, 0] = 1
    gate.linear2.weight.data[:, 0] = 1
    gate.linear2.bias.data.fill_(-20)
    hidden = torch.zeros(1, len(betas), model.config.hidden_size)
    hidden[0, :, 0] = 20 + torch.tensor(betas).logit()  # so that SiLU leaves it as it is
    method = seergate.methods.TrimKV(bank=bank, token_budget=2)
    q, k = torch.zeros(1, 4, len(betas), 16, dtype=dtype), torch.zeros(1, 2, len(betas), 16, dtype=dtype)
    state, last = method.new_state(spec(k, 4)), step(q, k, new=len(betas), hidden=lambda: hidden)
    with pytest.warns(seergate.methods.LongPromptWarning):
        state.append(last)
    return state, last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trim_kv_by_hand(model, dtype):
    """Scores are ``age * log(beta)``, in float32 whatever the cache is in."""
    state, step = fading(model, [0.9, 0.99, 0.5, 0.999], dtype)
    scores_KT = state.importance(step, 0)
    assert scores_KT.dtype == torch.float32
    expected = torch.tensor([-0.526803, -0.040201, -2.079442, -0.002001]).expand(2, -1)
    torch.testing.assert_close(scores_KT, expected, rtol=1e-5, atol=1e-6)
    assert state.select_kept(step).index.tolist() == [[[1, 3], [1, 3]]]


def test_trim_kv_changes_its_mind_as_tokens_age(model):
    """A token of a short life is worth more than an old one of a long life, for as long as it is new."""
    betas = [0.99, *[0.5] * 18, 0.9]
    for later, order in ((0, [19, 0]), (10, [0, 19])):
        state, step = fading(model, betas + [0.5] * later)
        scores_T = state.importance(step, 0)[0, [0, 19]]
        ages = torch.tensor([21.0, 2.0]) + later
        torch.testing.assert_close(scores_T, ages * torch.tensor([0.99, 0.9]).log(), rtol=1e-5, atol=0)
        assert [(0, 19)[i] for i in scores_T.argsort(descending=True)] == order


def test_logits_are_made_for_the_rows_that_count(model):
    """By the frozen model too, for all gates that learn together."""
    bank, made = retention_for(model, "trim_kv"), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: made.append(output.shape[1]))
    specs = [DistillSpec(bank, start, target_budget=4) for start in (0.5, 0.75)]
    together = distill_steps(specs, model, prompt(60, 5), cu_seqlens([40, 20]))
    assert made == [30, 30, 15]
    for each, outcome in zip(specs, together, strict=True):
        (alone,) = distill_steps([each], model, prompt(60, 5), cu_seqlens([40, 20]))
        torch.testing.assert_close(outcome.loss, alone.loss)


def test_base_keys_stay_equal(model):
    """They begin as the authors' do, with nothing to tell them apart, and then learn the same."""
    bank = GateBank.for_model(model, GateConfig(SIZE, scorer="fast_kvzip"))
    optimizer = torch.optim.AdamW(bank.parameters(), lr=0.01)
    for seed in range(5):
        distill_step(bank, model, prompt(40, seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    keys_KNE = bank.gate(0).base_keys
    assert keys_KNE.abs().max() > 0.01
    torch.testing.assert_close(keys_KNE, keys_KNE[:, :1].expand_as(keys_KNE))


def test_gates_that_keep_everything_are_the_plain_model(model):
    """Fresh gates of TRIM-KV begin near it, and with beta of 1 they are it."""
    bank = GateBank.for_model(model, GateConfig(scorer="trim_kv"))
    hidden = torch.randn(1, 5, model.config.hidden_size)
    assert bank.gate(0)(hidden).exp().min() > 0.9999
    for parameter in bank.parameters():
        parameter.data.zero_()
    for layer in bank.geometry.layers:
        bank.gate(layer).linear2.bias.data.fill_(100.0)
    ids = prompt(40, 3)
    labels, logits = ids[0, 21:], model(input_ids=ids).logits[0, 20:-1]
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert distill_step(bank, model, ids, target_budget=40).loss.item() == pytest.approx(expected, rel=1e-4)
    over = (sum(range(1, 41)) - sum(min(n, 10) for n in range(1, 41))) / 40 / 40
    assert distill_step(bank, model, ids, target_budget=10).loss.item() == pytest.approx(expected + over, rel=1e-4)


def test_beside_others_in_one_forward(model, bank):
    """In a forward that several gates learn from, each gets what it gets alone."""
    other = GateBank.for_model(model, GateConfig(SIZE, 16))
    specs = [DistillSpec(other), DistillSpec(bank, target_budget=4)]
    together = distill_steps(specs, model, prompt(60, 5), cu_seqlens([40, 20]))
    alone = [distill_steps([spec], model, prompt(60, 5), cu_seqlens([40, 20]))[0] for spec in specs]
    for one, both in zip(alone, together, strict=True):
        assert torch.equal(one.loss, both.loss) and torch.equal(one.recall, both.recall)


def test_sequences_of_a_pack_do_not_mix(model, bank):
    run = partial(distill_step, bank, model, target_budget=4, recall_budgets=(16,))
    ids = prompt(70, 6)
    whole = run(ids, cu_seqlens([70])).loss
    ids2 = torch.cat((ids, prompt(70, 7)), 1)
    first, second, both = run(ids), run(ids2[:, 70:]), run(ids2, cu_seqlens([70, 70]))
    assert whole.item() == pytest.approx(first.loss.item(), rel=1e-5)
    assert both.loss.item() == pytest.approx((first.loss.item() + second.loss.item()) / 2, rel=1e-4)
    torch.testing.assert_close(both.recall, (first.recall + second.recall) / 2)


def test_trained_by_the_command(tmp_path):
    """Both beside each other, on the model that ships; each then decodes with the method of its name."""
    options = ["--max-steps", "2", "--packs-per-step", "1", "--data-limit", "24", "--chain-sum-variables", "8,9"]
    options += ["--max-length", "300", "--eval-packs", "1", "--eval-steps", "2", "--output-dir", str(tmp_path)]
    output_of("ablate", "retention", "--report-to", "none", "--target-budget", "40", *options)
    for scorer in KINDS:
        records = [path for path in tmp_path.rglob("gate_config.json") if f'"{scorer}"' in path.read_text()]
        (directory,) = [path.parent for path in records if path.parent.name != "best"]
        model = seergate.load(directory, token_budget=40)
        assert seergate.handle_of(model).method.name == scorer
        ids = torch.tensor([[5, 6, 7]])
        assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (1, 7)


def test_adapters_are_of_their_own_kind(model, bank, scorer, tmp_path):
    bank.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "gate_config.json").read_text())
    width = {"fast_kvzip": 16, "trim_kv": 512}[scorer]
    assert record["gate"] == {"block_size": SIZE, "gate_dim": width, "scorer": scorer}
    assert record["model"]["inv_freq"] == []
    card = (tmp_path / "README.md").read_text()
    assert f"| scorer | {scorer} |" in card and "RoPE" not in card and "evict" in card
    again = GateBank.from_pretrained(tmp_path)
    assert again.config == bank.config and fingerprint(again) == fingerprint(bank)
    ids = prompt(60, 8)
    options = {"token_budget": 24, "interval": 4}
    results = []
    for method, named in ((str(tmp_path), {}), (again, {}), (scorer, {"bank": again})):
        with seergate.attached(model, method, **options, **named) as handle:
            results.append(model.generate(ids, max_new_tokens=20, do_sample=False))
            assert handle.method.name == scorer and handle.stats()["method"] == scorer
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


def test_options_beside_an_adapter(model, bank, scorer, tmp_path):
    """Those of the gates' method are taken, and the adapter's own hold unless others are given."""
    model.save_pretrained(tmp_path / "base")
    bank.decode_defaults = {"token_budget": 24}
    bank.save_pretrained(tmp_path / "gates")
    place, base = str(tmp_path / "gates"), {"base_model": tmp_path / "base"}
    with seergate.attached(model, place, interval=4) as handle:
        assert (handle.method.token_budget, handle.method.interval) == (24, 4)
    method = seergate.handle_of(seergate.load(place, interval=4, token_budget=32, **base)).method
    assert (method.token_budget, method.interval) == (32, 4)
    refused(f"the method '{scorer}' has no option 'threshold'", seergate.load, place, threshold=0.1, **base)
    refused("no decode option 'intervall'; did you mean 'interval'", seergate.load, place, intervall=4, **base)
    selects = GateBank.for_model(model, GateConfig(SIZE, 16))
    refused("there is no decode option 'interval'", seergate.attach, model, selects, interval=4)
    bank.decode_defaults = {"threshold": 0.1}
    refused(f"decode_defaults of these gates has threshold, no option of '{scorer}'", seergate.attach, model, bank)


def test_the_wrong_kind_is_refused(model, bank, scorer):
    selects = GateBank.for_model(model, GateConfig(SIZE, 16))
    attach, gate = partial(seergate.attach, model), seergate.methods.Gate
    joined = partial(seergate.methods.make_method, f"{scorer}+gate", token_budget=64, read_budget=16)
    for call, message in (
        (partial(gate, bank=bank), f"score tokens for eviction; they are for the method '{scorer}'"),
        (partial(attach, scorer, bank=selects), f"'attn_gate', for the method 'gate'; '{scorer}' needs gates of"),
        (partial(attach, scorer), f"the method '{scorer}' needs gates"),
        (partial(attach, bank, seergate.DecodeConfig(token_budget=64)), "takes no DecodeConfig"),
        (partial(attach, bank, token_budget=16, threshold=0.1), "has no option 'threshold'"),
        (partial(joined, bank=selects), "takes two kinds of gates"),
        (partial(seergate.attach, tiny_model("qwen3", hidden_size=96), bank), "these gates are for another model"),
        (partial(attach, bank, storage=seergate.Paging()), "evicts tokens, and a paged cache keeps all"),
        (partial(attach, bank, correction=seergate.Rectify()), "evicts, and rectification needs all tokens"),
    ):
        refused(message, call)


def test_with_the_gate_on_what_they_keep(model, bank, scorer):
    evictor = seergate.methods.method_class(scorer)(bank=bank, token_budget=32, interval=4)
    gate = seergate.methods.Gate(bank=GateBank.for_model(model, GateConfig(SIZE, 16)), token_budget=16)
    with seergate.attached(model, seergate.methods.GateOnEvictor(evictor=evictor, gate=gate)) as handle:
        assert model.generate(prompt(60, 8), max_new_tokens=20, do_sample=False).shape == (1, 80)
        assert handle.stats()["density"] < 0.4
    evictor = replace(evictor, bank=evictor.bank.subset([1]))
    with seergate.attached(model, seergate.methods.GateOnEvictor(evictor=evictor, gate=gate)):
        missing = f"combined with '{scorer}': there are no gates for layer 0; give gates for"
        refused(missing, model.generate, prompt(60, 8), max_new_tokens=2)


def test_layers_without_gates_keep_everything(model, bank, scorer):
    method = seergate.methods.make_method(scorer, bank=bank.subset([1]), token_budget=24)
    cache = DynamicCache()
    with seergate.attached(model, method):
        model.generate(prompt(60, 8), past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert [layer.rows.resident for layer in cache.layers] == [[67], [31]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "sum"}, "target is 'sum'; with scorer 'fast_kvzip' it must be left out"),
        ({"reduction": "published"}, "reduction is 'published'; with scorer 'fast_kvzip' it must be left out"),
        ({"scorer": "trim_kv", "target_budget": 0}, "target_budget is 0; with scorer 'trim_kv' it must be the number"),
        ({"scorer": "trim_kv", "shard_base": True}, "shard_base is True; it must be left out with scorer 'trim_kv'"),
        ({"scorer": "trim_kv", "base_memory_gb": 2.0}, "base_memory_gb is 2.0; it must be left out with scorer"),
    ],
)
def test_refused_recipes(model, options, message):
    invalid(message, TrainConfig, model="tiny-reasoner", **({"scorer": "fast_kvzip"} | options))
    if options.keys() <= {"target", "reduction"}:
        invalid(message, retention_for(model, "fast_kvzip").distill_loss, model, input_ids=prompt(30, 1), **options)
