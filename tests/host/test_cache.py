"""What a cache layer must keep right when something goes wrong, and when it is copied."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import seergate
from seergate import SeergateError, methods
from tests.host.test_decode import BLOCK, gates
from tests.host.test_offload import room_for
from tests.models import prompt, tiny_model
from tests.test_house import ROOT, code_blocks


@pytest.mark.parametrize("attaching", [{}, {"storage": seergate.Offload(room_for(64))}], ids=["growing", "offloaded"])
def test_a_cache_that_finds_no_memory_to_grow_is_left_as_it_was(monkeypatch, attaching):
    """Keys find room and values do not; later there is memory again."""
    model, found = tiny_model("qwen3"), []
    method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
    for failing in (False, True):
        with seergate.attached(model, method, **attaching), torch.no_grad():
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
        found.append(torch.cat(steps, 1))
    assert torch.equal(*found)


def out_of_memory_at_the_second_buffer(patch):
    made = []

    def counted(allocate):
        def wrapper(*args, **kwargs):
            made.append(1)
            if len(made) == 2:
                raise MemoryError
            return allocate(*args, **kwargs)

        return wrapper

    patch.setattr(torch.Tensor, "new_zeros", counted(torch.Tensor.new_zeros))
    patch.setattr(seergate.Offload, "buffer", counted(seergate.Offload.buffer))


def test_a_copied_cache_shares_gates_that_lie_deep_in_its_state():
    """The gate on an evictor's residents, and the evictor."""
    model, ids = tiny_model("qwen3"), prompt(20, 2)
    gate = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
    method = methods.GateOnEvictor(evictor=methods.H2O(token_budget=32), gate=gate)
    with seergate.attached(model, method), torch.no_grad():
        cache = DynamicCache()
        model(input_ids=prompt(60), past_key_values=cache)
        copied = copy.deepcopy(cache)
        for one, other in zip(copied.layers, cache.layers, strict=True):
            assert one.state.gating.gate is other.state.gating.gate
            assert one.state.method is method and one.state.evicting.method is method.evictor
        found = [
            [model(input_ids=ids[:, i, None], past_key_values=c).logits for i in range(20)] for c in (cache, copied)
        ]
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))


def test_a_copied_static_cache_goes_on():
    model, ids = tiny_model("qwen3"), prompt(12, 2)
    method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
    with seergate.attached(model, method), torch.no_grad():
        cache = StaticCache(model.config, max_cache_len=80)
        model(input_ids=prompt(40), past_key_values=cache)
        model(input_ids=prompt(1), past_key_values=cache)
        copied, found = copy.deepcopy(cache), []
        assert copied.layers[0].method is method and copied.layers[0].state.gate is cache.layers[0].state.gate
        for each in (cache, copied):
            steps = [model(input_ids=ids[:, i, None], past_key_values=each).logits for i in range(12)]
            found.append(torch.cat(steps, 1))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "attaching", [{"storage": seergate.Offload(room_for(64))}, {"storage": seergate.Paging()}], ids=str
)
def test_caches_that_cannot_be_copied_say_so_at_once(attaching):
    model = tiny_model("qwen3")
    with seergate.attached(model, gates(model), token_budget=2 * BLOCK, **attaching), torch.no_grad():
        cache = DynamicCache()
        model(input_ids=prompt(40), past_key_values=cache)
        with pytest.raises(SeergateError, match="cache cannot be copied"):
            copy.deepcopy(cache)


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
