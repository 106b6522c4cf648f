"""The adapters that ship with seergate: loaded by name from any directory; the example of the card runs."""

import json
import tomllib

import pytest
from transformers import AutoTokenizer

import seergate
from seergate import GateBank, GateConfig
from seergate.eval import make_task
from seergate.gates.card import Source, model_card
from seergate.paths import is_hub_id, shipped
from tests.gates.conftest import metadata, run_example
from tests.support.models import tiny_model
from tests.support.running import output_of, refused
from tests.test_house import ROOT

GATES, MSA = "checkpoints/tiny-reasoner/gates", "checkpoints/tiny-reasoner/gates-msa"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Another working directory than the checkout's root."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_shipped_gates_load_from_elsewhere(elsewhere):
    bank = GateBank.from_pretrained(GATES)
    assert bank.geometry.base_model == "checkpoints/tiny-reasoner"
    assert not is_hub_id("checkpoints/tiny-reasoner") and is_hub_id("org/tiny-reasoner")
    facts = json.loads(output_of("info", GATES, "--json"))["base model"]
    licence = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"].lower()
    assert (facts["name"], facts["licence"]) == ("checkpoints/tiny-reasoner", licence)
    card = (shipped(GATES) / "README.md").read_text()
    assert metadata(card)["license"] == licence
    for source, options, message in (
        (GATES, {"revision": "main"}, "is a directory, which has none"),
        ("checkpoints/tiny-reasoner", {}, "holds no gate_config"),
        ("checkpoints/tiny-reasoner/nothing", {}, "there is no directory"),
    ):
        refused(message, GateBank.from_pretrained, source, **options)
    GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16)).save_pretrained(GATES)
    assert GateBank.from_pretrained(GATES).geometry.hidden_size == 64, "a directory here comes first"


@pytest.mark.parametrize("gates", [GATES, MSA])
def test_the_shipped_card_is_what_the_command_writes(gates, elsewhere):
    name = gates.rpartition("/")[2]
    output_of("export", gates, str(elsewhere / name), "--loaded-as", gates)
    assert (elsewhere / name / "README.md").read_text() == (shipped(gates) / "README.md").read_text()


def test_gates_of_msa_answer_with_four_blocks():
    model = seergate.load(MSA, token_budget=32)
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    for problem in make_task("chain_sum", problems=1, variables=20).problems():
        text = tokenizer.apply_chat_template(problem.messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        answer = tokenizer.decode(model.generate(ids, max_new_tokens=300)[0, ids.shape[1] :])
        assert f"\\boxed{{{problem.gold}}}" in answer.replace(" ", ""), answer


def test_the_shipped_cards_example_answers_and_skips(capsys):
    names = run_example((shipped(GATES) / "README.md").read_text())
    answer = capsys.readouterr().out
    tokenizer, handle = names["tokenizer"], seergate.handle_of(names["model"])
    assert tokenizer.unk_token_id not in names["input_ids"].tolist()[0] and "\\boxed{" in answer.split("assistant")[-1]
    assert len(tokenizer(answer).input_ids) > 1.5 * handle.method.token_budget, "something is skipped"


def test_budget_of_the_example():
    """An eighth of the trained length as a power of two below it, with room for a past block; 4096 if unknown."""
    for length, block, budget in (
        *((32768, 64, 4096), (2304, 8, 256), (2047, 8, 128), (100, 64, 128)),
        *((None, 8, 4096), (True, 8, 4096), ("long", 8, 4096)),
    ):
        bank = GateBank.for_model(tiny_model("qwen3"), GateConfig(block, 16))
        bank.training_record = {"config": {"max_length": length}}
        card = model_card(bank, Source("org/gates"), existing=None)
        assert f"token_budget={budget})" in card, length
