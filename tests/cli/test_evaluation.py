"""`eval show`, `regrade`, `sweep` and `report` of several runs, as a user meets them."""

import io
import json
import shutil
import sys
from dataclasses import replace

import pytest
import yaml

from seergate import GateBank, GateConfig
from seergate.cli.main import main
from seergate.eval import make_task
from seergate.eval.run_plan import run_plan
from seergate.eval.settings import grid, with_each
from seergate.eval.store import read_samples
from seergate.eval.sweep_plan import SweepPlan, named_gates
from tests.support import evaluation as support
from tests.support.models import tiny_model
from tests.support.running import invalid, output_of, refusal, refused, run_seergate


def output(*arguments):
    return output_of(*map(str, arguments))


def error(*arguments):
    return refusal(run_seergate(*map(str, arguments)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    support.save(root / "model")
    file = root / "sweep.yaml"
    values = {"model": str(root / "model"), "task": "chain_sum", "method": ["dense", "oracle", "streaming_llm"]}
    values |= {"budget": 32, "block_size": [8, 16], "dense_layers": [[], [0]], "samples": 2}
    values |= {"task_options": {"problems": 3, "variables": 6}, "max_new_tokens": 16, "temperature": 1.0}
    values |= {"measure_recall": True, "out": str(root / "runs")}
    file.write_text(yaml.safe_dump(values))
    output("sweep", file)
    return root / "runs"


@pytest.mark.slow
def test_a_sweep_makes_every_setting_once_and_goes_on(runs):
    sparse = {f"oracle-32-b{size}{dense}" for size in (8, 16) for dense in ("", "-dense0")}
    made = {path.name for path in runs.iterdir() if path.is_dir()}
    assert made == {"dense", "streaming_llm-32", *sparse}
    before = {path: path.read_bytes() for path in runs.glob("*/samples.jsonl")}
    file = runs.parent / "sweep.yaml"
    values = yaml.safe_load(file.read_text()) | {"budget": [32, 48], "method": ["dense", "streaming_llm"]}
    file.write_text(yaml.safe_dump(values))
    output("sweep", file, "--no-report")
    assert {path: path.read_bytes() for path in before} == before
    assert (runs / "streaming_llm-48" / "metrics.json").is_file()
    text = (runs / "report.md").read_text()
    for series in ("oracle b8, all sparse", "oracle b16, layers 0 dense", "pass@2 %", "KL to dense"):
        assert series in text
    assert (runs / "accuracy.svg").read_text().lstrip().startswith("<?xml")
    output("report", runs, "--out", runs.parent / "elsewhere")
    assert (runs.parent / "elsewhere" / "report.html").is_file()


def test_every_grade_can_be_explained(runs):
    row = read_samples(runs / "dense")[0]
    explained = output("eval", "show", runs / "dense", row["problem_id"])
    for said in (
        f"gold answer: {row['gold']}",
        "right: 0 of 2 samples",
        row["grade_reason"],
        row["completion"][-100:],
    ):
        assert said in explained
    assert explained.count("--- sample") == 2
    for arguments, message in (
        ((runs / "dense", "nowhere"), "problem 'nowhere'; it has 6-0-0, 6-0-1, 6-0-2"),
        ((runs / "dense", row["problem_id"], "--sample", 7), "has no sample 7 in"),
        ((runs, row["problem_id"]), "holds several runs; name one of them: dense, oracle-32-b16"),
    ):
        assert message in error("eval", "show", *arguments)


def test_characters_that_the_locale_lacks_are_shown_as_escapes(runs, tmp_path, monkeypatch):
    shutil.copytree(runs / "dense", tmp_path / "dense")
    support.edit_samples(tmp_path / "dense", lambda rows: [row | {"completion": "7 café"} for row in rows])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="ascii"))
    assert main(["eval", "show", str(tmp_path / "dense"), read_samples(tmp_path / "dense")[0]["problem_id"]]) == 0
    assert b"\n7 caf\\xe9\n" in written.getvalue()


