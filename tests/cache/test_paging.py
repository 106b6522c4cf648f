"""Any method on a paged cache gives what it gives on a contiguous one."""

import itertools

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate.cache import pages as paged
from seergate.cache.pages import Paged
from seergate.cache.paging import Paging
from seergate.eval.generation.samples import Limit
from seergate.ops.paging import unpaged
from tests.decode.test_decode import BLOCK, SELECTING, pick
from tests.eval.test_engine import LONG, SAMPLED, requests_for
from tests.support import evaluation as support
from tests.support.decoding import forced_run
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.running import refused

ROWS = [prompt(length, seed) for seed, length in enumerate((40, 9, 23))]
FORCED = torch.cat([prompt(20, 100 + seed) for seed in range(3)])


OTHERS = itertools.product(("dense", "gate"), ("gemma2", "gpt_oss"))


@pytest.mark.parametrize(("name", "family"), [*((name, "qwen3") for name in ("dense", *SELECTING)), *OTHERS])
def test_selecting_methods(name, family):
    """To the last bit, in a ragged left-padded batch; softcap, sinks and sliding layers too."""
    model = tiny_model(family)
    method = pick(model, name, 2 * BLOCK)
    plain, _, before = forced_run(model, method, ROWS, FORCED)
    for page in (None, 2 * BLOCK):
        paged, cache, after = forced_run(model, method, ROWS, FORCED, storage=Paging(page))
        layer = cache.layers[-1]
        assert isinstance(layer.storage, Paged)
        assert torch.equal(plain, paged)
        assert before["density"] == after["density"] and before["bytes_read_per_step"] == after["bytes_read_per_step"]
    store = layer.storage.pages
    assert store.physical == store.logical == sum(-(-(len(p[0]) + 20) // (2 * BLOCK)) for p in ROWS)


def test_a_cache_goes_on_under_another_handle():
    """With its blocks as they are, unless a method shares them: only the own handle knows what was compared."""
    model, sequences = tiny_model("qwen3"), []
    method = pick(model, "quest", 2 * BLOCK)
    for first, second in ((None, None), (Paging(8), Paging(8)), (Paging(8), None)):
        cache, ids = DynamicCache(), prompt(30)
        for paging in (first, second):
            with seergate.attached(model, method, storage=paging):
                ids = model.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=cache)
        sequences.append(ids)
    assert torch.equal(sequences[0], sequences[1]) and torch.equal(sequences[0], sequences[2])
    reason = pick(model, "reason_cache", 2 * BLOCK)
    with seergate.attached(model, reason):
        cache = DynamicCache()
        ids = model.generate(prompt(30), max_new_tokens=8, do_sample=False, past_key_values=cache)
    with seergate.attached(model, reason):
        refused("another handle of 'reason_cache'", model.generate, ids, max_new_tokens=8, past_key_values=cache)


@pytest.mark.parametrize("name", ["gate", "quest"])
def test_a_crop_reads_few_pages(monkeypatch, name):
    """Assisted decoding crops at every rejected draft."""
    model, gathered = tiny_model("qwen3"), []
    with seergate.attached(model, pick(model, name, 2 * BLOCK), storage=Paging()), torch.inference_mode():
        cache = DynamicCache()
        model(input_ids=prompt(40 * BLOCK), past_key_values=cache)
        model(input_ids=prompt(5), past_key_values=cache)
        monkeypatch.setattr(paged, "unpaged", lambda pages, table: gathered.append(table) or unpaged(pages, table))
        cache.crop(-3)
    assert sum(table.numel() for table in gathered) <= 2 * len(cache.layers)


def test_stock_ways_of_generating(model):
    """Beams fork and drop rows at every step, drafts are cropped, samples repeat their prompt."""
    method = pick(model, "gate", 2 * BLOCK)
    for inputs, options in (
        ({"input_ids": prompt(30)}, {"num_beams": 3}),
        (left_padded(ROWS), {"num_beams": 2}),
        ({"input_ids": prompt(30)}, {"prompt_lookup_num_tokens": 3}),
    ):
        tokens = []
        for paging in (None, Paging()):
            with seergate.attached(model, method, storage=paging):
                tokens.append(model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0, **options))
        assert torch.equal(*tokens)


def generations(model, method, rows=3, **options):
    finished = []
    with seergate.attached(model, method, **options) as handle:
        engine = support.engine(handle, finished.append, batch_size=rows, limit=Limit(30), sampling=SAMPLED)
        engine.run(requests_for(LONG))
    return {generation.request.key: generation.token_ids for generation in finished}, engine.batch_size


def test_rows_that_come_and_go():
    """Continuous refill: arriving rows move into the running cache's blocks."""
    model, options = support.model(), {"token_budget": 32, "block_size": 8, "dense_layers": ()}
    plain, _ = generations(model, "quest", **options)
    assert generations(model, "quest", storage=Paging(8), **options) == (plain, 3)


def test_a_limit_is_kept(model):
    """Reaching it is running out of memory: `generate` ends with one sentence, the engine goes on with fewer rows."""
    with seergate.attached(model, "dense", storage=Paging(8, max_blocks=5)):
        refused("1 more blocks of 8 tokens are needed and 0 of the 5", model.generate, prompt(30), max_new_tokens=20)
    model = support.model()
    plain, _ = generations(model, "dense", rows=4)
    limited, rows = generations(model, "dense", rows=4, storage=Paging(8, max_blocks=40))
    assert limited == plain and rows < 4


def test_layers_that_are_not_in_step_are_told(model):
    with seergate.attached(model, "dense", storage=Paging()):
        cache = DynamicCache()
        model(input_ids=prompt(20), past_key_values=cache)
        cache.layers[0].crop(-5)
        cache.layers[0].crop(-5)
        refused("not in step any more", cache.layers[1].crop, -5)
        cache = DynamicCache()
        for _ in range(2):  # and a cache that was reset is as good as new
            model(input_ids=prompt(20), past_key_values=cache)
            assert cache.layers[0].storage.pages.logical == 2
            cache.reset()
            assert cache.get_seq_length() == 0
    assert model.generate(input_ids=prompt(4), max_new_tokens=2).shape == (1, 6)
