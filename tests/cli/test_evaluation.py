"""`eval show`, `regrade`, `sweep`, `figure` and `report` of several runs, as a user meets them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from seergate import GateBank, GateConfig
from seergate.cli.figure import ALIASES, NAMES, _write
from seergate.cli.main import main
from seergate.cli.models import named_gates
from seergate.cli.papers import FIGURES, SEER
from seergate.config import SCORERS, is_retention
from seergate.eval import make_task
from seergate.eval.plan import SweepPlan
from seergate.eval.settings import grid, with_each
from seergate.report.figures import LOOKS
from tests.eval import support
from tests.models import tiny_model
from tests.report.made import write_run
from tests.running import ROOT


def call(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A sweep over block sizes, dense layers and a threshold, of a random model."""
    root = tmp_path_factory.mktemp("sweep")
    support.save(root / "model")
    file = root / "sweep.yaml"
    values = {
        "model": str(root / "model"),
        "task": "chain_sum",
        "method": ["dense", "oracle", "streaming_llm"],
        "budget": 32,
        "threshold": 0.05,
        "block_size": [8, 16],
        "dense_layers": [[], [0]],
        "task_options": {"problems": 3, "variables": 6},
        "max_new_tokens": 40,
        "samples": 2,
        "temperature": 1.0,
        "measure_recall": True,
        "out": str(root / "runs"),
    }
    file.write_text(yaml.safe_dump(values))
    assert call("sweep", file) == 0
    return root / "runs"


def test_a_sweep_makes_every_setting_once_and_goes_on(runs, capsys):
    sparse = {f"oracle-32-b{size}{dense}" for size in (8, 16) for dense in ("", "-dense0")} | {
        f"oracle-b{size}{dense}-threshold=0.05" for size in (8, 16) for dense in ("", "-dense0")
    }
    made = {path.name for path in runs.iterdir() if path.is_dir()}
    assert made == {"dense", "streaming_llm-32", *sparse}
    before = {path: path.read_bytes() for path in runs.glob("*/samples.jsonl")}
    file = runs.parent / "sweep.yaml"
    values = yaml.safe_load(file.read_text()) | {"budget": [32, 48], "method": ["dense", "streaming_llm"]}
    file.write_text(yaml.safe_dump(values))
    assert call("sweep", file, "--no-report") == 0
    assert {path: path.read_bytes() for path in before} == before
    assert (runs / "streaming_llm-48" / "metrics.json").is_file()
    text = (runs / "report.md").read_text()
    for series in ("oracle b8, all sparse", "oracle b16, layers 0 dense", "p > 0.05", "pass@2 %", "KL to dense"):
        assert series in text
    assert (runs / "accuracy.svg").read_text().lstrip().startswith("<?xml")


def test_every_grade_can_be_explained(runs, capsys):
    rows = [json.loads(line) for line in (runs / "dense" / "samples.jsonl").read_text().splitlines()]
    row = rows[0]
    capsys.readouterr()
    assert call("eval", "show", runs / "dense", row["problem_id"]) == 0
    said = capsys.readouterr().out
    assert f"gold answer: {row['gold']}" in said
    assert "right: 0 of 2 samples" in said
    assert said.count("--- sample") == 2
    assert row["grade_reason"] in said and row["completion"][-100:] in said
    assert call("eval", "show", runs / "dense", "nowhere") == 2
    assert "problem 'nowhere'; it has 6-0-0, 6-0-1, 6-0-2" in capsys.readouterr().err
    assert call("eval", "show", runs / "dense", row["problem_id"], "--sample", 7) == 2
    assert call("eval", "show", runs, row["problem_id"]) == 2
    assert "holds several runs; name one of them: dense, oracle-32-b16" in capsys.readouterr().err


