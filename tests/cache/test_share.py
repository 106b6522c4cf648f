"""Budgets that are a share of a row's length: under every method that selects, on every kind of cache."""

import math

import pyarrow.parquet as pq
import pytest
import torch

import seergate
from seergate import DecodeConfig, GateBank, methods
from tests.cache.test_offload import offloaded_is_in_memory, room_for, run
from tests.decode.test_decode import BLOCK, gates
from tests.decode.test_static import decoded_as_one_graph
from tests.support.models import left_padded, prompt
from tests.support.running import invalid, refused

SHARED = ("gate", "oracle", "quest", "random")


def sharing(name, bank, share=0.4, **options):
    given = {"bank": bank} if name == "gate" else {"block_size": BLOCK, "dense_layers": ()}
    return methods.make_method(name, budget_share=share, **given, **options)


def batch():
    return left_padded([prompt(61, 1), prompt(33, 2), prompt(5, 3), prompt(1, 4)])


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("bounds", [{}, {"budget_min": 4 * BLOCK}, {"budget_min": 3 * BLOCK, "budget_max": 5 * BLOCK}])
def test_each_row_reads_its_own_share(model, name, bounds, tmp_path):
    with seergate.attached(model, sharing(name, gates(model), **bounds)) as handle, handle.traced(tmp_path / "trace"):
        together = model.generate(**batch(), max_new_tokens=14)[:, -14:]
    least, most = (bounds.get(f"budget_{end}", default) // BLOCK for end, default in (("min", 16), ("max", 10**6)))
    lines = pq.read_table(tmp_path / "trace").to_pylist()
    for line in lines:
        used = math.ceil((line["position"] + 1) / BLOCK)
        block_count = min(used, most, max(least, math.ceil(used * 4 / 10)))
        assert (line["blocks"] is None and block_count == used) or len(line["blocks"]) == block_count
    assert any(line["blocks"] is not None for line in lines)
    if name != "random":
        with seergate.attached(model, sharing(name, gates(model), **bounds)):
            alone = [model.generate(prompt(*row), max_new_tokens=14)[0, -14:] for row in ((61, 1), (33, 2), (5, 3))]
        assert name == "gate" or torch.equal(together[:3], torch.stack(alone))


@pytest.mark.parametrize("name", SHARED)
def test_a_share_of_everything_is_dense_attention(model, name):
    _, logits, stats, _ = run(model, sharing(name, gates(model), 1.0), batch())
    plain = model.generate(**batch(), max_new_tokens=20, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(logits, torch.stack(plain.logits), rtol=2e-4, atol=2e-4)
    assert stats["density"] == 1


def test_steps_on_a_static_cache_eager_and_compiled(model):
    """As one graph without breaks."""
    assert decoded_as_one_graph(model, sharing("quest", None, budget_max=4 * BLOCK), batch())["density"] < 0.9


@pytest.mark.parametrize("name", ["gate", "quest", "oracle"])
def test_offloaded_is_in_memory(model, name):
    """The pool must have room for the maximum, and for the minimum without one; a step that reads more reads all."""
    inputs = left_padded([prompt(90, 1), prompt(23, 2)])
    method = sharing(name, gates(model), budget_max=4 * BLOCK)
    stats = offloaded_is_in_memory(model, method, inputs, seergate.Offload(room_for(2 * 2 * 4)), new=12)
    assert stats["bytes_fetched_per_step"] > 0
    less = seergate.Offload(room_for(2 * 2 * 4 - 1))
    refused("a step of 2 rows reads 16, so it must be at least", run, model, method, inputs, storage=less)
    offload = seergate.Offload(room_for(2 * 2 * 2))
    offloaded_is_in_memory(model, sharing(name, gates(model)), inputs, offload, new=12)


def test_short_rows_read_everything(model):
    with seergate.attached(model, gates(model), budget_share=0.1, dense_below=70) as handle:
        model.generate(prompt(60), max_new_tokens=9)
        assert handle.stats()["density"] == 1
        model.generate(prompt(90), max_new_tokens=9)
        assert handle.stats()["density"] < 1


def test_gates_with_a_share_as_their_default(model, tmp_path):
    """A rule of one's own takes the place of theirs, its bounds included; bounds alone go with it."""
    defaults = {"budget_share": 0.2, "budget_min": 3 * BLOCK, "anchors": [0]}
    gates(model).derived(decode_defaults=defaults).save_pretrained(tmp_path)
    bank = GateBank.from_pretrained(tmp_path)
    assert bank.decode_config() == DecodeConfig(budget_share=0.2, budget_min=3 * BLOCK, anchors=(0,))
    bounded = DecodeConfig(budget_share=0.2, budget_min=3 * BLOCK, budget_max=64, anchors=(0,))
    assert bank.decode_config(budget_max=64) == bounded
    assert bank.decode_config(token_budget=64) == DecodeConfig(token_budget=64, anchors=(0,))
    assert bank.decode_config(budget_share=0.1) == DecodeConfig(budget_share=0.1, anchors=(0,))
    with seergate.attached(model, bank) as handle:
        assert handle.method.block_budget.read(100) == 20 and handle.method.nominal == "20 %, at least 24"


def test_what_does_not_fit_is_refused():
    for options, message in (
        ({"budget_share": 0}, "budget_share is 0; it must be a number greater than 0 and at most 1"),
        ({"budget_share": 1.01}, "budget_share is 1.01; it must be"),
        ({"budget_share": 0.1, "token_budget": 64}, "token_budget and budget_share are both given; exactly one of"),
        ({"budget_min": 64}, "budget_min is 64 without budget_share, which it goes with"),
        ({"threshold": 0.1, "budget_max": 64}, "budget_max is 64 without budget_share"),
        ({"budget_share": 0.1, "budget_min": 64, "budget_max": 32}, "budget_max is 32; it must be at least"),
        ({"budget_share": 0.1, "budget_min": 6.5}, "budget_min is 6.5; it must be a whole number, 1 or greater"),
        ({"budget_share": 0.1, "compat": "published"}, "whose code has neither budget_share nor top_p"),
    ):
        invalid(message, DecodeConfig, **options)
    with pytest.raises(ValueError, match="budget_max is 8; with block_size 8 and 1 sink blocks"):
        methods.Oracle(budget_share=0.1, budget_max=8, block_size=8, sink_blocks=1)
    invalid("min_pages is 3 without a token budget", methods.Quest, budget_share=0.1, min_pages=3)
    invalid("resa reads a share of the blocks and at least token_budget tokens", methods.ReSA, budget_share=0.1)
