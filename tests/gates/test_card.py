"""Model cards: their examples run, the Hub can read their metadata, their numbers are those that were measured."""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import markdown
import pytest
import yaml

import seergate
from seergate import GateBank, GateConfig
from seergate.cli.adapters import results_of
from seergate.cli.main import main
from seergate.gates import save_adapter
from seergate.gates.card import END
from seergate.models.loading import load_base
from tests.support.models import tiny_model
from tests.test_house import ROOT

RESULTS = (
    {
        "task": "aime24",
        "method": "dense",
        "token_budget": None,
        "accuracy": 0.745,
        "standard_error": 0.05,
        "samples": 64,
    },
    {
        "task": "aime24",
        "method": "gate",
        "token_budget": 2048,
        "accuracy": 0.566,
        "standard_error": 0.06,
        "samples": 64,
    },
    {"task": "aime24", "method": "gate", "token_budget": 4096, "accuracy": 0.723, "mean_tokens": 16312.4},
)


def read(directory: Path) -> tuple[dict, str]:
    """Metadata and text."""
    text = (directory / "README.md").read_text(encoding="utf-8")
    return yaml.safe_load(text.split("---")[1]), text


def run(directory: Path) -> dict:
    """Run the card's example; what it defined."""
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.S):
        exec(compile(code, "README.md", "exec"), names)
    return names


@pytest.fixture
def bank(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "base")
    return GateBank.for_model(type(model).from_pretrained(tmp_path / "base"), GateConfig(8, 16))


def test_example_for_a_base_without_tokenizer(bank, tmp_path):
    bank.save_pretrained(tmp_path / "gates")
    model = run(tmp_path / "gates")["model"]
    assert seergate.handle_of(model).method.token_budget == 4096


def test_example_for_gates_without_a_base(tmp_path):
    GateBank.for_model(tiny_model("qwen3"), GateConfig(8, 16)).save_pretrained(tmp_path / "gates")
    assert isinstance(run(tmp_path / "gates")["bank"], GateBank)


def test_example_for_gates_with_a_rule_of_their_own(bank, tmp_path):
    bank.decode_defaults = {"threshold": 0.2}
    bank.save_pretrained(tmp_path / "gates")
    assert seergate.handle_of(run(tmp_path / "gates")["model"]).method.threshold == 0.2


def test_example_for_the_shipped_model_generates(tmp_path, capsys, monkeypatch):
    model = load_base(ROOT / "checkpoints" / "tiny-reasoner")
    GateBank.for_model(model, GateConfig(16, 32)).save_pretrained(tmp_path / "gates")
    monkeypatch.chdir(tmp_path)
    names = run(tmp_path / "gates")
    assert "<|im_start|> assistant" in capsys.readouterr().out
    assert seergate.handle_of(names["model"]).stats()["method"] == "gate"


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "`code`", "|pipe|"])
def test_odd_names_break_nothing(bank, tmp_path, name):
    bank.geometry = bank.geometry.__class__(**{**vars(bank.geometry), "base_model": f"org/{name}"})
    bank.training_record = {"config": {"data": f"{name}/{name}"}, "imported_from": f"---\n{name}```"}
    (tmp_path / name).mkdir()
    save_adapter(bank, tmp_path / name)
    metadata, text = read(tmp_path / name)
    assert metadata["library_name"] == "seergate"
    code = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(code) == 1
    compile(code[0], "README.md", "exec")
    assert GateBank.from_pretrained(tmp_path / name).geometry.base_model == f"org/{name}"


def test_results(bank, tmp_path):
    bank.results, bank.training_record = (
        RESULTS,
        {"kl_held_out_best": 0.125, "config": {"data": "org/data", "max_steps": 800}},
    )
    bank.licence = {"license": "apache-2.0"}
    bank.save_pretrained(tmp_path / "gates")
    metadata, text = read(tmp_path / "gates")
    assert (
        "| aime24 | gate | 2048 | 56.6 ± 11.8 | 64 |  |" in text
        and "| aime24 | gate | 4096 | 72.3 |  | 16312 |" in text
    )
    assert "| aime24 | dense | all | 74.5 ± 9.8 | 64 |  |" in text and "| max steps | 800 |" in text
    assert metadata["license"] == "apache-2.0" and metadata["datasets"] == ["org/data"]
    entries = metadata["model-index"][0]["results"]
    values = {m["name"]: m["value"] for entry in entries for m in entry["metrics"]}
    assert values == {
        "accuracy (%), token budget 2048": 56.6,
        "accuracy (%), token budget 4096": 72.3,
        "KL from the model's attention (nats per row)": 0.125,
    }
    again = GateBank.from_pretrained(tmp_path / "gates")
    assert again.results == RESULTS and again.licence == bank.licence
    from huggingface_hub import ModelCard

    card = ModelCard.load(tmp_path / "gates" / "README.md")
    assert len(card.data.eval_results) == 3 and card.data.model_name == "gates"


