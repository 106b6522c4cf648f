"""Model cards: their examples run, the Hub can read their metadata, their numbers are those that were measured."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import markdown
import pytest
from huggingface_hub import ModelCard
from tokenizers import processors

import seergate
from seergate import GateBank
from seergate.cli.adapters import results_of
from seergate.escaping import markdown_text
from seergate.gates import save_adapter
from seergate.gates.card import END
from seergate.models.names import TINY_GATES
from seergate.paths import shipped
from tests.gates.conftest import example, metadata, run_example
from tests.support import evaluation
from tests.support.running import output_of, refusal, refused, run_seergate

AIME = {"task": "aime24", "method": "gate", "samples": 64}
RESULTS = (
    {**AIME, "method": "dense", "token_budget": None, "accuracy": 0.745, "standard_error": 0.05},
    {**AIME, "token_budget": 2048, "accuracy": 0.566, "standard_error": 0.06},
    {"task": "aime24", "method": "gate", "token_budget": 4096, "accuracy": 0.723, "mean_tokens": 16312.4},
    {"task": "aime24", "method": "gate", "token_budget": None, "limit": "p > 0.004", "accuracy": 0.7},
)


def saved(bank: GateBank, directory: Path) -> str:
    """Save gates; returns their card."""
    bank.save_pretrained(directory)
    return (directory / "README.md").read_text(encoding="utf-8")


def test_the_example_decodes_by_the_gates_own_rule(bank, tmp_path):
    """`decode_defaults` are saved, and hold where nothing else is given. Other examples run in test_hub.py."""
    bank.decode_defaults = {"threshold": 0.2, "dense_layers": [0]}
    method = seergate.handle_of(run_example(saved(bank, tmp_path / "gates"))["model"]).method
    assert (method.threshold, method.token_budget, method.dense_layers) == (0.2, None, (0,))


@pytest.mark.parametrize("sinks", [0, 1])
def test_the_examples_budget_has_room_for_a_past_block(bank, tmp_path, sinks):
    bank = bank.derived(config=replace(bank.config, sink_blocks=sinks), training={"config": {"max_length": 64}})
    method = seergate.handle_of(run_example(saved(bank, tmp_path / "gates"))["model"]).method
    assert method.token_budget == (2 + sinks) * 8


@pytest.mark.parametrize("chats", [True, False])
def test_the_example_begins_with_one_bos(bank, tmp_path, chats):
    tokenizer = evaluation.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<pad> $A", special_tokens=[("<pad>", 0)]
    )
    tokenizer.chat_template = f"<pad> {tokenizer.chat_template}" if chats else None
    (tmp_path / "base" / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tmp_path / "base")
    ids = run_example(saved(bank, tmp_path / "gates"))["input_ids"][0].tolist()
    assert ids[0] == 0 and ids.count(0) == 1


def test_the_example_does_not_depend_on_what_is_downloaded(bank, tmp_path):
    for base, has_tokenizer in (("org/nowhere", True), ("/models/file.gguf", False), ("/models/FILE.GGUF", False)):
        bank.geometry = replace(bank.geometry, base_model=base)
        assert ("AutoTokenizer" in example(saved(bank, tmp_path / "gates"))) == has_tokenizer


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "`code`", "|pipe|"])
def test_odd_names_break_nothing(bank, tmp_path, name):
    bank.geometry = replace(bank.geometry, base_model=f"org/{name}")
    bank.training_record = {"config": {"data": f"{name}/{name}"}, "imported_from": f"---\n{name}```"}
    (tmp_path / name).mkdir()
    save_adapter(bank, tmp_path / name)
    text = (tmp_path / name / "README.md").read_text(encoding="utf-8")
    assert metadata(text)["library_name"] == "seergate"
    compile(example(text), "README.md", "exec")
    assert GateBank.from_pretrained(tmp_path / name).geometry.base_model == f"org/{name}"


def test_results(bank, tmp_path):
    bank.results, bank.licence = RESULTS, {"license": "apache-2.0"}
    run = {"data": "org/data", "data_revision": "0" * 40, "max_steps": 800}
    bank.training_record = {"kl_held_out": 0.125, "kl_held_out_best": 0.1, "config": run}
    gates = tmp_path / "gates"
    text = saved(bank, gates)
    for row in (
        "| aime24 | dense | all | 74.5 ± 9.8 | 64 |  |",
        "| aime24 | gate | 2048 | 56.6 ± 11.8 | 64 |  |",
        "| aime24 | gate | 4096 | 72.3 |  | 16312 |",
        f"| aime24 | gate | {markdown_text('p > 0.004')} | 70.0 |",
        "| max steps | 800 |",
        "| KL on held-out data (nats per row) | 0.125 |",
        "| lowest KL on held-out data during training (nats per row) | 0.1 |",
    ):
        assert row in text
    facts = metadata(text)
    assert facts["license"] == "apache-2.0" and facts["datasets"] == ["org/data"]
    metrics = [metric for entry in facts["model-index"][0]["results"] for metric in entry["metrics"]]
    assert {metric["name"]: metric["value"] for metric in metrics} == {
        "accuracy (%), token budget 2048": 56.6,
        "accuracy (%), token budget 4096": 72.3,
        "accuracy (%), p > 0.004": 70.0,
        "KL from the model's attention (nats per row)": 0.125,
    }
    local = bank.derived(
        training={**bank.training_record, "config": {"data": "data/rows.jsonl", "data_revision": None}}
    )
    assert "datasets" not in metadata(saved(local, tmp_path / "local"))
    again, card = GateBank.from_pretrained(gates), ModelCard.load(gates / "README.md")
    assert again.results == RESULTS and again.licence == bank.licence
    assert {entry["task"].get("name") for entry in facts["model-index"][0]["results"]} == {None}
    assert len(card.data.eval_results) == 4 and card.data.model_name == "gates"


def test_an_owners_text_stays(bank, tmp_path):
    card = tmp_path / "gates" / "README.md"
    first = saved(bank, card.parent)
    assert saved(bank, card.parent) == first
    own = first.replace("<!-- seergate: what", "Mine, Löwe 狮.\n\n<!-- seergate: what")
    card.write_text(own.replace("tags:", "language: de\ntags:\n- mine"), encoding="utf-8")
    text = saved(bank, card.parent)
    assert metadata(text)["language"] == "de" and "mine" in metadata(text)["tags"]
    assert "Mine, Löwe 狮." in text and text.count("## Use") == 1


def test_an_owners_metadata_stays_as_written(bank, tmp_path):
    """``no`` is Norwegian and 1.10 a version; YAML 1.1 reads False, 1.1 and 45000."""
    written = 'language: no\nversion: 1.10\ninference: false\nat: 12:30:00\nname: "yes"\non: 1\n<<: {a: b}\n'
    (tmp_path / "README.md").write_text(f"---\n{written}tags:\n- no\n---\nMine.\n", encoding="utf-8-sig")  # as Windows
    text = saved(bank, tmp_path)
    assert written in text and "- 'no'\n" in text and saved(bank, tmp_path) == text


def test_metadata_of_the_gates_that_were_there_before_goes(bank, tmp_path):
    """Results and data of other gates. What the owner wrote stays, all of it if the card was not of gates."""
    base, card = bank.geometry, tmp_path / "gates" / "README.md"
    card.parent.mkdir()
    card.write_text("---\ndatasets:\n- org/own\nlanguage: de\n---\n", encoding="utf-8")
    assert metadata(saved(bank, card.parent))["datasets"] == ["org/own"]
    bank.results, bank.licence = RESULTS, {"license": "mit"}
    bank.training_record = {"config": {"data": "org/data", "data_revision": "main"}}
    bank.geometry = replace(base, base_model="org/base")
    assert metadata(saved(bank, card.parent)).keys() > {"model-index", "datasets", "base_model", "base_model_relation"}
    other = GateBank(bank.config, replace(base, base_model=None))
    facts = metadata(saved(other, card.parent))
    assert facts.keys() == {"language", "license", "library_name", "pipeline_tag", "tags"}


BROKEN = ["---\n: [\n---\ntext", "---\nno end", "", "---\n---\n", "---\ndate: 2026-99-99\n---\ntext", "text", b"\xff"]


@pytest.mark.parametrize("text", [*BROKEN, "---\na: !!python/object/apply:os.mkdir [exploded]\n---\n"])
def test_a_card_that_is_not_well_formed_gets_its_metadata(bank, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert metadata(saved(bank, tmp_path))["library_name"] == "seergate"
    assert not (tmp_path / "exploded").exists(), "code in the metadata was run"


def test_results_of_an_evaluation(bank, tmp_path):
    """From `seergate eval` to the card."""
    gates, runs, out = (str(tmp_path / name) for name in ("gates", "runs", "with"))
    methods = "dense,gate,gate:dense_layers=0+2,snapkv+gate:read_budget=32"
    arguments = f"--problems 2 --variables 8 --budget 64 --method {methods} --no-report --max-new-tokens 8"
    output_of("eval", *arguments.split(), "--batch-size", "2", "--out", runs)
    own = GateBank.from_pretrained(shipped(TINY_GATES))
    rows = results_of(Path(runs), own)
    results = {(row["method"], row.get("options"), row["token_budget"], row["samples"]) for row in rows}
    with_gates = ("gate", None, 64, 2), ("gate", "dense_layers=0+2", 64, 2), ("snapkv+gate", None, 64, 2)
    assert results == {("dense", None, None, 2), *with_gates}
    samples = tmp_path / "runs" / "gate-64" / "samples.jsonl"
    whole = samples.read_text()
    samples.write_text(whole.splitlines(keepends=True)[0])
    refused("gate-64 lacks samples", results_of, Path(runs), own)
    samples.write_text(whole)
    texts = str(tmp_path / "texts")
    output_of(
        "eval",
        *["--task", "perplexity:length=256:scored=16", "--problems", "2", "--method", "dense", "--no-report", "--out"],
        texts,
    )
    refused("texts has scored texts only", results_of, Path(texts), own)
    output_of("eval", *arguments.replace(methods, "dense").split(), "--out", str(tmp_path / "dense"))
    refused("dense has results of other gates .none. than", results_of, tmp_path / "dense", own)
    bank.save_pretrained(gates)
    assert "has results of other gates" in refusal(run_seergate("export", gates, out, "--results", runs))
    own.save_pretrained(gates)
    output_of("export", gates, out, "--results", runs, "--licence", "mit")
    text = (tmp_path / "with" / "README.md").read_text()
    assert "| chain_sum, variables=8 | gate | 64 |" in text and metadata(text)["license"] == "mit"
    assert "| chain_sum, variables=8 | gate, dense_layers=0+2 | 64 |" in text
    names = [metric["name"] for one in metadata(text)["model-index"][0]["results"] for metric in one["metrics"]]
    accuracies = [name for name in names if name.startswith("accuracy")]
    assert accuracies == ["accuracy (%), token budget 64, variables=8"], "with the gates' own options only"
    assert len(json.loads(output_of("info", out, "--json"))["results"]) == 4
    assert "chain_sum, variables=8, gate, 64 tokens:" in output_of("info", out)


def test_what_a_record_says_is_no_markup(bank, tmp_path):
    hostile = "a*b*c|`[x](javascript:1)` ![t](http://host/t.png) <img src=x>\n~~~\n```\n" + END
    bank.results = tuple({**row, "task": hostile} for row in RESULTS)
    bank.geometry = replace(bank.geometry, base_model=f"org/{END}")
    bank.training_record = {"config": {"data": hostile, "max_steps": 5}, hostile: hostile}
    text = saved(bank, tmp_path / "gates")
    page = markdown.markdown(text.split("---\n", 2)[2], extensions=["tables", "fenced_code"])
    cells = [html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", page)]
    assert cells.count(hostile.replace("\n", "\\n")) == len(RESULTS) + 1, "tasks of the results, data of the training"
    tags = re.findall("<[^>]*>", page)
    assert not any("javascript:" in tag or "src=x" in tag for tag in tags)
    assert "<img" not in page
    (record,) = re.findall(r"^(`{3,})json\n(.*?)\n\1$", text, re.S | re.M)
    assert json.loads(record[1]) == bank.training_record
    assert saved(bank, tmp_path / "gates") == text, "none of it is taken for the owner's text"
