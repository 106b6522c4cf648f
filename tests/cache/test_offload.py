"""KV offload: the outputs of a cache that is not offloaded, in less fast memory, and with few bytes fetched."""

from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import SeergateError, methods
from seergate.cache.batching import join_rows, keep_rows
from seergate.cache.offload import BlockPool, Offload, Offloaded
from seergate.paths import shipped
from tests.decode.test_decode import BLOCK, gates, selector
from tests.support.decoding import Decoding
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.running import invalid, refused

HEADS, DIM, LAYERS = 2, 16, 2
BLOCK_BYTES = 2 * BLOCK * DIM * 4
"""Of one KV head, keys and values, in float32."""


def room_for(blocks: int) -> int:
    """Bytes for so many blocks in each layer."""
    return LAYERS * blocks * BLOCK_BYTES


def run(model, method, inputs, new=20, storage=None, **options):
    with seergate.attached(model, method, storage=storage) as handle:
        out = model.generate(**inputs, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **options)
        return out.sequences, torch.stack(out.logits), handle.stats(), out.past_key_values


def offloaded_is_in_memory(model, method, inputs, *storages, new=20, **options):
    """Tokens and logits to the last bit; the figures of the last run."""
    want, logits, _, _ = run(model, method, inputs, new, **options)
    for storage in storages:
        tokens, offloaded, stats, _ = run(model, method, inputs, new, storage, **options)
        assert torch.equal(tokens, want) and torch.equal(offloaded, logits)
    return stats


def selecting(model, budget=None, **options):
    return [selector(model, name, budget, **options) for name in ("gate", "quest", "oracle")]


@pytest.mark.parametrize(("family", "store"), [("qwen3", "disk"), ("qwen3", "host"), ("gpt_oss", "disk")])
def test_outputs_are_those_of_a_cache_in_memory(family, store):
    """To the last bit, alone and in a ragged batch, over block borders, with a pool that must give up blocks."""
    model = tiny_model(family)
    heads = model.config.num_key_value_heads
    for inputs in ({"input_ids": prompt(61)}, left_padded([prompt(50, 1), prompt(23, 2), prompt(7, 3)])):
        rows = len(inputs["input_ids"])
        for method in selecting(model, 3 * BLOCK)[: 3 if (family, store) == ("qwen3", "disk") else 1]:
            offload = Offload(room_for(rows * heads * 4), store)  # a step reads 3 blocks
            offloaded_is_in_memory(model, method, inputs, offload, offload)  # the second finds no trace of the first


@pytest.mark.parametrize("options", [{"threshold": 0.02}, {"top_p": 0.9}], ids=str)
def test_steps_that_read_more_than_the_pool_holds(model, options):
    inputs = left_padded([prompt(90, 1), prompt(23, 2)])
    for method in selecting(model, **options):
        rooms = [Offload(room_for(blocks)) for blocks in (2 * HEADS, 600)]
        offloaded_is_in_memory(model, method, inputs, *rooms, new=12)


