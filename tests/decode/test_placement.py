"""Gates of published code place a block by whether its last token was decoded, in steps of any number of tokens."""

import copy
import itertools
from functools import partial

import pytest
import torch
from transformers import DynamicCache

import seergate
from tests.decode.test_decode import BLOCK, gates
from tests.support.decoding import Decoding
from tests.support.evictors import EVICTORS
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.running import refused

PUBLISHED = {"token_budget": 3 * BLOCK, "compat": "published"}


def kept(cache):
    return [layer.state.rows["kg"][0, :, : 64 // BLOCK] for layer in cache.layers]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3").double()


@torch.no_grad()
@pytest.mark.parametrize("storage", [None, seergate.Paging(), seergate.Offload(1 << 22)], ids=str)
def test_forced_and_scored_tokens_are_placed_like_single_ones(model, storage):
    """In padded rows, and after a crop that opens a block of the prompt again."""
    ids, bank = torch.cat((prompt(70, 1), prompt(70, 2))), gates(model).double()
    mask = (torch.arange(70) >= torch.tensor([[0], [5]])).long()
    with seergate.attached(model, bank, storage=storage, **PUBLISHED) as handle:
        single, forced = (Decoding(model, ids[:, :40], mask[:, :40]) for _ in range(2))
        for rows in (single, forced):
            rows.crop(5)
        want = torch.cat([single.read(ids[:, i, None]) for i in range(35, 70)], 1)
        with handle.passes.forced("decode"):
            torch.testing.assert_close(forced.read(ids[:, 35:]), want)
        torch.testing.assert_close(kept(forced.cache), kept(single.cache))
        if storage is None:
            scored = seergate.score(model, ids, mask, start=36, logits=True).logits
            fresh = Decoding(model, ids[:, :36], mask[:, :36])
            each = torch.cat([fresh.read(ids[:, i, None]) for i in range(36, 69)], 1)
            torch.testing.assert_close(scored[:, 1:], each)


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 1}, {"prefill_chunk_size": 13}, {"prompt_lookup_num_tokens": 4}], ids=str
)
def test_ways_of_generating_leave_the_same_entries(model, options):
    """40 tokens are 5 blocks; the last chunk of 13 has one token, which closes one of them."""
    ids, bank = prompt(10, 5).repeat(1, 4), gates(model).double()
    with seergate.attached(model, bank, **PUBLISHED):
        cache = DynamicCache()
        text = model.generate(ids, max_new_tokens=26, past_key_values=cache, **options)
        steps = Decoding(model, text[:, :40])
        for i in range(40, 64):
            steps.read(text[:, i, None])
    torch.testing.assert_close(kept(cache), kept(steps.cache))


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 40, 41])
def test_a_further_turn_in_chunks_is_read_alike_with_and_without_the_tokens_before(model, new):
    """With a mask that hides nothing, which transformers leaves out."""
    ids, bank, outcomes = prompt(40 + new), gates(model).double(), []
    for given in (ids, ids[:, 40:]):
        with seergate.attached(model, bank, token_budget=2 * BLOCK) as handle:
            cache = DynamicCache()
            model(ids[:, :40], past_key_values=cache)
            handle.reset_stats()
            options = {"prefill_chunk_size": 8, "max_new_tokens": 1, "past_key_values": cache}
            options |= {"return_dict_in_generate": True, "output_logits": True}
            out = model.generate(given, attention_mask=torch.ones_like(ids), **options)
            outcomes.append((handle.stats()["steps"], out.logits[0]))
    assert [steps for steps, _ in outcomes] == 2 * [int(new == 1)]
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1])


@torch.no_grad()
@pytest.mark.parametrize(("name", "chunk"), list(zip(EVICTORS, itertools.cycle((1, 7, 39)), strict=False)))
@pytest.mark.filterwarnings("ignore::seergate.methods.LongPromptWarning")
def test_evictors_keep_the_same_of_a_prompt_in_chunks(name, chunk):
    """Of two rows, the shorter padded by more than a chunk. StreamingLLM keeps keys that attention cannot read."""
    model, results = tiny_model("qwen3").double(), []
    batch = left_padded([prompt(40, 1), prompt(9, 2)])
    with seergate.attached(model, method := EVICTORS[name].method(model)):
        for options in ({}, {"prefill_chunk_size": chunk}):
            cache = DynamicCache()
            generate = partial(model.generate, **batch, max_new_tokens=30, past_key_values=cache, **options)
            if options and not method.chunked_prefill:
                refused("without prefill_chunk_size", generate)
                return
            results.append((generate(), [layer.keys[:, :, : min(layer.rows.resident)] for layer in cache.layers]))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["snapkv", "kv4bit"])
@pytest.mark.filterwarnings("ignore::seergate.methods.LongPromptWarning")
def test_a_prompt_that_was_stopped_before_its_last_token_is_taken_up(name):
    """Which a prompt of one token would decode; then no further prompt is taken, which would be read wrongly."""
    model, ids, cache = tiny_model("qwen3"), prompt(41, 1), DynamicCache()
    with seergate.attached(model, EVICTORS[name].method(model)) as handle:
        whole = model.generate(ids, max_new_tokens=30)
        with handle.passes.prefilling(in_chunks=True, prompt_end=41):
            model(ids[:, :40], past_key_values=cache)
        text = model.generate(ids, max_new_tokens=30, past_key_values=cache)
        assert torch.equal(text, whole)
        refused("takes one prompt", model.generate, torch.cat((text, prompt(12, 5)), 1), past_key_values=cache)


@torch.no_grad()
def test_a_deep_crop_recovers_keys_at_their_positions_or_is_refused():
    """Positions with gaps, a mask with a hole, and angles that change."""
    ids, hole = prompt(60), torch.ones(1, 40, dtype=torch.long)
    hole[0, 5:8] = 0
    spread, shifted, late = torch.arange(60) * 2, torch.arange(60) + 100, torch.arange(60)
    late[50:] += 3
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    dynamic = tiny_model("qwen3", rope_parameters=rope, max_position_embeddings=32)
    for model, positions, mask, reason in (
        (tiny_model("qwen3"), shifted, None, None),
        (tiny_model("qwen3"), spread, None, "position_ids have gaps"),
        (tiny_model("qwen3"), late, None, "position_ids have gaps"),
        (tiny_model("qwen3"), torch.arange(60), hole, "position_ids have gaps"),
        (dynamic, torch.arange(60), None, "dynamic RoPE"),
    ):
        with seergate.attached(model, gates(model), token_budget=2 * BLOCK):
            caches = DynamicCache(), DynamicCache()
            for cache, length in zip(caches, (60, 21), strict=True):
                first = min(40, length)
                given = {} if mask is None else {"attention_mask": mask[:, :first]}
                model(ids[:, :first], position_ids=positions[None, :first], past_key_values=cache, **given)
                for i in range(first, length):
                    model(ids[:, i : i + 1], position_ids=positions[None, i : i + 1], past_key_values=cache)
            copied = copy.deepcopy(caches[0])
            copied.crop(-8)  # within a block, whatever the positions
            if reason:
                refused(reason, caches[0].crop, -39)
                continue
            caches[0].crop(-39)
            slots = torch.arange(16, 21) % (2 * BLOCK)
            one, other = (cache.layers[0].state.rows["recent"][0][:, slots] for cache in caches)
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