def test_regrade_tells_what_changes(runs):
    run = runs / "streaming_llm-32"
    first, *others = read_samples(run)
    support.edit_samples(run, lambda _: [first | {"completion": rf"\boxed{{ {first['gold']} }}"}, *others])
    changes = output("regrade", run, "--processes", 1)
    assert "6 samples, 1 changed; accuracy 0.0 % -> 16.7 %" in changes
    assert "wrong (None; no boxed answer) -> right" in changes
    assert "show the earlier grades" in changes
    assert "1 changed" not in (unchanged := output("regrade", runs, "--dry-run")) and "earlier" not in unchanged
    assert "nowhere" in error("regrade", runs / "nowhere")


def test_regrade_passes_over_scored_texts(tmp_path):
    support.save(tmp_path / "model")
    options = ["--model", tmp_path / "model", "--method", "dense", "--out", tmp_path / "runs", "--no-report"]
    output("eval", *options, "--task", "perplexity:problems=1:length=140:scored=2")
    for grader in ([], ["--grader", "exact"]):
        skipped = f"{tmp_path / 'runs' / 'dense'}: no answers to grade"
        assert skipped in output("regrade", tmp_path / "runs", *grader)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("budgets: [1]", "did you mean 'budget'"),
        ("dense_layers: [a]", "dense_layers is"),
        ("task_options: {problems: x}", "the task's problems is 'x'; it must be an integer"),
        ("workers: null", "workers is None; it must be int"),
        ("temperature: hot", "temperature is 'hot'; it must be float | int | None"),
        ("gates: {eight: 3}", "gates is {'eight': 3}; it must be str | dict[int | str, str] | None"),
        ("method: []", "method is empty; it must name at least one method"),
        ("threshold: '1e-2'", "threshold is ['1e-2']; it must be list[float | int]"),
        ("engine: vllm\nray_address: auto", "ray_address is 'auto'; with --engine vllm it must be left out"),
        ("[", "is not YAML"),
        ("budget: 32\nbudget: 64\n", "is given again"),
        ("budget: 064", "line 1, column 9 is not YAML: 064 would be read as another number"),
        ("budget: [32, 1:30]", "1:30 would be read as another number"),
    ],
)
def test_mistakes_in_a_sweep_are_told(text, said, tmp_path):
    file = tmp_path / "sweep.yaml"
    assert "does not exist" in error("sweep", file)
    file.write_text(text)
    assert said in error("sweep", file)


def test_single_values_stand_for_lists():
    plan = SweepPlan.of({"budget": 64, "method": "dense", "dense_layers": [0, 1]})
    assert (plan.budget, plan.method, plan.dense_layers) == ([64], ["dense"], [(0, 1)])
    assert SweepPlan.of({"dense_layers": [None, [0, 1]]}).dense_layers == [None, (0, 1)]
    plan = SweepPlan.of({"temperature": 1, "samples": None, "gates": {8: "there"}, "task_options": {"problems": 3}})
    assert (plan.temperature, plan.samples, plan.gates, len(plan.make_task().problems())) == (1, None, {8: "there"}, 3)


def test_gates_and_block_sizes_must_agree():
    plan = SweepPlan(block_size=[8, 32], budget=[64])
    invalid("block_size is 32, but these gates have 8", plan.specs, plan.make_task(), [8])
    labels = [spec.label for spec in plan.specs(plan.make_task(), [8, 32])]
    assert labels == ["dense", "gate-64-b8", "gate-64-b32"]


def test_methods_with_gates_run_with_each_that_has_their_block_size():
    model = support.model()
    banks = {name: GateBank.for_model(model, GateConfig(size, 16)) for name, size in (("a", 8), ("b", 8), (16, 16))}
    assert [spec.label for spec in grid(["quest"], [64, 64], [8, 8], [(0, 1), (0, 1)])] == ["quest-64-dense0,1"]
    specs = with_each(grid(["dense", "gate", "h2o:interval=8"], [64], [8, 16]), banks)
    assert [spec.label for spec in specs] == [
        "dense", "gate-64-b8-a", "gate-64-b8-b", "gate-64-b16", "h2o-64-interval=8",
    ]  # fmt: skip
    assert [spec.bank(banks) for spec in specs[1:4]] == list(banks.values())
    assert with_each(grid(["gate"], [64], 8), {"a": banks["a"]})[0] == replace(specs[1], named_block_size=False)
    (_, own) = with_each(grid(["gate"], [64], 8), named := {"b": banks["b"], "gate": banks["a"]})
    assert own.label == "gate-64" and own.bank(named) is banks["a"]
    with pytest.raises(ValueError, match=r"gates are named 'a/b'; a name must be of letters, digits and _ . -"):
        with_each(specs, {"a/b": banks["a"]})
    assert named_gates("runs/lr=0.01/gates") == "runs/lr=0.01/gates", "a path, no name"
    for text in ("a=here,a=there", "a=here,there", "=here"):
        assert f"{text!r} must be DIR, or NAME=DIR,NAME=DIR with different names" in error("eval", "--gates", text)


