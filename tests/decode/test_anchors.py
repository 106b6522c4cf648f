"""Anchors: layers that choose blocks for the layers above them, under every method that selects."""

import copy

import pyarrow.parquet as pq
import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import GateBank, methods
from seergate.eval.method_text import read_method
from seergate.methods.selecting import PerHeadSelection, on_device
from seergate.ops import Selection
from tests.cache.test_offload import run
from tests.decode.test_decode import BLOCK, SELECTING, gates, selector
from tests.decode.test_static import compiled, decoded_as_one_graph
from tests.support.models import left_padded, prompt, tiny_model
from tests.support.running import ended_by, invalid

LAYERS = 4
PLAN = (0, 2)


@pytest.fixture(scope="module")
def deep():
    return tiny_model("qwen3", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def bank(deep):
    return gates(deep)


def with_anchors(name, bank, anchors, budget=2 * BLOCK, **options):
    """The same method, with the same gates, for any anchors."""
    if name == "gate":
        return methods.Gate(bank=bank, token_budget=budget, anchors=anchors, **options)
    if name == "resa":
        options["rectify_every"] = None
    given = {"block_size": BLOCK, "dense_layers": (), **options}
    return methods.make_method(name, token_budget=budget, anchors=anchors, **given)


def batch():
    return left_padded([prompt(40, 1), prompt(23, 2), prompt(5, 3)])


@pytest.mark.parametrize("name", SELECTING)
def test_an_anchor_in_every_layer_changes_nothing(deep, bank, name):
    runs = [run(deep, with_anchors(name, bank, anchors), batch()) for anchors in ((), tuple(range(LAYERS)))]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]
    shared = run(deep, with_anchors(name, bank, PLAN), batch())
    assert not torch.equal(shared[1], runs[0][1]), "a shared choice is another one"


@pytest.mark.parametrize("name", ["gate", "quest", "quest, heads apart"])
def test_layers_read_what_their_anchor_chose(deep, bank, name, tmp_path):
    """In each row and KV head; layers that are dense do not take part, and layers below all anchors choose."""
    options = {"group_reduction": "separate"} if "apart" in name else {}
    for anchors, dense, source in ((PLAN, (), [0, 0, 2, 2]), ((1,), (3,), [0, 1, 1, 3]), ((1,), (2,), [0, 1, 2, 1])):
        method = with_anchors(name.split(",")[0], bank, anchors, dense_layers=dense, **options)
        assert [method.anchor_of(layer) for layer in range(LAYERS)] == source
        with seergate.attached(deep, method) as handle, handle.traced(tmp_path / "trace", attention=True):
            deep.generate(**batch(), max_new_tokens=12)
        lines = pq.read_table(tmp_path / "trace").to_pylist()
        blocks = {(x["step"], x["row"], x["head"], x["layer"]): x["blocks"] for x in lines}
        for (*place, layer), indices in blocks.items():
            assert (indices is None) == (layer in dense)
            assert indices == blocks[(*place, source[layer])]
        sparse = [x for x in lines if x["layer"] not in dense]
        assert all((x["scores"] is None) == (source[x["layer"]] != x["layer"]) for x in sparse)
        own = [[blocks[key] for key in sorted(blocks) if key[3] == layer] for layer in range(LAYERS)]
        assert own[0] != own[1] or source[0] == source[1]


def test_what_is_read_and_held(deep, bank):
    """Layers with an anchor read and hold nothing but keys and values; their recall is measured."""
    figures = {}
    for anchors in ((), PLAN):
        with seergate.attached(deep, bank, token_budget=2 * BLOCK, anchors=anchors, measure_recall=True) as handle:
            cache = DynamicCache()
            deep.generate(input_ids=prompt(61), max_new_tokens=20, past_key_values=cache)
            figures[anchors] = handle.stats()
        states = [layer.state.nbytes for layer in cache.layers]
        assert all((nbytes == 0) == (i in (1, 3) and anchors == PLAN) for i, nbytes in enumerate(states))
        assert not handle.passes.selections, "let go of when the pass is over"
    every, shared = figures[()], figures[PLAN]
    assert shared["bytes_scored_per_step"] == every["bytes_scored_per_step"] / 2 > 0
    assert shared["state_bytes"] == every["state_bytes"] / 2 > 0
    saved = {name: every[name] - shared[name] for name in ("bytes_read_per_step", "resident_bytes_peak")}
    assert saved["bytes_read_per_step"] == pytest.approx(shared["bytes_scored_per_step"])
    assert saved["resident_bytes_peak"] == shared["state_bytes"]
    assert shared["tokens_per_head"] == every["tokens_per_head"]
    assert len(shared["recall_per_layer"]) == LAYERS and all(0 < recall <= 1 for recall in shared["recall_per_layer"])


@pytest.mark.parametrize("name", ["gate", "quest"])
def test_offloaded_is_in_memory(deep, bank, name):
    method, inputs = with_anchors(name, bank, PLAN, 3 * BLOCK), batch()
    want = run(deep, method, inputs)
    offload = seergate.Offload(LAYERS * 3 * 2 * 4 * (2 * BLOCK * 16 * 4))
    result = run(deep, method, inputs, storage=offload)
    assert torch.equal(result[0], want[0]) and torch.equal(result[1], want[1])
    assert result[2]["bytes_fetched_per_step"] > 0


