"""Which layers choose for others: the recall that is measured, the plan, and the adapter that is written."""

import itertools
import json
import math

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import GateBank, methods
from seergate.eval.calibration.anchors import SharedRecall, shared_recall
from tests.decode.test_decode import BLOCK, gates
from tests.support.models import prompt, tiny_model
from tests.support.running import invalid, output_of, refusal, refused, run_seergate


@pytest.fixture(scope="module")
def deep():
    return tiny_model("qwen3", num_hidden_layers=4)


def plans(table, count):
    """All plans of so many anchors, with their mean recall."""
    size = len(table)
    for rest in itertools.combinations(range(1, size), count - 1):
        anchors = (0, *rest)
        yield sum(float(table[max(a for a in anchors if a <= i), i]) for i in range(size)) / size, anchors


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_the_plan_is_the_best_of_all(size):
    for seed in range(5):
        table = torch.rand(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).triu()
        table[torch.rand(size, size, generator=torch.Generator().manual_seed(seed)) < 0.2] = -math.inf
        table.fill_diagonal_(1.0)
        recalls = SharedRecall(tuple(range(3, 3 + size)), table, 1)
        for count in range(1, size + 1):
            best = max(plans(table, count))[0]
            if best == -math.inf:
                refused(f"count is {count}; so few anchors cannot select for all", recalls.anchors, count)
                continue
            plan = recalls.anchors(count)
            assert len(plan) == count and recalls.mean(plan) == pytest.approx(best)
        assert recalls.anchors(size) == recalls.layers and recalls.mean(recalls.layers) == 1
    invalid(f"count is {size + 1}; it must be a whole number in 1..{size}", recalls.anchors, size + 1)


@pytest.mark.parametrize("name", ["gate", "quest", "oracle"])
def test_a_layers_own_recall_is_that_of_a_decode_step(deep, name):
    """Of the first token behind a prompt, where the layers below are dense."""
    deep, bank = deep.double(), gates(deep).double()
    options = {"bank": bank} if name == "gate" else {"block_size": BLOCK}
    method = methods.make_method(name, token_budget=3 * BLOCK, dense_layers=(), **options)
    ids, length = prompt(90, 2), 3 * BLOCK + 1
    with torch.inference_mode():
        recalls = shared_recall(deep, method, [ids[0]], rows=1)
    assert recalls.layers == (0, 1, 2, 3) and recalls.rows == 1
    for layer in range(4):
        dense = tuple(other for other in range(4) if other != layer)
        alone = methods.make_method(name, token_budget=3 * BLOCK, dense_layers=dense, **options)
        with seergate.attached(deep, alone, measure_recall=True) as handle, torch.no_grad():
            cache = DynamicCache()
            deep(ids[:, : length - 1], past_key_values=cache)
            deep(ids[:, length - 1 : length], past_key_values=cache)
            recall = handle.stats()["recall_per_layer"][layer]
        assert recall == pytest.approx(float(recalls.recall[layer, layer]), abs=1e-9)


def test_recall_of_others_choices_against_loops(deep):
    """From the attention probabilities that the model itself gives: the oracle picks blocks by their largest one."""
    deep, size, ids = deep.double(), BLOCK, prompt(61, 3)
    recalls = shared_recall(deep, methods.Oracle(token_budget=3 * size, block_size=size), [ids[0]], rows=5)
    deep.set_attn_implementation("eager")
    attention = deep(ids, output_attentions=True).attentions
    deep.set_attn_implementation("sdpa")
    heads, group = 2, attention[0].shape[1] // 2
    want = torch.zeros(4, 4, dtype=torch.float64)
    for length in torch.linspace(3 * size + 1, 61, 5).long().tolist():
        current, chosen = (length - 1) // size, {}
        for layer, head in itertools.product(range(4), range(heads)):
            blocks = attention[layer][0, head * group : (head + 1) * group, length - 1, :length].split(size, -1)
            best = sorted(range(current), key=lambda n, blocks=blocks: -float(blocks[n].max()))[:2]
            chosen[layer, head] = [*best, current]
            for anchor in range(layer + 1):
                read = sum(float(blocks[n].sum()) for n in chosen[anchor, head])
                want[anchor, layer] += read / (group * heads * 5)
    below = torch.ones(4, 4).tril(-1).bool()
    torch.testing.assert_close(recalls.recall.masked_fill(below, 0), want)
    assert bool((recalls.recall[below] == -math.inf).all())


