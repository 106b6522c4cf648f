"""Rectification: after a dense pass the cache holds what a dense prefill of the same tokens would have left."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import DecodeConfig, Rectify, SeergateError
from seergate.cache.batching import only_rows
from seergate.cache.layer import GatedLayer
from seergate.eval.generation.engine import Batch
from tests.decode.test_decode import BLOCK, gates, selector
from tests.support.decoding import Decoding
from tests.support.models import left_padded, prompt, tiny_model

EVERY = 5


def dense_cache(model, method, **inputs):
    """What a prefill, which is dense, leaves under the method."""
    cache = DynamicCache()
    with seergate.attached(model, method):
        model(**inputs, past_key_values=cache)
    return cache


def same_tokens(ours, dense, tokens, row=0, dense_row=0):
    """Keys and values of a row's first tokens, and what the method remembers of their whole blocks."""
    for layer, other in zip(ours.layers, dense.layers, strict=True):
        for mine, theirs in ((layer.keys, other.keys), (layer.values, other.values)):
            torch.testing.assert_close(mine[row, :, :tokens], theirs[dense_row, :, :tokens], rtol=1e-4, atol=1e-4)
        for key in {"kg", "high", "low"} & set(layer.state.rows):
            mine, theirs = layer.state.rows[key][row], other.state.rows[key][dense_row]
            torch.testing.assert_close(mine[:, : tokens // BLOCK], theirs[:, : tokens // BLOCK], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gate", "quest", "oracle", "random"])
def test_a_rectified_cache_is_a_dense_one(model, name):
    """After every fifth sparse step, before the sixth; and it is not, without rectification."""
    ids, length, new = prompt(60), 40, 12
    method, runs = selector(model, name), {}
    for every in (EVERY, None):
        correction, cache = None if every is None else Rectify(every), DynamicCache()
        with seergate.attached(model, method, correction=correction) as handle:
            model(input_ids=ids[:, :length], past_key_values=cache)
            for i in range(length, length + new):
                model(input_ids=ids[:, i : i + 1], past_key_values=cache)
            runs[every] = cache, handle.stats().get("rectification")
    dense = dense_cache(model, method, input_ids=ids[:, : length + new])
    assert runs[EVERY][1] == {"every": EVERY, "passes": 2, "tokens": 10}
    assert runs[None][1] is None
    same_tokens(runs[EVERY][0], dense, length + 10)
    with pytest.raises(AssertionError):  # what came after the last dense pass is sparse
        same_tokens(runs[EVERY][0], dense, length + new)
    with pytest.raises(AssertionError):
        same_tokens(runs[None][0], dense, length + 2)


def test_every_token_that_is_said_follows_from_the_rectified_cache(model):
    """`generate` against a loop that takes tokens back and reads them again by hand."""
    batch = left_padded([prompt(40, 1), prompt(29, 2)])
    with seergate.attached(model, selector(model, "oracle"), correction=Rectify(EVERY)) as handle:
        found = model.generate(**batch, max_new_tokens=18)
        assert handle.stats()["rectification"]["passes"] == 3
    with seergate.attached(model, selector(model, "oracle")) as handle:
        rows, ids, sparse = Decoding(model, **batch), batch["input_ids"], 0
        for _ in range(18):
            ids = torch.cat((ids, rows.logits[:, -1:].argmax(-1)), 1)
            if sparse == EVERY:
                rows.crop(EVERY)
                sparse = 0
                with handle.passes.forced("dense"):
                    rows.read(ids[:, -EVERY - 1 : -1])
            rows.read(ids[:, -1:])
            sparse += 1
    assert torch.equal(found, ids)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "llama"])
def test_families_with_windows_sinks_and_other_groups(family):
    """A rectification after every step leaves no sparse token behind: only the newest one can differ from dense."""
    model = tiny_model(family)
    ids = prompt(70)
    with seergate.attached(model, selector(model, "oracle"), correction=Rectify(1)) as handle:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :45], past_key_values=cache)
        for i in range(45, 69):
            model(input_ids=ids[:, i : i + 1], past_key_values=cache)
        assert handle.stats()["rectification"]["passes"] == 23
    straight = DynamicCache(config=model.config)
    with seergate.attached(model, selector(model, "oracle")):
        model(input_ids=ids[:, :68], past_key_values=straight)
    for layer, dense in zip(cache.layers, straight.layers, strict=True):
        if hasattr(layer, "state"):
            for mine, theirs in ((layer.keys, dense.keys), (layer.values, dense.values)):
                torch.testing.assert_close(mine[:, :, :68], theirs[:, :, :68], rtol=2e-4, atol=2e-4)
        else:
            assert layer.keys.shape[2] < 32 + 4, "a window keeps no more than it needs"