def test_an_owners_text_stays(bank, tmp_path):
    directory = tmp_path / "gates"
    bank.save_pretrained(directory)
    card = directory / "README.md"
    first = card.read_text()
    bank.save_pretrained(directory)
    assert card.read_text() == first
    card.write_text(
        first.replace("tags:", "language: de\ntags:\n- mine").replace(
            "<!-- seergate: what", "Mine.\n\n<!-- seergate: what"
        )
    )
    bank.save_pretrained(directory)
    metadata, text = read(directory)
    assert metadata["language"] == "de" and "mine" in metadata["tags"] and "Mine." in text
    assert text.count("## Use") == 1
    for broken in (
        "---\n: [\n---\ntext",
        "---\nno end",
        f"---\nbomb: !!python/object/apply:builtins.open [{tmp_path / 'run'}, w]\n---\n",
        "",
        "---\n---\n",
        "---\ndate: 2026-99-99\n---\ntext",
        "text only\n",
        "\udcff".encode("utf-8", "surrogateescape"),
    ):
        card.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
        bank.save_pretrained(directory)
        assert read(directory)[0]["library_name"] == "seergate"
    assert not (tmp_path / "run").exists()


def test_text_is_utf8_whatever_the_locale(bank, tmp_path, monkeypatch):
    """Under the C locale Python's own choice is ASCII: a card with ± could neither be written nor read."""
    bank.results = RESULTS
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    (tmp_path / "gates").mkdir()
    card = tmp_path / "gates" / "README.md"
    card.write_text("Löwe 狮\n", encoding="utf-8")
    bank.save_pretrained(tmp_path / "gates")
    text = card.read_text(encoding="utf-8")
    assert "Löwe 狮" in text and "56.6 ± 11.8" in text


def test_results_of_an_evaluation(bank, tmp_path, capsys):
    """From `seergate eval` to the card."""
    gates = tmp_path / "gates"
    arguments = (
        "--problems 2 --variables 8 --budget 64 --method dense,gate --no-report --max-new-tokens 8 --batch-size 2"
    )
    assert main(["eval", *arguments.split(), "--out", str(tmp_path / "runs")]) == 0
    results = results_of(tmp_path / "runs")
    assert {(r["method"], r["token_budget"], r["samples"]) for r in results} == {("dense", None, 2), ("gate", 64, 2)}
    bank.save_pretrained(gates)
    assert (
        main(["export", str(gates), str(tmp_path / "with"), "--results", str(tmp_path / "runs"), "--licence", "mit"])
        == 0
    )
    metadata, text = read(tmp_path / "with")
    assert "| chain_sum | gate | 64 |" in text and metadata["license"] == "mit"
    capsys.readouterr()
    assert main(["info", str(tmp_path / "with"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 2
    assert main(["info", str(tmp_path / "with")]) == 0
    assert "chain_sum, gate, 64 tokens:" in capsys.readouterr().out


def test_what_a_record_says_is_no_markup(bank, tmp_path):
    hostile = "a*b*c|`[x](javascript:1)` ![t](http://host/t.png) <img src=x>\n~~~\n```\n" + END
    bank.results = tuple({**row, "task": hostile} for row in RESULTS)
    bank.geometry = replace(bank.geometry, base_model=f"org/{END}")
    bank.training_record = {"config": {"data": hostile, "max_steps": 5}, hostile: hostile}
    bank.save_pretrained(tmp_path / "gates")
    _, text = read(tmp_path / "gates")
    page = markdown.markdown(text.split("---\n", 2)[2], extensions=["tables", "fenced_code"])
    shown = hostile.replace("\n", "\\n")
    cells = [html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", page)]
    assert cells.count(shown) == len(RESULTS) + 1, "tasks of the results, data of the training"
    assert "javascript:" not in "".join(re.findall("<a [^>]*>", page)) and "src=x" not in "".join(
        re.findall("<[^>]*>", page)
    )
    assert "<img" not in page
    (record,) = re.findall(r"^(`{3,})json\n(.*?)\n\1$", text, re.S | re.M)
    assert json.loads(record[1]) == bank.training_record
    bank.save_pretrained(tmp_path / "gates")
    assert read(tmp_path / "gates")[1] == text, "none of it is taken for the owner's text"
