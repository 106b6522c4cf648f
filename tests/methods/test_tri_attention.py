"""TriAttention: its score by hand, RoPE's layouts, calibration."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import SeergateError, methods
from seergate.eval.calibration.query_centres import QueryCentres
from seergate.fingerprint import fingerprint
from seergate.methods.evicting import best
from seergate.methods.scoring import reduced
from seergate.methods.tri_attention import Centres, Pairs, tri_scores
from seergate.models import families
from seergate.models.rope import Rotary
from tests.support import naive_views
from tests.support.evictors import centres, model_of
from tests.support.models import prompt, tiny_model
from tests.support.running import refused
from tests.support.steps import spec, step


class TwoPairs:
    """RoPE of width 4 in half layout with frequencies 1 and .1."""

    def frequencies(self):
        return torch.tensor([1.0, 0.1])

    def rotate(self, x, positions):
        angles = positions[:, None, :, None] * self.frequencies()
        real, imaginary = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)


@pytest.mark.parametrize(
    ("reduction", "expected"), [("mean", [0.347798, 0.599689, 0.530781]), ("max", [0.793949, 1.095600, 0.823886])]
)
def test_tri_attention_by_hand(reduction, expected):
    rope = TwoPairs()
    pairs = Pairs(rope, 4, torch.device("cpu"))
    keys = torch.tensor([[1.0, 1, 0, 0], [0, 2, 1, 0], [1, 0, 0, 1]])[None]
    rotated = rope.rotate(keys[None], torch.tensor([[0, 1, 2]]))[0]
    mean, modulus = torch.tensor([[1.0, 0, 0, 0.5]]), torch.tensor([[1.25, 1.0]])
    distances = torch.tensor([1.0, 2.0])
    turned = pairs.turn(torch.tensor([[1.0, 1, 0, 0]]), distances).mean(1)[0]
    torch.testing.assert_close(turned, torch.tensor([0.062078, 0.987535, 0.875384, 0.149251]), rtol=0, atol=1e-6)
    ahead = pairs.turn(mean, distances)
    ahead = ahead.mean(1, keepdim=True) if reduction == "mean" else ahead
    queries = rope.rotate(ahead[None], torch.full((1, ahead.shape[1]), 3))[0]
    scores = tri_scores(queries, modulus - pairs.modulus(mean), rotated, pairs)[0, 0]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-6)
    if reduction == "mean":
        z = (scores - scores.mean()) / scores.std(correction=0)
        torch.testing.assert_close(z, torch.tensor([-1.363783, 1.006041, 0.357742]), rtol=0, atol=2e-6)
        assert best(z[None, None], [2]).tolist() == [[[1, 2]]]
        spread = tri_scores(queries * 0, modulus - pairs.modulus(mean), rotated, pairs)[0, 0]
        torch.testing.assert_close(spread, torch.tensor([0.75, 1.25, 0.75]))
        assert (scores - spread).argmax() == 2 and spread.argmax() == 1


def test_a_group_is_reduced_after_each_head_is_standardised():
    """Rows [1, 0, -1] and [-1.2, 1.3, -.1]: the maximum is [1, 1.3, -.1], the mean [-.1, .65, -.55]; and in a state,
    of what each head has alone.
    """
    rows = torch.tensor([[[1.0, 0, -1], [-1.2, 1.3, -0.1]]])
    expected = {"max": torch.tensor([[1.0, 1.3, -0.1]]), "mean": torch.tensor([[-0.1, 0.65, -0.55]])}
    mean, modulus, keys = torch.randn(2, 4), torch.full((2, 2), 9.0), torch.randn(1, 1, 7, 4)

    def importance(heads, reduction):
        centres = Centres({0: mean[heads]}, {0: modulus[heads]}, 1)
        method = methods.TriAttention(centres=centres, group_reduction=reduction, prompt="evictable")
        state = method.new_state(replace(spec(keys, len(heads)), rotary=TwoPairs()))
        return state.importance(step(torch.zeros(1, len(heads), 4), keys), 0)

    alone = torch.stack([importance([head], "max")[0] for head in (0, 1)])
    torch.testing.assert_close(alone.std(-1, correction=0), torch.ones(2))
    for reduction, scores in (("max", alone.amax(0)), ("mean", alone.mean(0))):
        torch.testing.assert_close(reduced(rows, reduction, 1), expected[reduction])
        torch.testing.assert_close(importance([0, 1], reduction)[0], scores)


@pytest.mark.parametrize("family", ["qwen3", "glm4", "phi3", "gpt_oss", "cohere2"])
def test_a_constant_query_is_predicted_exactly(family):
    """Its score is the future logit for any layout of RoPE: halves, interleaved, partial, with a factor, none."""
    model = tiny_model(family)
    layer, attention = families.full_attention_modules(model)[0]
    config = families.text_config(model)
    kind = families.rope_kind(config, attention)
    rotary = Rotary(families.decoder_of(model), attention, families.layer_type(config, layer), kind)
    pairs = Pairs(rotary, 16, torch.device("cpu"))
    q, k, at = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 9, 16), torch.arange(9)[None]
    keys = rotary.rotate(k, at)
    for distance in (1, 16):
        logit = rotary.rotate(q, torch.tensor([[9 + distance]])) @ keys.transpose(-1, -2)
        ahead = rotary.rotate(pairs.turn(q[0, :, 0], torch.tensor([float(distance)]))[None], torch.tensor([[9]]))[0]
        scores = tri_scores(ahead, torch.zeros(1, pairs.count), keys[0], pairs)
        torch.testing.assert_close(scores, logit[0], rtol=1e-3, atol=1e-3)


def test_where_the_positions_begin_does_not_matter():
    """Keys and the position of the next query shifted together: the same tokens stay."""
    model, ids, kept = model_of(4), prompt(60, 3), []
    method = methods.TriAttention(centres=centres(model), token_budget=24, interval=4)
    for begin in (0, 700):
        cache = DynamicCache()
        with seergate.attached(model, method):
            for part in (ids[:, :9], *ids[:, 9:].split(1, dim=1)):
                seen = cache.get_seq_length()
                positions = begin + torch.arange(seen, seen + part.shape[1])[None]
                model(input_ids=part, position_ids=positions, past_key_values=cache)
        layer = cache.layers[0]
        kept.append(layer.values[0, :, : layer.rows.resident[0]])  # the first layer's values know no position
    assert torch.equal(*kept)


def test_the_default_dtype_does_not_matter():
    model, before, texts = model_of(4), torch.get_default_dtype(), []
    found = centres(model)
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            with seergate.attached(model, "tri_attention", centres=found, token_budget=24, interval=4):
                texts.append(model.generate(prompt(60, 3), max_new_tokens=16))
        finally:
            torch.set_default_dtype(before)
    assert torch.equal(*texts)


def killed(tensors, target, metadata):
    Path(target).write_bytes(b"half")
    raise KeyboardInterrupt


def test_centres_are_the_mean_of_what_passed_and_survive_saving(tmp_path, monkeypatch):
    model, parts, whole, seen = model_of(4), QueryCentres(), QueryCentres(), []
    for recorder, chunks in ((whole, [prompt(90, 5)]), (parts, prompt(90, 5).split([40, 50], 1))):
        hook = model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda m, a, out: seen.append(out))
        cache = DynamicCache()
        with seergate.attached(model, recorder):
            for chunk in chunks:
                model(input_ids=chunk, past_key_values=cache)
        hook.remove()
    q = seen[0][0]  # [S, H, D]
    found, path = whole.centres(), tmp_path / "centres.safetensors"
    assert found.tokens == 90
    torch.testing.assert_close(found.mean[0], q.mean(0))
    torch.testing.assert_close(found.modulus[0], torch.hypot(q[..., :8], q[..., 8:]).mean(0))
    torch.testing.assert_close(parts.centres().mean[0], found.mean[0], rtol=1e-4, atol=1e-4)
    refused("these centres do not name their model", found.save, path)
    found = replace(found, made={"model": fingerprint(model)})
    found.save(path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("seergate.methods.tri_attention.save_file", killed)
        found.save(path)
    again = Centres.load(path)
    assert again.tokens == 90 and torch.equal(again.mean[1], found.mean[1])
    results = []
    for given in (found, str(path)):
        with seergate.attached(model, "tri_attention", centres=given, token_budget=24, interval=4):
            results.append(model.generate(input_ids=prompt(10), max_new_tokens=40))
    assert torch.equal(*results)


def test_centres_of_a_model_of_the_same_shape_are_refused(tmp_path):
    """Other weights, another RoPE, and a file of an earlier version, which says nothing of either."""
    model, path = model_of(4), str(tmp_path / "centres.safetensors")
    with seergate.attached(model, recorder := QueryCentres()):
        model(input_ids=prompt(60, 5))
    replace(recorder.centres(), made={"model": fingerprint(model)}).save(path)
    evictor = methods.TriAttention(centres=path, token_budget=24, interval=4)
    gate = methods.Gate(bank=naive_views.gate_for(model), token_budget=16)
    gated = methods.GateOnEvictor(evictor=evictor, gate=gate)
    for method in (evictor, gated):
        with seergate.attached(model, method):
            model.generate(input_ids=prompt(20), max_new_tokens=2)
    sibling = copy.deepcopy(model)
    sibling.model.layers[0].self_attn.q_proj.weight.data[0, 0] += 1
    for method in (evictor, gated):
        with pytest.raises(SeergateError, match="other weights than this one"), seergate.attached(sibling, method):
            pass
    turned = copy.deepcopy(model)
    for name in ("inv_freq", "original_inv_freq"):
        getattr(turned.model.rotary_emb, name)[3] *= 1.1
    assert fingerprint(turned) == fingerprint(model)
    with seergate.attached(turned, evictor), pytest.raises(SeergateError, match="another RoPE than layer 0"):
        turned.generate(input_ids=prompt(20), max_new_tokens=2)


def test_centres_that_do_not_fit_are_refused(tmp_path):
    refused("no query was recorded", QueryCentres().centres)
    other = model_of(1)
    attached = seergate.attached(other, "tri_attention", centres=centres(model_of(4)))
    with attached, pytest.raises(SeergateError, match="another model's"):
        other.generate(input_ids=prompt(20), max_new_tokens=2)
    (tmp_path / "junk").write_text("junk")
    for path, message in ((tmp_path / "none", "is no file"), (tmp_path / "junk", "does not hold")):
        refused(message, methods.TriAttention, centres=str(path))