@pytest.mark.parametrize("name", ["gate", "oracle"])
def test_rows_that_come_later_are_rectified_in_their_own_time(model, name):
    """Continuous batching: a row has the same tokens alone and beside rows that began earlier."""
    prompts = [prompt(length, seed)[0].tolist() for seed, length in enumerate((40, 30, 37))]

    def alone(ids, new):
        with seergate.attached(model, method, correction=Rectify(EVERY)):
            batch, said = Batch(model), []
            logits = batch.add([ids])
            for _ in range(new):
                said.append(int(logits.argmax(-1)))
                logits = batch.step(said[-1:])
        return said, batch.cache

    method = selector(model, name)
    expected = [alone(ids, new) for ids, new in zip(prompts, (19, 16, 12), strict=True)]
    with seergate.attached(model, method, correction=Rectify(EVERY)) as handle:
        batch, said, last = Batch(model), [[], [], []], []
        for step in range(19):
            if step in (0, 3, 7):
                logits = batch.add([prompts[len(last)]])
                said[len(last)].append(int(logits.argmax(-1)))
                last.append(said[len(last)][-1])
                if step:
                    continue
                logits = batch.step(last)
            else:
                logits = batch.step(last)
            last = logits.argmax(-1).tolist()
            for row, token in enumerate(last):
                said[row].append(token)
        assert handle.stats()["rectification"]["passes"] > 6
    for row, (texts, cache) in enumerate(expected):
        assert said[row] == texts[: len(said[row])], row
        tokens = min(cache.layers[0].rows.resident[0], batch.cache.layers[0].rows.resident[row])
        same_tokens(batch.cache, cache, tokens - tokens % EVERY - EVERY, row)


def test_beams_drafts_and_further_turns(model):
    question, method = prompt(40), selector(model, "gate")
    with seergate.attached(model, method, correction=Rectify(EVERY)) as handle:
        assert model.generate(input_ids=question, max_new_tokens=14, num_beams=3).shape == (1, 54)
        assert handle.stats()["rectification"]["passes"] == 2
        greedy = model.generate(input_ids=question, max_new_tokens=17)
        handle.reset_stats()
        model.generate(input_ids=question, max_new_tokens=17, prompt_lookup_num_tokens=3)
        assert handle.stats()["rectification"]["tokens"] >= 10
        # A new turn attends densely, so nothing sparse may be left below it.
        cache = DynamicCache()
        first = model.generate(input_ids=question, max_new_tokens=17, past_key_values=cache)
        assert torch.equal(first, greedy)
        turn = torch.cat((first, prompt(40, 3)), 1)
        model(input_ids=turn[:, cache.get_seq_length() :], past_key_values=cache)
    same_tokens(cache, dense_cache(model, method, input_ids=turn), turn.shape[1])


def test_steps_that_read_everything_are_not_rectified(model):
    with seergate.attached(model, gates(model), DecodeConfig(token_budget=6 * BLOCK), correction=Rectify(4)) as handle:
        model.generate(input_ids=prompt(30), max_new_tokens=18)  # 47 tokens, which the budget covers
        assert handle.stats()["rectification"]["passes"] == 0
        model.generate(input_ids=prompt(30), max_new_tokens=26)  # 54 tokens: sparse from the 49th on
        assert handle.stats()["rectification"] == {"every": 4, "passes": 1, "tokens": 4}
    for dense in ({"dense_below": 200}, {"dense_layers": (0, 1)}):
        with seergate.attached(model, gates(model), DecodeConfig(2 * BLOCK, **dense), correction=Rectify(4)) as handle:
            model.generate(input_ids=prompt(40), max_new_tokens=30)
            assert handle.stats()["density"] == 1 and handle.stats()["rectification"]["passes"] == 0


def test_static_caches_are_rectified_too(model):
    batch = left_padded([prompt(40, 1), prompt(29, 2)])
    with seergate.attached(model, gates(model), token_budget=2 * BLOCK, correction=Rectify(4)):
        dynamic = model.generate(**batch, max_new_tokens=15)
        static = model.generate(**batch, max_new_tokens=15, cache_implementation="static")
    assert torch.equal(dynamic, static)


