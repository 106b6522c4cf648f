"""After a dense pass the cache holds what a dense prefill of the same tokens would have left."""

import copy

import pytest
import torch
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration

import seergate
from seergate import DecodeConfig, Rectify, SeergateError, methods
from seergate.cache.batching import only_rows
from seergate.cache.layer import GatedLayer
from tests.decode.test_decode import BLOCK, gates, selector
from tests.support.decoding import Decoding
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.running import refused

EVERY = 5


def same_tokens(ours, dense, tokens):
    """The first keys and values of full layers, and what the method remembers of their whole blocks."""
    for layer, other in zip(ours.layers, dense.layers, strict=True):
        if not isinstance(layer, GatedLayer):
            continue
        pairs = [(layer.keys, other.keys, tokens), (layer.values, other.values, tokens)]
        for key in {"kg", "high", "low"} & set(layer.state.rows):
            pairs.append((layer.state.rows[key], other.state.rows[key], tokens // BLOCK))
        for mine, theirs, end in pairs:
            torch.testing.assert_close(mine[:, :, :end], theirs[:, :, :end], rtol=2e-4, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "family", "every"),
    [("gate", "qwen3", 5), ("quest", "qwen3", 5), *(("oracle", x, 1) for x in ("gemma3_text", "gpt_oss", "llama"))],
)
def test_a_rectified_cache_is_a_dense_one(name, family, every):
    """After every n-th sparse step, and after a further turn, below which nothing sparse may be left."""
    model = tiny_model(family)
    ids, method, dense = prompt(80), selector(model, name), {}
    with seergate.attached(model, method):
        for end in (52, 80):
            model(ids[:, :end], past_key_values=dense.setdefault(end, DynamicCache(config=model.config)))
    for correction in (Rectify(every), None):
        with seergate.attached(model, method, correction=correction) as handle:
            cache = DynamicCache(config=model.config)
            model(ids[:, :40], past_key_values=cache)
            for i in range(40, 52):
                model(ids[:, i : i + 1], past_key_values=cache)
            passes = 11 // every
            if correction:
                assert handle.stats()["rectification"] == {"every": every, "passes": passes, "tokens": passes * every}
                same_tokens(cache, dense[52], 40 + passes * every)
            if all(isinstance(layer, GatedLayer) for layer in cache.layers):
                with pytest.raises(AssertionError):  # sparse: what came after the last dense pass, or all of it
                    same_tokens(cache, dense[52], 52 if correction else 42)
            model(ids[:, 52:], past_key_values=cache)
            if correction:
                same_tokens(cache, dense[80], 80)
                with pytest.raises(SeergateError, match="input_ids"):
                    model(inputs_embeds=model.get_input_embeddings()(prompt(1)) + 1, past_key_values=cache)


@torch.no_grad()
def test_a_multimodal_class_decodes_text_as_the_text_model_does():
    """Such a class gives its decoder embeddings."""
    text = tiny_model("gemma3_text", layer_types=["full_attention"] * 2)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14}
    )
    model = Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    model.generation_config = text.generation_config
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    told, method = [], methods.Quest(token_budget=2 * BLOCK, block_size=BLOCK, dense_layers=())
    for each in (text, model):
        with seergate.attached(each, method, correction=Rectify(4)) as handle:
            tokens = each.generate(prompt(60), max_new_tokens=18).tolist()
            told.append((tokens, handle.stats()["rectification"]))
    assert told[0] == told[1] and told[0][1]["passes"] == 4


def test_generate_against_a_loop_that_reads_tokens_again(model):
    """On dynamic and static caches, in a copy of the model, and with drafts and beams."""
    batch = left_padded([prompt(40, 1), prompt(29, 2)])
    with seergate.attached(model, selector(model, "oracle"), correction=Rectify(EVERY)) as handle:
        sequences = model.generate(**batch, max_new_tokens=18)
        assert handle.stats()["rectification"]["passes"] == 3
        twin = copy.deepcopy(model)
        assert torch.equal(twin.generate(**batch, max_new_tokens=18, cache_implementation="static"), sequences)
        assert seergate.handle_of(twin).stats()["rectification"]["passes"] == 6
        for options, passes in (({"prompt_lookup_num_tokens": 3}, 2), ({"num_beams": 3}, 3)):
            handle.reset_stats()
            model.generate(prompt(40), max_new_tokens=18, **options)
            assert handle.stats()["rectification"]["passes"] >= passes
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
    assert torch.equal(sequences, ids)