def test_regrade_tells_what_changes(runs, capsys):
    path = runs / "streaming_llm-32" / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0] |= {"completion": rf"\boxed{{ {rows[0]['gold']} }}"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert call("regrade", path.parent, "--processes", 1) == 0
    said = capsys.readouterr().out
    assert "6 samples, 1 changed; accuracy 0.0 % -> 16.7 %" in said
    assert "wrong (None; no boxed answer) -> right" in said
    assert call("regrade", runs, "--dry-run") == 0
    assert "1 changed" not in capsys.readouterr().out
    assert call("regrade", runs / "nowhere") == 2


OURS_AND_SEER = [name for name, figure in FIGURES.items() if not figure.source or SEER in figure.source]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["table2", *(pytest.param(name, marks=pytest.mark.soak) for name in OURS_AND_SEER if name != "table2")]
)
def test_figures_are_drawn(name, tmp_path):
    """On the model that ships, far too small to show anything but that every step works."""
    extra = [] if name == "table2" else ["--problems", 2, "--variables", 8, "--max-new-tokens", 40]
    assert call("figure", name, "--max-steps", 2, *extra, "--out", tmp_path) == 0
    label = name if name.startswith("table") else f"figure-{name}"
    text = (tmp_path / f"{label}.md").read_text()
    assert "| " in text and ("(text.png)" in text) == (name == "trained")
    if not name.startswith("table"):
        assert f"({label}.png)" in text
        assert (tmp_path / f"{label}.png").stat().st_size > 10_000
        assert (tmp_path / f"{label}.svg").is_file()
    if name != "table2":
        assert (tmp_path / "report.html").is_file()
        for config in (tmp_path / "eval").glob("*/config.yaml"):
            assert yaml.safe_load(config.read_text())["generation"]["max_new_tokens"] == 40
    else:
        ours, *theirs = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[4:8]]
        assert ours[0] == "tiny-reasoner" and ours[2] == "2" and int(ours[1].replace(",", "")) > 2 * 2000
        assert [(row[0], row[1], row[4]) for row in theirs] == [
            ("Qwen3-4B, published", "0.4B", "10.9"),
            ("Qwen3-8B, published", "0.4B", "12.2"),
            ("Qwen3-14B, published", "0.4B", "18.6"),
        ]


def test_trained_methods_are_compared_at_equal_budgets_and_at_equal_bytes(tmp_path, monkeypatch):
    """With gates that are given; `test_figures_are_drawn` trains them."""
    figure = FIGURES["trained"]
    monkeypatch.setitem(FIGURES, "trained", replace(figure, real=figure.real | {"budget": [96]}))
    model = support.model()
    support.save(tmp_path / "model")
    for scorer in SCORERS:
        GateBank.for_model(model, GateConfig(8, 16, scorer=scorer)).save_pretrained(tmp_path / scorer)
    gates = ",".join(f"{scorer}={tmp_path / scorer}" for scorer in SCORERS)
    small = ("--task", "chain_sum", "--problems", 2, "--variables", 8, "--max-new-tokens", 60)
    assert call("figure", "trained", "--model", tmp_path / "model", "--gates", gates, *small, "--out", tmp_path) == 0
    results, matched = (tmp_path / "figure-trained.md").read_text().split("\n## ")
    assert "(figure-trained.png)" in results and (tmp_path / "figure-trained.png").stat().st_size > 20_000
    names = [scorer if is_retention(scorer) else f"gate [{scorer}]" for scorer in SCORERS]
    for name in names:
        assert f"| {name}" in results and f"| {name}" in matched
    matches = json.loads((tmp_path / "eval" / "matching-read.json").read_text())["matches"]
    budgets = {m["method"]: m["value"] for m in matches}
    assert budgets.keys() == {"oracle", *names}
    assert budgets["gate [attn_gate]"] > budgets["gate [msa]"], "a key per token leaves less to read"


@pytest.mark.parametrize(
    ("option", "said"), [(("--workers", -1), "workers is -1"), (("--samples", 0), "samples is 0")], ids=str
)
def test_a_figure_is_refused_before_its_gates_are_trained(option, said, tmp_path, capsys):
    assert call("figure", "trained", *option, "--max-steps", 1, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_figure_is_of_answers(tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("[a1] 3 . " * 900)
    task = f"perplexity:length=64:scored=8:data={tmp_path / 'texts.txt'}"
    assert call("figure", "5", "--task", task, "--out", tmp_path / "out") == 2
    assert (
        "the figure 5 compares answers, and 'perplexity" in capsys.readouterr().err and not (tmp_path / "out").exists()
    )


@pytest.mark.soak
def test_gates_of_several_block_sizes_and_several_processes(tmp_path, capfd):
    """What `seergate figure 7 --workers 1` runs; gates come from files, by block size."""
    model, gates = support.model(), {}
    support.save(tmp_path / "model")
    for size in (8, 16):
        bank = GateBank.for_model(model, GateConfig(block_size=size, gate_dim=16))
        gates[size] = str(tmp_path / f"gates-{size}")
        bank.save_pretrained(gates[size])
    values = {"model": str(tmp_path / "model"), "gates": gates, "method": ["dense", "gate"], "block_size": [8, 16]}
    small = {"budget": 32, "task_options": {"problems": 4, "variables": 6}, "max_new_tokens": 40, "workers": 1}
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({**values, **small, "out": str(tmp_path / "runs")}))
    assert call("sweep", file, "--no-report") == 0, capfd.readouterr().err
    for label in ("dense", "gate-32-b8", "gate-32-b16"):
        assert len((tmp_path / "runs" / label / "samples.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--head", 7), "head is 7; layer 1 has 2 KV heads, 0..1"),
        (("--head", -1), "head is -1; layer 1 has 2 KV heads, 0..1"),
        (
            ("--layer", 9),
            "layer is 9; it must be one that has full attention and keys of its own, in this model 0, 1, 2, 3",
        ),
    ],
)
def test_layers_and_heads_that_are_not_there(option, said, tmp_path, capsys):
    assert call("figure", "kept", "--problems", 1, "--variables", 8, *option, "--out", tmp_path) == 2
    found = capsys.readouterr()
    assert found.err.strip() == f"error: {said}" and not found.out, "before anything is answered"


