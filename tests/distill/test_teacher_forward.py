"""The loss and gradients of a pack against the attention maps of transformers' own model, segment by segment."""

import copy

import pytest
import torch

import seergate
from seergate import GateBank, GateConfig, ops
from seergate.distill.losses import block_loss
from seergate.distill.losses.teacher_forward import distill_step
from seergate.distill.packing import packed
from seergate.gates.gate import AttnGate
from seergate.models import families
from seergate.models.hooks import QKHook
from seergate.ops.torch_impl.teacher import Teacher
from tests.support.models import prompt, tiny_model
from tests.support.running import invalid, refused

FAMILIES = "qwen3 qwen3_moe qwen2 llama phi3 gemma2 gemma3_text gemma4_text gpt_oss glm4 cohere2"


def expected(bank, model, segments, row_start, reduction):
    """Loss with an autograd graph, from ``output_attentions`` of the plain eager model."""
    size, group = bank.config.block_size, bank.geometry.num_heads // bank.geometry.num_kv_heads
    sinks = bank.config.sink_blocks
    widest = max(-(-len(ids) // size) for ids in segments)
    qk_hooks = {layer: QKHook(model, attention) for layer, attention in families.full_attention_modules(model)}
    kl, rows = {layer: [] for layer in qk_hooks}, 0
    segments = [ids for ids in segments if len(ids)]
    for ids in segments:
        maps = model.get_decoder()(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
        if len(maps) < model.config.num_hidden_layers:  # hybrids return the maps of their attention layers only
            maps = dict(zip(sorted(qk_hooks), maps, strict=True))
        counted = [t for t in range(int(len(ids) * row_start), len(ids)) if t >= (1 + sinks) * size]
        everyone = len(ids) - int(len(ids) * row_start)
        rows += len(counted)
        for layer, qk_hook in qk_hooks.items():
            q, k = qk_hook.take()
            gate = bank.gate(layer)
            blocks = len(ids) // size
            if not counted:
                continue
            pooled = ops.pool_keys(k[:, :, : blocks * size], size, bank.config.k_pooling)
            keys = gate.keys(pooled, torch.arange(blocks) * size)
            scores = gate.scores(gate.queries(q, torch.arange(len(ids))), keys)[0]
            largest = maps[layer][0][..., : blocks * size].unflatten(-1, (blocks, size)).amax(-1)
            p = largest.unflatten(0, (-1, group)).amax(1)
            total = 0.0
            for t in counted:
                past = t // size
                target = p[:, t, sinks:past] / p[:, t, sinks:past].sum(-1, keepdim=True)
                total = total + (target * (target.log() - scores[:, t, sinks:past].log_softmax(-1))).sum(-1)
            weight = 1.0 if reduction == "row_mean" else 1.0 / (everyone * widest)
            kl[layer].append(total.mean() * weight)
    for qk_hook in qk_hooks.values():
        qk_hook.remove()
    if reduction == "row_mean":
        return torch.stack([sum(parts) / rows for parts in kl.values()]).mean()
    return 10 * torch.stack([sum(parts) / len(segments) for parts in kl.values()]).sum()


@pytest.mark.parametrize("family", FAMILIES.split())
@pytest.mark.parametrize(
    ("reduction", "row_start", "sinks"), [("row_mean", 0.5, 0), ("published", 0.0, 0), ("row_mean", 0.0, 1)]
)
def test_pack_against_the_models_own_maps(family, reduction, row_start, sinks):
    model = tiny_model(family, attn_implementation="eager")
    bank = GateBank.for_model(model, GateConfig(8, families.head_dim_of(model), sink_blocks=sinks))
    for parameter in bank.parameters():
        parameter.data.normal_(std=0.5)
    segments = [prompt(n, n)[0] for n in (37, 1, 50, 7)]
    reference = expected(bank, model, [*segments, torch.empty(0, dtype=torch.long)], row_start, reduction)
    gradients = torch.autograd.grad(reference, list(bank.parameters()))
    borders = torch.tensor([0, 37, 38, 88, 95, 95], dtype=torch.int32)
    rows = {"row_start": row_start, "reduction": reduction}
    loss = bank.distill_loss(model, input_ids=torch.cat(segments)[None], cu_seqlens=borders, **rows)
    (3 * loss).backward()
    torch.testing.assert_close(loss, reference, rtol=1e-4, atol=1e-6)
    for (name, parameter), gradient in zip(bank.named_parameters(), gradients, strict=True):
        error = (parameter.grad / 3 - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 16}),
        ("llama", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_windows_are_those_of_the_models_masks(family, windows):
    """Qwen2-MoE gives its window to the masks only, which packs have not; Llama's code has no windows."""
    model = tiny_model(family, attn_implementation="eager", **windows)
    bank, ids = GateBank.for_model(model, GateConfig(8, 16)), prompt(50)
    reference = expected(bank, model, [ids[0]], 0.5, "row_mean")
    model.model.__class__ = type("OneOfOnesOwn", (type(model.model),), {"__module__": __name__})
    torch.testing.assert_close(bank.distill_loss(model, input_ids=ids), reference, rtol=1e-4, atol=1e-6)


def test_the_weighting_changes_the_loss_and_not_what_is_reported(model):
    bank = GateBank.for_model(model, GateConfig(8, 16))
    mean, published = (distill_step(bank, model, prompt(60), reduction=each) for each in ("row_mean", "published"))
    assert torch.equal(published.kl_per_layer, mean.kl_per_layer) and published.loss != mean.loss
    torch.testing.assert_close(mean.loss, mean.kl_per_layer.mean())


def test_hybrids_with_linear_attention_take_one_sequence_at_a_time():
    model = tiny_model("qwen3_next")
    bank = GateBank.for_model(model, GateConfig(8, 16))
    assert bank.distill_loss(model, input_ids=prompt(40)).item() > 0
    refused("one sequence each", bank.distill_loss, model, input_ids=prompt(40), cu_seqlens=torch.tensor([0, 20, 40]))


def test_the_model_is_left_as_it_was():
    model = tiny_model("gemma3_text")
    before = model(input_ids=prompt(30)).logits
    bank = GateBank.for_model(model, GateConfig(8, 16))
    loss = bank.distill_loss(model, input_ids=prompt(30))
    loss.backward()
    with torch.no_grad():
        watched = bank.distill_loss(model, input_ids=prompt(30))
    assert not watched.requires_grad and watched.item() == loss.item()
    assert torch.equal(model(input_ids=prompt(30)).logits, before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in bank.parameters())
    invalid("cu_seqlens", bank.distill_loss, model, input_ids=prompt(30), cu_seqlens=torch.tensor([0, 31]))
    assert torch.equal(model(input_ids=prompt(30)).logits, before)


@pytest.mark.parametrize("scorer", ["attn_gate", "msa", "indexer"])
@pytest.mark.parametrize("branch", ["q_proj", "k_proj"])
def test_a_part_of_a_gate_may_be_trained_alone(model, scorer, branch):
    bank, ids = GateBank.for_model(model, GateConfig(8, 16, scorer=scorer)), prompt(40)
    whole = torch.autograd.grad(bank.distill_loss(model, input_ids=ids), list(bank.parameters()))
    for name, parameter in bank.named_parameters():
        parameter.requires_grad_(branch in name)
    bank.distill_loss(model, input_ids=ids).backward()
    for (name, parameter), gradient in zip(bank.named_parameters(), whole, strict=True):
        assert torch.equal(parameter.grad, gradient) if branch in name else parameter.grad is None


def test_a_method_that_is_attached_meanwhile_goes_on_afterwards(model):
    bank, ids = GateBank.for_model(model, GateConfig(8)), prompt(40)
    want = distill_step(bank, model, ids).loss
    with seergate.attached(model, bank, token_budget=16):
        tokens = model.generate(ids, max_new_tokens=6)
        assert torch.equal(distill_step(bank, model, ids).loss, want)
        assert torch.equal(model.generate(ids, max_new_tokens=6), tokens)
    assert not any(hasattr(attention, "seergate_attention") for _, attention in families.attention_modules(model))


def test_recall_is_one_for_a_budget_of_everything_and_grows_with_it(model):
    bank = GateBank.for_model(model, GateConfig(8, 16))
    out = distill_step(bank, model, prompt(100), recall_budgets=(16, 32, 64, 104))
    assert out.recall.shape == (4, 2, 2)
    assert (out.recall.diff(dim=0) > 0).all()
    torch.testing.assert_close(out.recall[-1], torch.ones(2, 2))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_the_teacher_is_computed_once(family, monkeypatch):
    """The log-sum-exp comes with the attention's output, also under sinks and caps: no second pass of exponentials."""

    def second_pass(*_):
        raise AssertionError("a pass over the scores")

    monkeypatch.setattr(Teacher, "normaliser", second_pass)
    model = tiny_model(family)
    bank = GateBank.for_model(model, GateConfig(8, families.head_dim_of(model)))
    assert distill_step(bank, model, prompt(61), torch.tensor([0, 40, 40, 61])).loss > 0


def test_under_autocast_the_loss_gets_what_its_normaliser_was_made_of(model, monkeypatch):
    """Normalised queries and keys come wider than values."""
    real, given = ops.gate_kl, []

    def gate_kl(q, k, *args, lse, **options):
        given.append((q, k, lse))
        return real(q, k, *args, lse=lse, **options)

    monkeypatch.setattr(ops, "gate_kl", gate_kl)
    bank, borders = GateBank.for_model(model, GateConfig(8, 16)), torch.tensor([0, 40], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        distill_step(bank, model, prompt(40), borders)
    assert len(given) == 2
    for q, k, lse in given:
        assert q.dtype == k.dtype == torch.bfloat16
        assert torch.equal(ops.packed_attention(q, k, k, borders, 16**-0.5).lse, lse)


def test_queries_are_made_of_rows_that_count(model, monkeypatch):
    real, seen = AttnGate.queries, []

    def queries(self, q_BHSD, positions):
        seen.append(positions.tolist())
        return real(self, q_BHSD, positions)

    monkeypatch.setattr(AttnGate, "queries", queries)
    monkeypatch.setattr(block_loss, "TILE", 16)
    # From the second half on, with a past block, behind the sinks; none of the short one.
    borders = torch.tensor([0, 50, 53, 67])
    for sinks, stride, rows in (
        (0, {}, [*range(25, 50), *range(8, 14)]),
        (3, {}, [*range(32, 50)]),
        (1, {"row_stride": 6, "row_shift": 7}, [26, 32, 38, 44]),
    ):
        bank = GateBank.for_model(model, GateConfig(8, 16, sink_blocks=sinks))
        gradients = []
        for tile in (16, len(rows)):
            monkeypatch.setattr(block_loss, "TILE", tile)
            seen.clear()
            bank.zero_grad()
            bank.distill_loss(model, input_ids=prompt(67), cu_seqlens=borders, **stride).backward()
            tiles = [rows[i : i + tile] for i in range(0, len(rows), tile)]
            assert seen == (4 if len(tiles) > 1 else 2) * tiles  # two layers; one tile is kept for the gradients
            gradients.append([parameter.grad.clone() for parameter in bank.parameters()])
        torch.testing.assert_close(*gradients)


def test_a_step_waits_for_no_device(model):
    """On meta tensors reading a value is an error, as it is a stall on a GPU."""
    model = copy.deepcopy(model).to("meta")
    bank = GateBank.for_model(model, GateConfig(8, 16)).to("meta")
    ids, cu_seqlens = packed([prompt(40)[0].numpy(), prompt(21)[0].numpy()])
    out = distill_step(bank, model, ids, cu_seqlens, recall_budgets=(16,))
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in bank.parameters())


@pytest.mark.parametrize("scorer", ["attn_gate", "msa"])
def test_keys_of_all_samples_are_pooled_at_once(monkeypatch, scorer):
    """One launch a layer, however many samples a pack has."""
    model = tiny_model("qwen3")
    bank = GateBank.for_model(model, GateConfig(8, 16, scorer=scorer))
    calls, gate = [], type(bank.gate(0))
    real = gate.pool
    monkeypatch.setattr(gate, "pool", lambda self, k: calls.append(k.shape[2]) or real(self, k))
    borders = torch.tensor([0, 37, 38, 88, 95], dtype=torch.int32)
    distill_step(bank, model, prompt(95), borders)
    padded = 8 * (5 + 1 + 7 + 1) if scorer == "attn_gate" else 95
    assert calls == [padded] * len(bank)