@pytest.mark.slow
def test_steps_on_a_static_cache_eager_and_compiled(deep, bank):
    """As one graph without breaks."""
    decoded_as_one_graph(deep, bank, batch(), anchors=PLAN, threshold=0.05)


def test_gates_of_the_other_layers_are_not_needed(deep, bank, tmp_path):
    """An adapter that names its anchors decodes with them wherever it is loaded."""
    ids = prompt(60, 5)
    part = bank.subset(PLAN).derived(decode_defaults={"anchors": list(PLAN), "token_budget": 2 * BLOCK})
    part.save_pretrained(tmp_path)
    read = GateBank.from_pretrained(tmp_path)
    assert read.decode_config().anchors == PLAN and len(read) == len(PLAN)
    with seergate.attached(deep, bank, token_budget=2 * BLOCK, anchors=PLAN):
        want = deep.generate(ids, max_new_tokens=20)
    with seergate.attached(deep, read) as handle:
        assert handle.method.anchors == PLAN and handle.method.selects_in(3)
        assert torch.equal(deep.generate(ids, max_new_tokens=20), want)
    with seergate.attached(deep, read, anchors=()) as handle:
        assert not handle.method.selects_in(3), "without a gate or an anchor a layer is dense"


def test_what_does_not_fit_is_refused(deep, bank):
    assert read_method("quest:anchors=0+4") == ("quest", {"anchors": (0, 4)})
    sliding, uneven, part = tiny_model("gemma3_text"), copy.deepcopy(deep), bank.subset(PLAN)
    uneven.model.layers[3].self_attn.num_key_value_groups = 4
    planned = {"bank": bank.derived(decode_defaults={"anchors": [0]}), "token_budget": 24, "read_budget": 16}
    full = r"\]; the layers with full attention are \["
    for call, given, options, message in (
        (seergate.attach, (deep, part), {"anchors": (7,)}, rf"anchors names \[7{full}0, 1, 2, 3\]"),
        (seergate.attach, (deep, part), {"anchors": (1,)}, r"anchors names \[1\], for which there are no gates"),
        (seergate.attach, (sliding, selector(sliding, "quest", anchors=(0,))), {}, rf"anchors names \[0{full}1\]"),
        (seergate.attach, (uneven, with_anchors("quest", None, PLAN)), {}, "layer 3 has 1 KV .* nearest anchor, 2"),
        (methods.Oracle, (), {"anchors": (0,), "dense_layers": (0, 1)}, r"anchors names \[0\], which are in dense"),
        (methods.Oracle, (), {"anchors": "0"}, "anchors is '0'; it must be a tuple of layer indices, 0 or greater"),
        (seergate.DecodeConfig, (), {"anchors": (-1,)}, r"anchors is \(-1,\); it must be a tuple of layer indices"),
        (methods.make_method, ("h2o",), {"anchors": (0,)}, "has no option 'anchors'"),
        (methods.make_method, ("h2o+gate",), planned, "with anchors, as every layer evicts for itself"),
    ):
        invalid(message, call, *given, **options)


def test_a_choice_goes_to_the_device_of_the_layer_that_reads_it():
    heads = Selection(torch.ones(1, 4, 2), torch.ones(1, 4))
    for selection in (heads, PerHeadSelection(torch.ones(1, 2, 2), torch.ones(1, 2), heads)):
        moved = on_device(selection, torch.device("meta"))
        assert type(moved) is type(selection) and moved.indices.is_meta and moved.counts.is_meta
    assert moved.heads.indices.is_meta
    assert on_device(heads, torch.device("cpu")) is heads and on_device(None, torch.device("cpu")) is None


def test_a_pass_that_ends_between_an_anchor_and_its_reader_leaves_nothing_behind(deep, bank):
    """The next pass reads what its own anchor chooses, and a new cache begins as if nothing had been."""
    ids = prompt(60, 6)
    with seergate.attached(deep, bank, token_budget=2 * BLOCK, anchors=PLAN) as handle, torch.no_grad():
        want = deep.generate(ids, max_new_tokens=12)
        cache = DynamicCache()
        deep(ids, past_key_values=cache)
        with ended_by(KeyboardInterrupt, deep.model.layers[2].mlp):  # layer 2 has chosen, layer 3 has not read
            deep(prompt(1, 7), past_key_values=cache)
        assert handle.passes.selections, "the choice waits for its reader"
        assert torch.equal(deep.generate(ids, max_new_tokens=12), want)


def test_beams_share_choices_too(deep, bank):
    """Each beam of a prompt reads as a row of its own: a prompt alone finds the same text as in a batch."""
    rows = [prompt(40, 1), prompt(52, 2)]
    with seergate.attached(deep, bank, token_budget=2 * BLOCK, anchors=PLAN):
        beams = [deep.generate(row, max_new_tokens=8, num_beams=3)[0, -8:] for row in rows]
        together = deep.generate(**left_padded(rows), max_new_tokens=8, num_beams=3)[:, -8:]
    assert torch.equal(together, torch.stack(beams))


@pytest.mark.soak
def test_what_inductor_compiles(deep, bank):
    torch._dynamo.reset()
    with seergate.attached(deep, bank, token_budget=2 * BLOCK, anchors=PLAN):
        want = deep.generate(**batch(), max_new_tokens=8)
        assert torch.equal(deep.generate(**batch(), max_new_tokens=8, **compiled("inductor")), want)
