"""A cache that fails to grow, is copied, cropped deeply, emptied, hidden by masks, or used by another method."""

import copy
import json
import pickle
import subprocess
import sys
from itertools import count

import pytest
import torch
from transformers import DynamicCache, StaticCache

import seergate
from seergate import methods
from seergate.cache.layer import GatedLayer
from seergate.models import families
from tests.cache.test_offload import room_for
from tests.decode.test_decode import BLOCK, gates
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.running import refused
from tests.test_house import ROOT, code_blocks


@pytest.mark.parametrize("storage", [None, seergate.Offload(room_for(64))], ids=["growing", "offloaded"])
def test_a_cache_that_finds_no_memory_to_grow_is_left_as_it_was(model, monkeypatch, storage):
    """Keys find room and values do not; later there is memory again."""
    logits = []
    method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
    for failing in (False, True):
        with seergate.attached(model, method, storage=storage), torch.no_grad():
            cache = DynamicCache()
            model(input_ids=prompt(24), past_key_values=cache)
            if failing:
                with monkeypatch.context() as patch, pytest.raises(MemoryError):
                    out_of_memory_at_the_second_buffer(patch)
                    model(input_ids=prompt(300, 1), past_key_values=cache)
                first = cache.layers[0]
                assert first.keys.shape[2] == first.values.shape[2] < 300 and cache.get_seq_length() == 24
            model(input_ids=prompt(300, 1), past_key_values=cache)
            steps = [model(input_ids=prompt(1, step), past_key_values=cache).logits for step in range(12)]
        logits.append(torch.cat(steps, 1))
    assert torch.equal(*logits)


def out_of_memory_at_the_second_buffer(patch):
    calls = count(1)

    def counted(allocate):
        def wrapper(*args, **kwargs):
            if next(calls) == 2:
                raise MemoryError
            return allocate(*args, **kwargs)

        return wrapper

    patch.setattr(torch.Tensor, "new_zeros", counted(torch.Tensor.new_zeros))
    patch.setattr(seergate.Offload, "buffer", counted(seergate.Offload.buffer))


@pytest.mark.parametrize("storage", [seergate.Offload(room_for(64)), seergate.Paging()], ids=str)
def test_caches_that_cannot_be_copied_say_so_at_once(model, storage):
    with seergate.attached(model, gates(model), token_budget=2 * BLOCK, storage=storage), torch.no_grad():
        cache = DynamicCache()
        model(input_ids=prompt(40), past_key_values=cache)
        refused("cache cannot be copied", copy.deepcopy, cache)


@pytest.mark.parametrize("room", [-1, 96])
def test_how_many_slots_there_are(model, room):
    """As transformers counts them: -1 for a cache that grows."""
    cache = DynamicCache() if room < 0 else StaticCache(model.config, max_cache_len=room)
    with seergate.attached(model, gates(model), token_budget=2 * BLOCK), torch.no_grad():
        model(input_ids=prompt(40), past_key_values=cache)
    assert [layer.get_max_length() for layer in cache.layers] == [room] * len(cache.layers)


def test_the_storage_of_the_documents():
    """It works as it is printed, and is really used."""
    names: dict = {}
    exec(next(block for block in code_blocks(ROOT / "docs/decode-engine.md", "python") if "Rounding" in block), names)
    model, kept = tiny_model("qwen3"), []
    assert names["rounded"](model, gates(model), prompt(40)).shape == (1, 48)
    for storage in (None, names["Rounding"]()):
        with seergate.attached(model, gates(model), token_budget=2 * BLOCK, storage=storage), torch.no_grad():
            cache = DynamicCache()
            model(input_ids=prompt(40), past_key_values=cache)
            kept.append(cache.layers[0].keys[:, :, :40])
    assert torch.equal(kept[1], kept[0].bfloat16().float()) and not torch.equal(*kept)


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "gemma4_text"])
def test_deep_crops_that_cannot_be_undone_are_refused(family):
    model = tiny_model(family)
    bank = gates(model, gate_dim=families.head_dim_of(model))
    with seergate.attached(model, bank, token_budget=2 * BLOCK):
        cache = DynamicCache()
        model(input_ids=prompt(60), past_key_values=cache)
        refused("cannot be re-positioned", cache.crop, -31)