def test_rows_lie_evenly_where_blocks_are_left_out(deep):
    method = methods.Oracle(token_budget=2 * BLOCK, block_size=BLOCK)
    texts = [prompt(60, 1)[0], prompt(2 * BLOCK, 2)[0], prompt(2 * BLOCK + 2, 3)[0]]
    recalls = shared_recall(deep.float(), method, texts, rows=7)
    assert recalls.rows == 7 + 2, "a text that is read in whole does not count, and no token counts twice"
    too_short = r"the longest text has 16 tokens, and oracle \(16\) reads all of rows"
    refused(too_short, shared_recall, deep, method, texts[1:2])


def test_layers_without_a_gate_choose_for_nobody(deep):
    bank = gates(deep).subset([1, 3])
    recalls = shared_recall(deep.float(), methods.Gate(bank=bank, token_budget=2 * BLOCK), [prompt(60)[0]])
    assert recalls.layers == (1, 2, 3) and recalls.anchors(2) == (1, 3)
    refused("some of which have no gate", recalls.anchors, 3)
    dense = methods.Gate(bank=gates(deep), token_budget=2 * BLOCK, dense_layers=(0, 2))
    assert shared_recall(deep, dense, [prompt(60)[0]]).layers == (1, 3)


def test_the_command_writes_an_adapter_that_decodes_with_its_anchors(tmp_path):
    """And is described as such, loaded as such, and refused by another model."""
    out = tmp_path / "anchors"
    command = ["anchors", "--model", "tiny-reasoner", "--count", "2", "--budget", "64", "--texts", "1", "--rows", "8"]
    output = output_of(*command, "--max-length", "300", "--out", str(out))
    assert "   4 anchors  recall" in output and "   2 anchors  recall" in output and f"written: {out}" in output
    bank = GateBank.from_pretrained(out)
    anchors = bank.decode_config().anchors
    assert len(anchors) == len(bank) == 2 and anchors[0] == 0
    record = bank.training_record
    assert 0 < record["anchor_recall"] <= record["own_recall"] <= 1 and "chain_sum" in record["recall_measured_on"]
    assert rf"anchors=\[{anchors[0]}, {anchors[1]}\]" in (out / "README.md").read_text()
    info = output_of("info", str(out))
    assert f"decoding defaults    {{'anchors': {list(anchors)}}}" in info and "anchor recall" in info
    model = seergate.load(out, token_budget=64)
    handle = seergate.handle_of(model)
    ids = prompt(120)
    cache = DynamicCache()
    model.generate(ids, max_new_tokens=4, past_key_values=cache)
    state_bytes = [layer.state.nbytes for layer in cache.layers]
    assert [nbytes > 0 for nbytes in state_bytes] == [layer in anchors for layer in range(4)]
    assert handle.method.anchors == anchors and handle.stats()["density"] < 1
    assert "is not empty" in refusal(run_seergate(*command, "--out", str(out)))
    again = [*command, "--max-length", "300", "--gates", str(out), "--out", f"{out}-1", "--count"]
    assert "count is 3; it must be a whole number in 1..2" in refusal(run_seergate(*again, "3", "--data", "none"))
    assert "   2 anchors  recall" in output_of(*again, "1"), "of all layers that have gates"
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "word " * 5000}))
    longer = output_of(*command, "--max-length", "9000", "--data", str(tmp_path / "long.jsonl"), "--out", f"{out}-2")
    assert "long.jsonl, 4,096 tokens" in longer  # the model's positions
    handle.detach()
    wrong = bank.derived(decode_defaults={"anchors": [9]})
    refused(r"anchors names \[9\]; the layers with full attention are", seergate.attach, model, wrong)