@pytest.mark.parametrize("store", ["disk", "host"])
def test_a_context_four_times_the_memory_cap(model, store):
    """Keys and values four times the cap; what is held stays under it; few bytes are fetched."""
    length, budget, new = 40 * BLOCK, 4 * BLOCK, 60
    whole = LAYERS * HEADS * length // BLOCK * BLOCK_BYTES
    inputs = {"input_ids": prompt(length)}
    bank = gates(model)
    method = methods.Gate(bank=bank, token_budget=budget)
    want, logits, in_memory, _ = run(model, method, inputs, new)
    tokens, offloaded, stats, cache = run(model, method, inputs, new, Offload(whole // 4, store))
    assert torch.equal(tokens, want) and torch.equal(offloaded, logits)
    state = sum(layer.state.nbytes for layer in cache.layers)
    assert stats["resident_bytes_peak"] - state <= whole // 4 < in_memory["resident_bytes_peak"] / 4
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) >= whole
    assert 0 < stats["bytes_fetched_per_step"] < LAYERS * HEADS * budget // BLOCK * BLOCK_BYTES
    assert stats["blocks_per_head"] == in_memory["blocks_per_head"]


def test_bytes_fetched_are_those_of_blocks_that_the_steps_before_did_not_read(model):
    """Against a simulation in sets, with a pool of exactly one step's blocks: budget x (1 - reuse), to the byte."""
    method = methods.Gate(bank=gates(model), token_budget=3 * BLOCK)
    chosen = {0: [], 1: []}
    original = Offloaded.attend

    def spying(layer, step, selection, block_size):
        blocks = enumerate(selection.indices[0])
        chosen[layer.layer].append({(p, int(b)) for p, row in blocks for b in row if b >= 0})
        return original(layer, step, selection, block_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offloaded, "attend", spying)
        _, _, stats, _ = run(model, method, {"input_ids": prompt(80)}, 50, storage=Offload(room_for(HEADS * 3)))
    fetched = sum(len(step - here) for steps in chosen.values() for here, step in pairwise([set(), *steps]))
    assert stats["bytes_fetched_per_step"] * stats["steps"] == pytest.approx(fetched * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("inputs", "blocks", "options"),
    [
        ([(50, 0)], 3 * HEADS * 4, {"num_beams": 3, "new": 12}),
        ([(50, 0)], 3 * HEADS * 4, {"prefill_chunk_size": 16, "new": 12}),
        ([(20, 1), (7, 2)], 40, {"new": 90}),  # when the cache grows, the open block of a short row is kept up
    ],
)
def test_ways_of_generating(model, inputs, blocks, options):
    method, batch = selecting(model, 2 * BLOCK)[0], left_padded([prompt(*row) for row in inputs])
    offloaded_is_in_memory(model, method, batch, Offload(room_for(blocks)), **options)


def test_rows_that_join_and_leave(model):
    method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK)
    results = []
    for offload in (None, Offload(room_for(2 * HEADS * 4))):
        with seergate.attached(model, method, storage=offload):
            rows, arriving, logits = Decoding(model, prompt(30, 1)), Decoding(model, prompt(41, 2)), []
            join_rows(rows.cache, arriving.cache)
            rows.mask = (torch.arange(41) >= torch.tensor([[11], [0]])).long()
            for i in range(12):
                if i == 8:
                    keep_rows(rows.cache, [1])
                    rows.mask = rows.mask[1:]
                logits.append(rows.read(prompt(1, i).expand(len(rows.mask), 1))[-1:])
            results.append(torch.cat(logits, 1))
    assert torch.equal(*results)


def test_rows_that_find_no_room_change_nothing(model):
    """Not even in a first layer that is dense and reads past the pool."""
    method = methods.Gate(bank=gates(model), token_budget=2 * BLOCK, dense_layers=(0,))
    logits = []
    for joining in (False, True):
        with seergate.attached(model, method, storage=Offload(BLOCK_BYTES * HEADS * 2)), torch.no_grad():
            cache, arriving = DynamicCache(), DynamicCache()
            model(input_ids=prompt(30, 1), past_key_values=cache)
            model(input_ids=prompt(41, 2), past_key_values=arriving)
            if joining:
                refused("a step of 2 rows reads 8", join_rows, cache, arriving)
                refused("a step of 3 rows reads 12", cache.batch_repeat_interleave, 3)
            steps = [model(input_ids=prompt(1, i), past_key_values=cache).logits for i in range(6)]
            logits.append(torch.cat(steps, 1))
    assert torch.equal(*logits)


def test_a_model_is_loaded_with_its_cache_offloaded():
    ids = torch.randint(3, 30, (1, 150))
    options = {"token_budget": 64, "dtype": torch.float32}
    want = seergate.load(shipped("checkpoints/tiny-reasoner/gates"), **options).generate(ids, max_new_tokens=8)
    model = seergate.load(shipped("checkpoints/tiny-reasoner/gates"), storage=Offload(1 << 20), **options)
    assert torch.equal(model.generate(ids, max_new_tokens=8), want)
    assert seergate.handle_of(model).stats()["bytes_fetched_per_step"] > 0