def test_the_layer_that_is_drawn_is_one_that_methods_have(tmp_path):
    """Of a model whose layer 1 has a sliding window, and of one where only layer 0 has none."""
    for types, layer in ((["full_attention", "sliding_attention", "full_attention"], 2), (["full_attention"], 0)):
        place = tmp_path / f"layer{layer}"
        config = {"layer_types": types, "num_hidden_layers": len(types), "vocab_size": len(support.tokenizer())}
        tiny_model("gemma2", **config).save_pretrained(place / "model")
        support.tokenizer().save_pretrained(place / "model")
        small = ("--problems", 1, "--variables", 6, "--max-new-tokens", 20, "--task", "chain_sum")
        options = ("--method", "h2o:interval=8", "--budget", 48, "--out", place)
        assert call("figure", "kept", "--model", place / "model", *small, *options) == 0
        assert f"layer {layer}, KV head 0" in (place / "figure-kept.md").read_text()


def test_what_methods_do_to_one_answer_is_drawn(tmp_path, capsys):
    problem = ["--problems", 1, "--variables", 8, "--max-new-tokens", 60, "--out", tmp_path]
    methods = "raas,raas:block_size=8,h2o:interval=8,lazy_eviction:window=auto:alpha=0.01,rpc:interval=16:window=8"
    assert call("figure", "kept", "--method", methods, "--budget", 48, *problem) == 0
    text = (tmp_path / "figure-kept.md").read_text()
    assert text.count("\n| ") == 1 + 5 + 1
    assert (tmp_path / "figure-kept.png").stat().st_size > 10_000
    assert call("figure", "recurrence", *problem) == 0
    record = json.loads((tmp_path / "figure-recurrence.json").read_text())
    assert len(record["kinds"]) == 4 and sum(record["histogram"].values()) > 100
    for name in ("figure-recurrence", "figure-kinds"):
        assert f"({name}.png)" in (tmp_path / "figure-recurrence.md").read_text()
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert call("figure", "kept", "--method", "kv4bit", *problem) == 2
    assert "'kv4bit' evicts nothing" in capsys.readouterr().err
    assert call("figure", "kept", "--method", "quest", *problem) == 2
    assert call("figure", "recurrence", "--alpha", "2", *problem) == 2


OF_OTHERS = [name for name, figure in FIGURES.items() if figure.source and SEER not in figure.source]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("rpc3", "rpc7") else pytest.mark.soak) for name in OF_OTHERS]
)
def test_figures_of_the_other_papers(name, tmp_path, capsys):
    """With their own settings for the tiny reasoner, on two small problems."""
    assert call("figure", name, "--problems", 2, "--variables", 8, "--out", tmp_path) == 0, capsys.readouterr().err
    (page,) = tmp_path.glob(f"*{name}.md")
    text, look = page.read_text(), LOOKS[FIGURES[name].look]
    assert text.startswith(f"# {FIGURES[name].source} on our runs: ") and "\n| " in text
    assert "Beside the paper's" not in text, "no paper has the tiny reasoner"
    assert (look.draw is None) == (not (tmp_path / f"figure-{name}.png").exists())


