"""The adapter that ships with seergate: found by its name from anywhere; the example of its card runs."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import torch
import yaml
from transformers import AutoTokenizer

import seergate
from seergate import GateBank, GateConfig, SeergateError
from seergate.cli.main import main
from seergate.eval import make_task
from seergate.eval.tasks.prompts import encode, prompt_text
from seergate.gates.card import Source, usage
from seergate.paths import is_hub_id, shipped
from tests.support.models import tiny_model
from tests.test_house import ROOT

GATES = "checkpoints/tiny-reasoner/gates"
MSA = "checkpoints/tiny-reasoner/gates-msa"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another working directory than the checkout's root."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_shipped_gates_load_from_elsewhere(elsewhere, capsys):
    bank = GateBank.from_pretrained(GATES)
    assert bank.geometry.base_model == "checkpoints/tiny-reasoner"
    assert seergate.handle_of(seergate.load(GATES, token_budget=64)).method.token_budget == 64
    assert not is_hub_id("checkpoints/tiny-reasoner") and is_hub_id("org/tiny-reasoner")
    assert main(["info", GATES]) == 0
    assert "checkpoints/tiny-reasoner" in capsys.readouterr().out
    with pytest.raises(SeergateError, match="is a directory, which has none"):
        GateBank.from_pretrained(GATES, revision="main")
    with pytest.raises(SeergateError, match="holds no gate_config"):
        GateBank.from_pretrained("checkpoints/tiny-reasoner")
    with pytest.raises(SeergateError, match="there is no directory"):
        GateBank.from_pretrained("checkpoints/tiny-reasoner/nothing")


def test_a_directory_here_comes_before_a_shipped_one(elsewhere):
    own = GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16))
    own.save_pretrained(GATES)
    assert GateBank.from_pretrained(GATES).geometry.hidden_size == own.geometry.hidden_size == 64


@pytest.mark.parametrize("gates", [GATES, MSA])
def test_the_shipped_card_is_what_the_command_writes(gates, elsewhere):
    name = gates.rpartition("/")[2]
    assert main(["export", gates, str(elsewhere / name), "--loaded-as", gates]) == 0
    assert (elsewhere / name / "README.md").read_text() == (shipped(gates) / "README.md").read_text()


def test_gates_of_msa_answer_with_four_blocks():
    model = seergate.load(MSA, token_budget=32)
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    for problem in make_task("chain_sum", problems=2, variables=20).problems():
        ids = torch.tensor([encode(tokenizer, prompt_text(tokenizer, problem))])
        answer = tokenizer.decode(model.generate(ids, max_new_tokens=300)[0, ids.shape[1] :])
        assert f"\\boxed{{{problem.gold}}}" in answer.replace(" ", ""), answer


def test_shipped_gates_have_the_projects_licence(elsewhere, capsys):
    """In the record, so that what is exported or pushed has it, and in the card, where the Hub looks for it."""
    licence = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"].lower()
    assert main(["info", GATES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["base model"]["licence"] == licence
    card = (shipped(GATES) / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["license"] == licence


def test_the_shipped_cards_example_answers_and_skips(elsewhere, capsys):
    text = (shipped(GATES) / "README.md").read_text()
    names: dict = {}
    exec(compile(re.search(r"```python\n(.*?)```", text, re.S)[1], "card", "exec"), names)
    answer = capsys.readouterr().out
    tokenizer, ids, handle = names["tokenizer"], names["input_ids"], seergate.handle_of(names["model"])
    assert tokenizer.unk_token_id not in ids.tolist()[0], "the question is in the model's vocabulary"
    assert "\\boxed{" in answer.split("assistant")[-1]
    assert len(tokenizer(answer).input_ids) > 1.5 * handle.method.token_budget, "something is skipped"


@pytest.mark.parametrize(
    ("max_length", "block_size", "budget"),
    [
        (32768, 64, 4096),
        (2304, 8, 256),
        (2047, 8, 128),
        (100, 64, 64),  # never less than a block
        (None, 8, 4096),
        (True, 8, 4096),
        ("long", 8, 4096),
    ],
)
def test_budget_of_the_example(max_length, block_size, budget):
    """An eighth of the length that the gates were trained at, as a power of two below it; 4096 if it is not known."""
    bank = GateBank.for_model(tiny_model("qwen3"), GateConfig(block_size, 16))
    bank.training_record = {"config": {} if max_length is None else {"max_length": max_length}}
    assert f"token_budget={budget})" in usage(bank, Source("org/gates")), json.dumps(max_length)