@pytest.mark.parametrize(
    ("options", "length", "passes"),
    [
        ({"token_budget": 6 * BLOCK}, 30, 1),  # 55 tokens: sparse from the 49th on
        ({"token_budget": 2 * BLOCK, "dense_below": 200}, 40, 0),
        ({"token_budget": 2 * BLOCK, "dense_layers": (0, 1)}, 40, 0),
    ],
)
def test_steps_that_read_everything_are_not_rectified(model, options, length, passes):
    sliding = tiny_model("gemma3_text")
    with seergate.attached(
        sliding, methods.Quest(block_size=BLOCK, token_budget=128), correction=Rectify(4)
    ) as handle:
        sliding.generate(prompt(length), max_new_tokens=26, prompt_lookup_num_tokens=3)
        assert handle.stats()["rectification"]["passes"] == 0
    with seergate.attached(model, gates(model), DecodeConfig(**options), correction=Rectify(4)) as handle:
        model.generate(prompt(length), max_new_tokens=26)
        assert handle.stats()["rectification"] == {"every": 4, "passes": passes, "tokens": 4 * passes}


@torch.no_grad()
@pytest.mark.parametrize(("family", "lengths"), [("qwen3", (40, 29)), ("qwen3", (40, 9)), ("gemma3_text", (40,))])
def test_a_cache_whose_rectification_failed_is_refused(family, lengths):
    """A dense pass of rectification fails between two layers; it has all rows, or one row of two."""
    model = tiny_model(family)
    batch = left_padded([prompt(length, length) for length in lengths])

    def fail(module, args):
        if handle.correction.busy:
            raise ArithmeticError

    with seergate.attached(model, selector(model, "gate"), correction=Rectify(EVERY)) as handle:
        rows = Decoding(model, **batch, cache=DynamicCache(config=model.config))
        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            for _ in range(EVERY + 1):
                rows.read(rows.logits[:, -1:].argmax(-1))
        hook.remove()
        refused("or a pass failed, .*; start a new one", rows.read, rows.logits[:, -1:].argmax(-1))
        assert model.generate(**batch, max_new_tokens=12).shape[1] == 52
    refused("a pass failed .*; start a new one", rows.read, rows.logits[:, -1:].argmax(-1))  # the plain model


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("gemma3_text", {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}),
    ],
)
def test_a_row_does_not_depend_on_its_batch(family, options):
    """One prompt is shorter than the budget, so its first steps read everything."""
    model, prompts = tiny_model(family, **options).double(), [prompt(40, 1), prompt(2 * BLOCK - 5, 2)]
    method = methods.Quest(block_size=BLOCK, token_budget=2 * BLOCK)
    with seergate.attached(model, method, correction=Rectify(4)):
        alone = [Decoding(model, ids, cache=DynamicCache(config=model.config)) for ids in prompts]
        both = Decoding(model, **left_padded(prompts), cache=DynamicCache(config=model.config))
        for i in range(24):
            for row in alone:
                row.read(prompt(1, i))
            both.read(prompt(1, i).expand(2, -1))
            for row, one in enumerate(alone):
                torch.testing.assert_close(both.logits[row, -1], one.logits[0, -1])


def test_a_cache_narrowed_to_some_rows(model):
    with seergate.attached(model, selector(model, "quest")):
        model(**left_padded([prompt(30, 1), prompt(20, 2)]), past_key_values=(cache := DynamicCache()))
        layer = cache.layers[0]
        with only_rows(cache, [1]):
            assert layer.rows.resident == [20]
            layer.keys[0, :, 3] = layer.state.rows["high"][0, :, 0] = 7.0
        assert layer.rows.resident == [30, 20]
        changed = [
            (x[:, :, i] == 7).flatten(1).all(1).tolist() for x, i in ((layer.keys, 3), (layer.state.rows["high"], 0))
        ]
        assert changed == [[False, True]] * 2
        with pytest.raises(SeergateError, match="narrowed"), only_rows(cache, [1]):
            cache.crop(-3)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "cohere2"])
def test_sliding_windows_that_a_crop_has_shortened_are_refused(family):
    """By drafts that are rejected, and by the user."""
    model, ids = tiny_model(family), prompt(12, 5).repeat(1, 4)
    method = methods.Oracle(token_budget=2 * BLOCK, block_size=BLOCK)
    with seergate.attached(model, method, correction=Rectify(3)):
        with pytest.raises(SeergateError, match="or for rejected drafts, which has shortened"):
            model.generate(ids, max_new_tokens=13, prompt_lookup_num_tokens=4)
        cache = DynamicCache(config=model.config)
        model.generate(ids, max_new_tokens=9, past_key_values=cache)
        cache.crop(-1)
        with pytest.raises(SeergateError, match="this cache was cropped, by the caller"):
            for _ in range(5):
                model(prompt(1), past_key_values=cache)