def test_a_deep_crop_in_a_layer_without_rope():
    model = tiny_model("cohere2")
    method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
    layer = method.bank.geometry.layers[0]
    with seergate.attached(model, method):
        cropped, straight = DynamicCache(), DynamicCache()
        model(input_ids=prompt(60, 1), past_key_values=cropped)
        cropped.layers[layer].crop(-35)
        model(input_ids=prompt(60, 1)[:, :25], past_key_values=straight)
        one, other = (cache.layers[layer].state.rows["recent"][:, :, 24 % 16] for cache in (cropped, straight))
    torch.testing.assert_close(one, other)


def test_a_deep_crop_of_padded_rows_whose_positions_were_not_given(model):
    """Without position_ids transformers counts padding: the rows are rotated by more than their own lengths."""
    batch = left_padded([prompt(60, 1), prompt(52, 2)])
    with seergate.attached(model, gates(model), token_budget=2 * BLOCK):
        raw = []
        for length, removed in ((60, 29), (31, 0)):
            cache = DynamicCache()
            model(**{name: tensor[:, :length] for name, tensor in batch.items()}, past_key_values=cache)
            cache.crop(-removed)
            raw.append(cache.layers[0].state.rows["recent"])
    for row, end in ((0, 31), (1, 23)):
        slots = torch.arange(end - end % BLOCK, end) % (2 * BLOCK)
        torch.testing.assert_close(raw[0][row, :, slots], raw[1][row, :, slots], rtol=1e-4, atol=1e-5)


def test_an_emptied_cache_may_serve_another_method_and_batch(model):
    cache = DynamicCache()
    with seergate.attached(model, "quest", token_budget=32, block_size=16, dense_layers=()):
        model(input_ids=prompt(40), past_key_values=cache)
    for empty in (cache.reset, lambda: cache.crop(-41)):
        with seergate.attached(model, "oracle", token_budget=16, block_size=8):
            empty()
            fresh, results = DynamicCache(), []
            for used in (cache, fresh):
                model(input_ids=prompt(40).expand(2, -1), past_key_values=used)
                results.append(model(input_ids=prompt(1).expand(2, -1), past_key_values=used).logits)
        assert torch.equal(*results)


def test_padding_does_not_make_decoding_copy_the_cache(model, monkeypatch):
    copies, original = [], GatedLayer.slot_view
    monkeypatch.setattr(GatedLayer, "slot_view", lambda self: copies.append(1) or original(self))
    with seergate.attached(model, gates(model), token_budget=16):
        model.generate(**left_padded([prompt(30, 1), prompt(17, 2)]), max_new_tokens=12)
    assert not copies


COPIED = ("gates", "gates with anchors", "gates on h2o", "quest", "h2o", "dense")


