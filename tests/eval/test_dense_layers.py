"""Which layers should stay dense: distances against decoding each text anew, the choice, and the adapter written."""

from dataclasses import replace

import pytest
import torch

import seergate
from seergate import GateBank, methods
from seergate.eval.calibration.dense_layers import answered, distances, find_dense_layers
from seergate.eval.proxies import compare
from seergate.eval.tasks.registry import make_task
from seergate.models import families
from seergate.paths import shipped
from seergate.pretrained import load_tokenizer
from tests.decode.test_decode import BLOCK, gates
from tests.support import evaluation as support
from tests.support.models import prompt, tiny_model
from tests.support.running import invalid, output_of, refusal, refused, run_seergate

TINY = shipped("checkpoints/tiny-reasoner")


@pytest.fixture(scope="module")
def deep():
    return tiny_model("qwen3", num_hidden_layers=4).double()


@pytest.fixture(scope="module")
def texts():
    ids = prompt(90, 1)[0].tolist()
    return [(ids[:80], ids[80:]), (ids[:60], ids[60:75])]


@pytest.mark.parametrize("name", ["gate", "quest"])
def test_distances_are_those_of_decoding_every_text_anew(deep, texts, name):
    options = {"bank": gates(deep).double()} if name == "gate" else {"block_size": BLOCK}
    method = methods.make_method(name, token_budget=2 * BLOCK, **options)
    plans = [(), (0,), (1, 3), (0, 1, 2, 3)]
    plan_distances = distances(deep, method, texts, plans)
    for layers, row in zip(plans, plan_distances.tolist(), strict=True):
        for (given, reply), measured in zip(texts, row, strict=True):
            ids = torch.tensor([given + reply])
            with torch.no_grad(), seergate.attached(deep, replace(method, dense_layers=layers)):
                sparse = seergate.score(deep, ids, start=len(given), logits=True).logits
            with torch.no_grad():
                dense = deep(ids).logits
            kl = compare(dense[0, len(given) : -1], sparse[0, 1:], ids[0, len(given) + 1 :])[0]
            assert measured == pytest.approx(float(kl.mean()), abs=1e-7)
    assert bool((plan_distances[-1] < 1e-7).all()) and bool((plan_distances[0] > 1e-2).all())


def test_layers_with_a_window_are_left_alone(texts):
    """Their cache cannot go back; each plan decodes with a copy."""
    model = tiny_model("gemma3_text").double()
    method = methods.Quest(token_budget=2 * BLOCK, block_size=BLOCK)
    full = [layer for layer, _ in families.full_attention_modules(model)]
    assert len(full) < model.config.num_hidden_layers
    plan_distances = distances(model, method, texts, [(), tuple(full)])
    assert bool((plan_distances[0] > 1e-4).all()) and bool((plan_distances[1] < 1e-7).all())


def test_each_further_layer_brings_the_answers_nearest(deep, texts):
    method = methods.Gate(bank=gates(deep).double(), token_budget=2 * BLOCK, dense_layers=(3,))
    seen = {}
    best_plan = find_dense_layers(deep, method, texts, 2, lambda plan, kl: seen.update({plan: float(kl.mean())}))
    assert set(seen) == {(), (0,), (1,), (2,), (3,), *(plan for plan in seen if len(plan) == 2)}
    first = min((plan for plan in seen if len(plan) == 1), key=seen.get)
    pairs = {tuple(sorted((*first, other))) for other in {0, 1, 2, 3} - {*first}}
    assert {plan for plan in seen if len(plan) == 2} == pairs and best_plan == min(pairs, key=seen.get)


def test_what_cannot_be_told_apart_is_refused(deep, texts, monkeypatch):
    method = methods.Gate(bank=gates(deep).double(), token_budget=128)
    for change, count, message in (
        ({}, 1, r"the longest text has 89 tokens, all of which gate \(128\) reads; give"),
        ({"token_budget": 16}, 5, r"count is 5; it must be a whole number in 1\.\.4"),
        (
            {"token_budget": 16, "anchors": (0,)},
            1,
            r"the method has anchors \[0\]; find dense layers with gates for e",
        ),
    ):
        invalid(message, find_dense_layers, deep, replace(method, **change), texts, count)
    monkeypatch.setattr(deep.config, "max_position_embeddings", 80)
    refused("the longest text has 89 tokens; the model has 80 positions", find_dense_layers, deep, method, texts, 1)
    message, task = "no right answer of two tokens or more to compare on; take var", make_task("chain_sum", problems=1)
    refused(message, answered, load_tokenizer(TINY), task)


def test_the_command_writes_gates_that_decode_with_their_dense_layers(tmp_path):
    model, out = support.save(tmp_path / "model"), tmp_path / "gates"
    gates(support.model()).save_pretrained(tmp_path / "given")
    command = ["dense-layers", "--model", str(model), "--gates", str(tmp_path / "given"), "--count", "1"]
    command += ["--budget", "64", "--task", "variable_tracking:length=300:problems=2", "--out", str(out)]
    output = output_of(*command)
    assert "2 answers of variable_tracking" in output and output.count("  KL ") == 1 + 2
    bank = GateBank.from_pretrained(out)
    (layer,) = bank.decode_config().dense_layers
    assert len(bank) == 2 and rf"dense_layers=\[{layer}\]" in (out / "README.md").read_text()
    assert "variable_tracking" in bank.training_record["dense_layers_found_on"]
    assert methods.Gate.with_gates(bank).dense_layers == (layer,)
    assert "is not empty" in refusal(run_seergate(*command))
    for change, message in (
        (["--count", "3"], "count is 3; it must be a whole number in 1..2"),
        (["--gates", str(TINY / "gates")], "these gates are for another model"),
    ):
        done = run_seergate(*command, *change, "--out", str(tmp_path / "refused"))
        assert message in refusal(done) and not done.stdout, "before the model is loaded"