def test_gates_that_no_method_decodes_with_decide_no_block_size(tmp_path):
    task = make_task("chain_sum", problems=1, variables=6)

    def sizes(*methods):
        return [spec.block_size for spec in SweepPlan(method=["dense", *methods], budget=[64]).specs(task, [8])[1:]]

    assert sizes("quest", "h2o") == [64, None] and sizes("quest", "gate") == [8, 8]
    assert sizes("quest", "trim_kv")[0] == 64, "those of trim_kv have no blocks"
    support.save(tmp_path / "model")
    GateBank.for_model(support.model(), GateConfig(16, 16, scorer="trim_kv")).save_pretrained(tmp_path / "gates")
    GateBank.for_model(support.model(), GateConfig(8, 16)).save_pretrained(tmp_path / "model" / "gates")
    small = ("--model", tmp_path / "model", "--task", "chain_sum", "--problems", 1, "--variables", 6)
    small += ("--max-new-tokens", 8, "--budget", 128)
    for out, *method_arguments in (("no", "quest"), ("trim", "quest,trim_kv", "--gates", tmp_path / "gates")):
        output("eval", *small, "--method", *method_arguments, "--out", tmp_path / out, "--no-report")
        config = yaml.safe_load((tmp_path / out / "quest-128" / "config.yaml").read_text())
        assert config["method"]["block_size"] == 64, "those of trim_kv score tokens"


def test_an_evaluation_keeps_to_the_positions_of_the_model(tmp_path):
    model = tiny_model("qwen3", vocab_size=len(support.tokenizer()), max_position_embeddings=24)
    model.save_pretrained(tmp_path / "m")
    support.tokenizer().save_pretrained(tmp_path / "m")
    (tmp_path / "short.jsonl").write_text('{"prompt": "a1 1 a2 2", "answer": "3"}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a1 " * 25, "answer": "3"}))
    given = ("eval", "--model", tmp_path / "m", "--method", "dense", "--out", tmp_path / "runs", "--task")
    graded = "--grader", "exact"
    for arguments, message in (
        ((tmp_path / "long.jsonl", *graded), "the prompt of problem 1 has 25 tokens; the model has 24 positions"),
        (
            (tmp_path / "short.jsonl", *graded, "--max-new-tokens", "21"),
            "at most 21 new tokens, and the longest prompt has 4: the model has 24",
        ),
        (("perplexity:length=25:scored=2",), "a text of the task's length has 25 tokens; the model has 24 positions"),
    ):
        assert message in error(*given, *arguments)
    assert not list(tmp_path.glob("runs/*/*")), "before any work"
    note = "at most 24 tokens, prompt included, instead of at most 32768 tokens, prompt included: the model has 24 pos"
    assert note in output(*given, tmp_path / "short.jsonl", *graded, "--threads", "1")
    config = yaml.safe_load((tmp_path / "runs" / "dense" / "config.yaml").read_text())
    assert config["generation"]["max_total_tokens"] == 24
    (sample,) = read_samples(tmp_path / "runs" / "dense")
    assert sample["n_tokens"] <= 20


def test_a_method_that_a_model_cannot_have_is_refused_before_any_answer(tmp_path):
    tiny_model("hunyuan_v1_dense", vocab_size=len(support.tokenizer())).save_pretrained(tmp_path)
    support.tokenizer().save_pretrained(tmp_path)
    plan = {"model": str(tmp_path), "task": "chain_sum", "method": ["dense", "streaming_llm"], "budget": 64}
    refused("re-positions keys", run_plan, SweepPlan.of(plan | {"out": str(tmp_path / "runs")}))
    assert not list((tmp_path / "runs").iterdir())