@pytest.mark.parametrize(("name", "static"), [("gates", True), *((name, False) for name in COPIED)])
def test_a_copied_cache_goes_on_and_shares_the_gates(model, name, static):
    """Also those that lie deep in its state: the gate on an evictor's residents."""
    ids, first = prompt(60), prompt(1, 2)
    longer = torch.cat((ids, first, prompt(1, 3)), 1)
    gate = methods.Gate(bank=gates(model), token_budget=2 * BLOCK, anchors=(0,) if "anchors" in name else ())
    if name == "gates on h2o":
        method = methods.GateOnEvictor(evictor=methods.H2O(token_budget=32), gate=gate)
    elif "gates" in name:
        method = gate
    else:
        method = methods.make_method(name, **({} if name == "dense" else {"token_budget": 32}))
    with seergate.attached(model, method):

        def begun():
            cache = StaticCache(model.config, max_cache_len=90) if static else DynamicCache()
            model(ids, past_key_values=cache)
            model(first, past_key_values=cache)  # one fixed step of a static cache
            return cache

        want = model.generate(longer, past_key_values=begun(), max_new_tokens=20)
        kept = begun()
        for _ in range(2):
            copied = copy.deepcopy(kept)
            assert copied.layers[1].method is method
            state, own = copied.layers[0].state, kept.layers[0].state
            if name == "gates on h2o":
                assert state.gating.gate is own.gating.gate and state.evicting.method is method.evictor
            elif "gates" in name:
                assert state.gate is own.gate
            assert torch.equal(model.generate(longer, past_key_values=copied, max_new_tokens=20), want)
        assert kept.get_seq_length() == 61


@pytest.mark.parametrize(
    ("method", "hidden", "message"),
    [("quest", 40, "hides tokens of row 1 .* shows later ones"), ("h2o", 59, "under 'h2o' cannot take back")],
)
def test_other_masks_over_what_is_there_are_refused(model, method, hidden, message):
    ids, mask = prompt(60).expand(2, -1), torch.ones(2, 70)
    mask[1, hidden] = 0
    with seergate.attached(model, method, token_budget=32):
        cache = DynamicCache()
        model(ids, past_key_values=cache)
        refused(message, model, prompt(10).expand(2, -1), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_has_its_own_method(model, duplicate):
    """Though transformers keeps a static cache on the model, and the original is detached later."""
    with seergate.attached(model, gates(model), token_budget=16) as handle:
        model.generate(prompt(40), max_new_tokens=2, cache_implementation="static")
        expected, twin = model.generate(prompt(40), max_new_tokens=8), duplicate(model)
        assert seergate.handle_of(twin).method is not handle.method
        assert torch.equal(twin.generate(prompt(40), max_new_tokens=8), expected)
    assert torch.equal(twin.generate(prompt(40), max_new_tokens=8), expected)


@pytest.mark.slow
def test_a_pickled_model_decodes_in_a_new_process(model, tmp_path):
    with seergate.attached(model, gates(model), token_budget=16):
        expected = model.generate(prompt(40), max_new_tokens=8).tolist()
        (tmp_path / "model").write_bytes(pickle.dumps(model))
    code = "import pickle, sys, torch; model = pickle.load(open(sys.argv[1], 'rb'))\n"
    code += "print(model.generate(torch.tensor(eval(sys.argv[2])), max_new_tokens=8).tolist())"
    arguments = [sys.executable, "-c", code, str(tmp_path / "model"), repr(prompt(40).tolist())]
    assert json.loads(subprocess.check_output(arguments, text=True).splitlines()[-1]) == expected


def test_a_later_mask_may_hide_the_padding_after_a_rows_end(model):
    """Batched chat on one cache: a row that ends early is padded, and the next turn hides the padding."""
    batch = left_padded([prompt(30, 1), prompt(20, 2)])
    end = int(model.generate(**batch, max_new_tokens=12)[0, 34])

    def logits():
        cache = DynamicCache()
        text = model.generate(**batch, max_new_tokens=12, eos_token_id=end, past_key_values=cache)
        ended = text[:, 30:] == end
        real = ((ended.cumsum(1) - ended.long()) == 0).long()
        assert not real.all()
        turn = prompt(6, 9).expand(2, -1)
        out = model.generate(
            input_ids=torch.cat((text, turn), 1),
            attention_mask=torch.cat((batch["attention_mask"], real, torch.ones_like(turn)), 1),
            max_new_tokens=10,
            past_key_values=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return torch.stack(out.logits)

    want = logits()
    with seergate.attached(model, gates(model), token_budget=4096):
        torch.testing.assert_close(logits(), want, rtol=1e-3, atol=1e-4)