@pytest.mark.soak
@pytest.mark.parametrize(("name", "own"), ALIASES.items())
def test_figures_that_have_two_names(name, own, tmp_path):
    small = ("--problems", 1, "--variables", 8, "--max-new-tokens", 60)
    assert call("figure", name, *small, "--out", tmp_path) == 0
    assert (tmp_path / f"figure-{own}.md").is_file()


def specs_of(values, sizes=(64,)):
    plan = SweepPlan.of(values)
    return plan.specs(plan.make_task(), plan.block_size or list(sizes))


def test_every_figure_has_runs_on_tiny_and_real_models_and_a_way_to_be_drawn():
    assert set(FIGURES) < set(NAMES) and {figure.look for figure in FIGURES.values()} == set(LOOKS)
    for name, figure in FIGURES.items():
        for values in ({"block_size": [16], **figure.tiny}, {"budget": [1024], **figure.real}):
            specs = specs_of(values)
            made = [spec.method(None) for spec in specs if not spec.has_gates and not spec.uncalibrated]
            assert len(made) > 0 and specs[0].name == "dense", name


def test_every_number_of_a_paper_belongs_to_a_run():
    labels = {spec.label for figure in FIGURES.values() for spec in specs_of(figure.real)}
    numbers = {label for figure in FIGURES.values() for found in figure.published.values() for label in found}
    assert len(numbers) > 30 and numbers <= labels


def test_the_document_lists_every_figure():
    document = (ROOT / "docs" / "reproduce.md").read_text()
    assert [name for name in NAMES if f"| `{name}` |" not in document] == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"budgets": [1]}, "did you mean 'budget'"),
        ({"budget": ["64"]}, "budget is ['64']; it must be list[int]"),
        ({"dense_layers": ["a"]}, "dense_layers is"),
        ({"method": [3]}, "method is [3]; it must be list[str]"),
        ({"block_size": True}, "block_size is [True]"),
        ({"task_options": {"problems": "x"}}, "the task's problems is 'x'; it must be an integer"),
        ({"task_options": {"seed": True}}, "the task's seed is True; it must be an integer"),
        ({"task_options": ["x"]}, "task_options is ['x']; it must be dict"),
        ({"workers": "x"}, "workers is 'x'; it must be int"),
        ({"workers": None}, "workers is None; it must be int"),
        ({"samples": 1.5}, "samples is 1.5; it must be int | None"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be float | int | None"),
        ({"measure_recall": 1}, "measure_recall is 1; it must be bool"),
        ({"gates": {"eight": 3}}, "gates is {'eight': 3}; it must be str | dict[int | str, str] | None"),
        ({"method": []}, "method is empty; it must name at least one method"),
        ({"threshold": "1e-2"}, "threshold is ['1e-2']; it must be list[float | int]"),
    ],
)
def test_mistakes_in_a_sweep_are_told(values, said, tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(values))
    assert call("sweep", file) == 2
    assert said in capsys.readouterr().err
    assert call("sweep", tmp_path / "none.yaml") == 2
    file.write_text("[")
    assert call("sweep", file) == 2