def test_copies_of_a_rectified_model(model):
    """A copy has hooks, counters and caches of its own."""
    with seergate.attached(model, selector(model, "oracle"), correction=Rectify(4)) as handle:
        twin = copy.deepcopy(model)
        texts = [each.generate(input_ids=prompt(45), max_new_tokens=14) for each in (model, twin)]
        counted = [handle.stats()["rectification"], seergate.handle_of(twin).stats()["rectification"]]
    assert torch.equal(*texts) and counted[0] == counted[1] == {"every": 4, "passes": 3, "tokens": 12}


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("lengths", [(40,), (40, 29)], ids=["one row", "rows in their own time"])
def test_a_rectification_that_fails_leaves_the_cache_as_it_was(family, lengths):
    """Between two layers of the dense pass; the step can be taken again, and gives what it would have given."""
    model = tiny_model(family)
    batch, failing = left_padded([prompt(length, length) for length in lengths]), False

    def fail(module, args):
        if failing and handle.correction.busy:
            raise ArithmeticError

    def contents(cache):
        found = []
        for layer in copy.deepcopy(cache).layers:
            if isinstance(layer, GatedLayer):
                rows = layer.rows
                found += [rows.resident, rows.total, rows.slots, rows.lengths, layer.state.rows]
                found += [
                    x[row, :, :held] for x in (layer.keys, layer.values) for row, held in enumerate(rows.resident)
                ]
            else:
                found += [layer.keys, layer.values, layer.get_seq_length()]
        return found

    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    method, runs = selector(model, "gate"), []
    for fails in (False, True):
        with seergate.attached(model, method, correction=Rectify(EVERY)) as handle:
            rows, logits = Decoding(model, **batch, cache=DynamicCache(config=model.config)), []
            for _ in range(18):
                ids, mask = rows.logits[:, -1:].argmax(-1), rows.mask
                before, failing = contents(rows.cache), fails
                try:
                    rows.read(ids)
                except ArithmeticError:
                    torch.testing.assert_close(contents(rows.cache), before, rtol=0, atol=0)
                    failing, rows.mask = False, mask
                    rows.read(ids)
                    logits.append("failed")
                logits.append(rows.logits)
            runs.append((torch.stack([x for x in logits if x != "failed"]), logits.count("failed")))
    assert runs[0][1] == 0 and runs[1][1] == 3
    assert torch.equal(runs[0][0], runs[1][0])


def test_a_cache_narrowed_to_some_rows(model):
    with seergate.attached(model, selector(model, "quest")):
        cache = DynamicCache()
        model(**left_padded([prompt(30, 1), prompt(20, 2), prompt(25, 3)]), past_key_values=cache)
        layer = cache.layers[0]
        before = layer.keys.clone()
        with only_rows(cache, [2, 0]):
            assert layer.rows.resident == [25, 30]
            layer.keys[0, :, 3] = 7.0
            layer.state.rows["high"][1, :, 0] = 9.0
        assert layer.rows.resident == [30, 20, 25]
        assert (layer.keys[2, :, 3] == 7).all() and (layer.state.rows["high"][0, :, 0] == 9).all()
        before[2, :, 3] = 7.0
        assert torch.equal(layer.keys, before)
        with pytest.raises(SeergateError, match="narrowed"), only_rows(cache, [1]):
            cache.crop(-3)


def test_refusals(model):
    with pytest.raises(ValueError, match="every is 0; it must be a whole number, 1 or greater"):
        Rectify(0)
    with pytest.raises(ValueError, match="correction is 1; it must be a seergate.Rectify, or None"):
        seergate.attach(model, "quest", correction=1)
    hooks = len(model.model._forward_hooks) + len(model.model._forward_pre_hooks)
    cache = DynamicCache()
    with seergate.attached(model, selector(model, "oracle"), correction=Rectify(4)):
        model(input_ids=prompt(30), past_key_values=cache)
        model(input_ids=prompt(1), past_key_values=cache)
        with pytest.raises(SeergateError, match="input_ids"):
            model(inputs_embeds=model.get_input_embeddings()(prompt(1)), past_key_values=cache)
    assert len(model.model._forward_hooks) + len(model.model._forward_pre_hooks) == hooks


def test_rectification_where_the_model_makes_the_cache(model):
    def said(**cache):
        out = model(prompt(60), **cache)
        steps = []
        for step in range(12):
            out = model(prompt(1, step), past_key_values=out.past_key_values)
            steps.append(out.logits)
        return torch.stack(steps)

    with seergate.attached(model, "resa", token_budget=32, rectify_every=4) as handle, torch.no_grad():
        assert torch.equal(said(), said(past_key_values=DynamicCache()))
        assert handle.stats()["rectification"]["passes"] > 0