def test_refusals(model):
    bank = gates(model)
    for options, message in (
        ({"memory_bytes": 0}, "memory_bytes is 0; it must be a positive number of bytes"),
        ({"memory_bytes": 1, "store": "tape"}, 'store is \'tape\'; it must be "disk" or "host"'),
        ({"memory_bytes": 1, "folder": "/nowhere"}, "folder is '/nowhere'; it must be a folder that exists"),
    ):
        invalid(message, Offload, **options)
    for given in ("disk", 10**9, True):
        invalid(f"storage is {given!r}; it must be a seergate.Offload, ", seergate.attach, model, bank, storage=given)
    given = model, methods.Gate(bank=bank, token_budget=4 * BLOCK), {"input_ids": prompt(20)}, 2
    refused("memory_bytes is 1, which is 0 blocks in each of 2 layers", run, *given, Offload(1))
    enough = room_for(HEADS * 4)
    needed = f"a step of 1 rows reads {HEADS * 4}, so it must be at least {enough}"
    refused(needed, run, *given, Offload(room_for(HEADS)))
    run(*given, Offload(enough))  # what the message says is enough


def test_the_pool_gives_up_what_has_not_been_read_for_longest():
    pool = BlockPool(3, torch.zeros(1, 2, 0, 2), torch.zeros(1, 2, 0, 3), 4, torch.device("cpu"))
    stored = [torch.arange(2 * 6 * 4 * dim).float().view(2, 6, 4 * dim) for dim in (2, 3)]

    def reads(*blocks):
        indices = torch.tensor(blocks)
        slots, fetched = pool.locate(indices, *stored)
        for pair, block in (indices >= 0).nonzero().tolist():
            slot, number = int(slots[pair, block]), int(indices[pair, block])
            assert torch.equal(pool.keys[slot].flatten(), stored[0][pair, number])
            assert torch.equal(pool.values[slot].flatten(), stored[1][pair, number])
        return fetched

    assert reads([0], [5]) == 2
    assert reads([1], [5]) == 1  # slots: pair 0 holds 0 and 1, pair 1 holds 5
    assert reads([2], [-1]) == 1  # gives up block 0, read longest ago
    assert reads([1], [5]) == 0
    assert reads([0], [-1]) == 1  # gives up block 2
    assert reads([2], [-1]) == 1  # gives up block 1 or 5, which were read together
    assert pool.locate(torch.tensor([[0, 1], [2, 3]]), *stored) is None


def test_a_file_is_gone_with_its_tensor(tmp_path):
    buffer = Offload(1, folder=tmp_path).buffer((2, 3, 5), torch.bfloat16)
    assert buffer.shape == (2, 3, 5) and buffer.dtype == torch.bfloat16 and not buffer.any()
    buffer[1, 2] = 7
    assert buffer.sum() == 35 and not list(tmp_path.iterdir())
    assert Offload(1).buffer((0, 4), torch.float32).shape == (0, 4)


def test_memory_is_shared_by_layers_that_have_gates(model):
    bank, least = gates(model), []
    part = methods.Gate(bank=bank.subset([1]), token_budget=3 * BLOCK)
    dense = methods.Gate(bank=bank, token_budget=3 * BLOCK, dense_layers=(0,))
    assert part.selects_in(1) and not part.selects_in(0)
    for method in (part, dense):
        with pytest.raises(SeergateError) as too_little:
            run(model, method, {"input_ids": prompt(60)}, 4, Offload(1))
        least.append(str(too_little.value))
        room = Offload(HEADS * 3 * BLOCK_BYTES)  # for a step of one layer
        assert offloaded_is_in_memory(model, method, {"input_ids": prompt(61)}, room)["bytes_fetched_per_step"] > 0
    assert least[0] == least[1]


def test_a_full_disk_is_told_before_anything_is_written(model, monkeypatch):
    """Pages of a mapped file that find no place later would end the process."""

    def full(file, begin, count):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    given = model, methods.Gate(bank=gates(model), token_budget=32), {"input_ids": prompt(60)}, 4
    refused("has no room for .* bytes of keys and values", run, *given, Offload(1 << 20))