def test_a_name_that_is_given_twice_in_a_sweep_is_told(tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    file.write_text("budget: 32\nmethod: dense\nbudget: 64\n")
    assert call("sweep", file) == 2
    assert "line 3, column 1 is not YAML: 'budget' is given again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("5", "--budget", 32), "the figure 5 does not take --budget, which is for kept and recurrence"),
        (("table2", "--max-new-tokens", 9), "the figure table2 does not take --max-new-tokens"),
        (("kept", "--alpha", 0.1), "the figure kept does not take --alpha, which is for recurrence"),
        (("recurrence", "--head", 0), "the figure recurrence does not take --head, which is for kept"),
        (("5", "--problems", 0), "problems is 0"),
    ],
)
def test_a_figure_ignores_nothing_that_it_is_given(arguments, said, tmp_path, capsys):
    assert call("figure", *arguments, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_figure_of_runs_that_cannot_be_compared_says_why(tmp_path):
    for name, grader in (("dense", "digit"), ("gate", "exact")):
        task = {"name": "chain_sum", "n_problems": 20, "chance": 0.1, "contents": "c", "grader": grader}
        write_run(tmp_path / "eval", name, None if name == "dense" else 64, lambda i: True, task=task)
    with pytest.raises(ValueError, match="task.grader is 'digit' and 'exact'.*seergate regrade .*eval --grader NAME"):
        _write("5", tmp_path, "figure-5")


def test_single_values_stand_for_lists():
    plan = SweepPlan.of({"budget": 64, "method": "dense", "dense_layers": [0, 1]})
    assert (plan.budget, plan.method, plan.dense_layers) == ([64], ["dense"], [(0, 1)])
    plan = SweepPlan.of({"temperature": 1, "samples": None, "gates": {8: "there"}, "task_options": {"problems": 3}})
    assert (plan.temperature, plan.samples, plan.gates, len(plan.make_task().problems())) == (1, None, {8: "there"}, 3)


def test_gates_and_block_sizes_must_agree():
    plan = SweepPlan(block_size=[8, 32], budget=[64])
    with pytest.raises(ValueError, match="block_size is 32, but these gates have 8"):
        plan.specs(plan.make_task(), [8])
    labels = [spec.label for spec in plan.specs(plan.make_task(), [8, 32])]
    assert labels == ["dense", "gate-64-b8", "gate-64-b32"]


def test_methods_with_gates_run_with_each_that_has_their_block_size(capsys):
    model = support.model()
    banks = {name: GateBank.for_model(model, GateConfig(size, 16)) for name, size in (("a", 8), ("b", 8), (16, 16))}
    specs = with_each(grid(["dense", "gate", "h2o:interval=8"], [64], [8, 16]), banks)
    assert [spec.label for spec in specs] == [
        "dense", "gate-64-b8-a", "gate-64-b8-b", "gate-64-b16", "h2o-64-interval=8",
    ]  # fmt: skip
    assert [spec.bank(banks) for spec in specs[1:4]] == list(banks.values())
    assert with_each(grid(["gate"], [64], 8), {"a": banks["a"]})[0] == replace(specs[1], named_block_size=False)
    assert [spec.title for spec in specs] == ["dense", "gate [a]", "gate [b]", "gate", "h2o"]
    (_, own) = with_each(grid(["gate"], [64], 8), named := {"b": banks["b"], "gate": banks["a"]})
    assert (own.label, own.title) == ("gate-64", "gate") and own.bank(named) is banks["a"]
    with pytest.raises(ValueError, match=r"gates are named 'a/b'; a name must be of letters, digits and _ . -"):
        with_each(specs, {"a/b": banks["a"]})
    assert named_gates("runs/lr=0.01/gates") == "runs/lr=0.01/gates", "a path, no name"
    for text in ("a=here,a=there", "a=here,there", "=here"):
        assert call("eval", "--gates", text) == 2
        assert f"{text!r} must be DIR, or NAME=DIR,NAME=DIR with different names" in capsys.readouterr().err


def test_gates_that_no_method_decodes_with_decide_no_block_size(tmp_path):
    task = make_task("chain_sum", problems=1, variables=6)

    def sizes(*methods):
        return [spec.block_size for spec in SweepPlan(method=["dense", *methods], budget=[64]).specs(task, [8])[1:]]

    assert sizes("quest", "h2o") == [64, None] and sizes("quest", "gate") == [8, 8]
    assert sizes("quest", "trim_kv")[0] == 64, "those of trim_kv have no blocks"
    support.save(tmp_path / "model")
    GateBank.for_model(support.model(), GateConfig(16, 16, scorer="trim_kv")).save_pretrained(tmp_path / "gates")
    GateBank.for_model(support.model(), GateConfig(8, 16)).save_pretrained(tmp_path / "model" / "gates")
    small = (
        "--model",
        tmp_path / "model",
        "--task",
        "chain_sum",
        "--problems",
        1,
        "--variables",
        6,
        "--max-new-tokens",
        8,
    )
    small += ("--budget", 128)
    for out, *asked in (("no", "quest"), ("trim", "quest,trim_kv", "--gates", tmp_path / "gates")):
        assert call("eval", *small, "--method", *asked, "--out", tmp_path / out, "--no-report") == 0
        found = yaml.safe_load((tmp_path / out / "quest-128" / "config.yaml").read_text())
        assert found["method"]["block_size"] == 64, "those of trim_kv score tokens"


def test_what_is_given_twice_runs_once():
    labels = [spec.label for spec in grid(["quest"], [64, 64], [8, 8], [(0,), (0,)])]
    assert labels == ["quest-64-dense0"]


def test_labels_are_what_they_were_for_one_block_size():
    specs = grid(["quest", "dense"], [64], 16)
    assert [spec.label for spec in specs] == ["dense", "quest-64"]
    assert grid(["quest"], [64], 16, (0, 1))[0].label == "quest-64-dense0,1"
