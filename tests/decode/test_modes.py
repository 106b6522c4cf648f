"""Ways of decoding: dense below a length, beams, prompts in chunks, further turns; and figures per head."""

import gc

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import seergate
from seergate import DecodeConfig, methods
from seergate.cache.forward import ForwardModes
from seergate.methods.selecting import with_all_blocks
from seergate.ops import Selection
from tests.decode.test_decode import BLOCK, gates, selector
from tests.support.models import left_padded, prompt


def test_short_rows_read_everything_worked_out_by_hand():
    indices = torch.tensor([[[0, 3], [2, 3]], [[1, 2], [0, -1]], [[0, 1], [4, 5]]], dtype=torch.int32)
    counts = torch.tensor([[2, 2], [2, 1], [2, 2]], dtype=torch.int32)
    ends = [32, 17, 48]  # in blocks of 8: 4, 3 and 6
    selection = with_all_blocks(Selection(indices, counts), ends, 8, short=32)
    assert selection.indices.tolist() == [
        [[0, 1, 2, 3], [0, 1, 2, 3]],
        [[0, 1, 2, -1], [0, 1, 2, -1]],
        [[0, 1, -1, -1], [4, 5, -1, -1]],
    ]
    assert selection.counts.tolist() == [[4, 4], [3, 3], [2, 2]]
    assert selection.indices.dtype == selection.counts.dtype == torch.int32
    untouched = Selection(indices, counts)
    assert with_all_blocks(untouched, ends, 8, short=16) is untouched


def test_a_pass_without_a_cache_has_no_drafts():
    """Also if drafter and configuration outlive the cache of a call of `generate`."""
    passes, owner, cache = ForwardModes(decodes_drafts=True), GenerationConfig(), DynamicCache()
    passes.drafting(owner, cache, 3)
    passes.generating(owner, cache)
    assert passes.mode(cache, 0, 5).decoded == 2 and passes.generates(cache)
    del cache
    gc.collect()
    assert passes.mode(None, 0, 5).decoded == 0 and not passes.generates(None)


@pytest.mark.parametrize("name", ["gate", "quest", "streaming_llm"])
def test_beams(model, name):
    """With a budget for everything they are the plain model's; sparse ones do not depend on the batch."""
    batch = left_padded([prompt(40, 1), prompt(26, 2)])
    options = {"max_new_tokens": 14, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}

    def method(budget):
        return methods.StreamingLLM(token_budget=budget) if name == "streaming_llm" else selector(model, name, budget)

    plain = model.generate(**batch, **options)
    with seergate.attached(model, method(4096)):
        assert torch.equal(model.generate(**batch, **options), plain)
    sparse = method(2 * BLOCK)
    with seergate.attached(model, sparse):
        together = model.generate(**batch, **options)
        alone = model.generate(input_ids=prompt(26, 2), **options)
    assert torch.equal(together[2:, 14:], alone) and not torch.equal(together, plain)


@pytest.mark.parametrize("chunk", [1, 7, 39])
def test_a_prompt_in_chunks_is_the_prompt(model, chunk):
    """Chunks of any length, a last one of a single token among them; in the first turn and in a further one."""
    question, more = left_padded([prompt(40, 1), prompt(31, 2)]), prompt(22, 3).expand(2, -1)
    for name in ("gate", "quest"):
        with seergate.attached(model, selector(model, name, 2 * BLOCK)):
            results = []
            for options in ({}, {"prefill_chunk_size": chunk}):
                cache = DynamicCache()
                first = model.generate(**question, max_new_tokens=9, past_key_values=cache, **options)
                ids = torch.cat((first, more), 1)
                mask = torch.cat((question["attention_mask"], torch.ones(2, 31, dtype=torch.long)), 1)
                second = model.generate(ids, attention_mask=mask, max_new_tokens=9, past_key_values=cache, **options)
                results.append((second, [layer.keys[:, :, :60] for layer in cache.layers]))
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [2, 40])
def test_a_further_turn_is_read_densely_however_short(model, length):
    """A chat on one cache: the new question is a prompt, not a draft that is being verified."""
    method, more = selector(model, "oracle", 2 * BLOCK), prompt(length, 3)
    cache, by_hand = DynamicCache(), DynamicCache()
    with seergate.attached(model, method) as handle:
        first = model.generate(input_ids=prompt(40), max_new_tokens=9, past_key_values=cache)
        second = model.generate(torch.cat((first, more), 1), max_new_tokens=1, past_key_values=cache)
        model(input_ids=prompt(40), past_key_values=by_hand)
        for i in range(40, 48):
            model(input_ids=first[:, i : i + 1], past_key_values=by_hand)
        logits = model(input_ids=torch.cat((first[:, 48:], more), 1), past_key_values=by_hand).logits
    assert int(logits[0, -1].argmax()) == int(second[0, -1])
    for ours, theirs in zip(cache.layers, by_hand.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, : 49 + length], theirs.keys[:, :, : 49 + length])
    assert "_prefill" not in vars(model)
    with seergate.attached(model, method):
        handle.detach()  # of the one before: takes nothing from this one
        assert "_prefill" in vars(model)


def test_going_on_with_a_text_is_never_having_stopped(model):
    """The last token alone is decoded, not read as a prompt."""
    cache = DynamicCache()
    with seergate.attached(model, selector(model, "gate", 2 * BLOCK)):
        whole = model.generate(input_ids=prompt(40), max_new_tokens=20)
        half = model.generate(input_ids=prompt(40), max_new_tokens=9, past_key_values=cache)
        rest = model.generate(input_ids=half, max_new_tokens=11, past_key_values=cache)
    assert torch.equal(rest, whole)


def test_figures_per_head(model):
    """Heads that read differently are counted apart; dense layers read everything."""
    config = DecodeConfig(threshold=0.2, dense_layers=(0,))
    with seergate.attached(model, gates(model), config) as handle:
        model.generate(input_ids=prompt(60), max_new_tokens=12)
        stats = handle.stats()
    assert stats["density_per_head"][0] == [1.0, 1.0]
    one, other = stats["density_per_head"][1]
    assert 0 < one < 1 and 0 < other < 1 and one != other
    assert stats["density_per_layer"][1] == pytest.approx((one + other) / 2)
    seen = sum(range(61, 72))
    assert stats["tokens_per_head"][1] == pytest.approx([one * seen / 11, other * seen / 11])
    dense_bytes = 2 * 2 * seen * 2 * 16 * 4 / 11  # layers, heads, tokens, key and value, width, bytes, steps
    assert stats["bytes_dense_per_step"] == pytest.approx(dense_bytes)
    tokens_read = sum(sum(heads) for heads in stats["tokens_per_head"])
    assert stats["bytes_read_per_step"] - stats["bytes_scored_per_step"] == pytest.approx(tokens_read * 2 * 16 * 4)


@pytest.mark.parametrize("name", ["gate", "quest"])
def test_bytes_that_are_read_to_choose(model, name):
    """One key per past block and head; two bounds per page and head, the current page's among them."""
    with seergate.attached(model, selector(model, name, 2 * BLOCK)) as handle:
        model.generate(input_ids=prompt(40), max_new_tokens=12)
        scored_bytes = handle.stats()["bytes_scored_per_step"]
    vectors = [(end - 1) // 8 if name == "gate" else 2 * -(-end // 8) for end in range(41, 52)]
    assert scored_bytes == pytest.approx(2 * 2 * 16 * 4 * sum(vectors) / 11)  # layers, heads, width, bytes
