"""The adapters to lm-eval and lighteval, and their example tasks; where a harness is installed, it runs them."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from seergate.errors import SeergateError
from seergate.eval import lighteval_adapter, lm_eval_adapter, make_task
from seergate.eval.lm_eval_adapter import add_model_arguments, attached_model, method_spec
from seergate.methods import H2O
from tests.eval import support

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return parser.parse_args(["--model", "somewhere", *arguments])


def test_a_method_is_given_as_to_seergate_eval():
    method = method_spec(options("--method", "h2o:interval=16", "--budget", "64")).method(None)
    assert isinstance(method, H2O)
    assert (method.token_budget, method.interval) == (64, 16)
    spec = method_spec(options("--method", "quest:token_budget=96:dense_layers=0+1", "--block-size", "8"))
    assert (spec.token_budget, spec.method(None).block_size, spec.method(None).dense_layers) == (96, 8, (0, 1))
    assert spec.label != method_spec(options("--method", "quest", "--budget", "96")).label
    assert method_spec(options()).label == "dense"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "h2o"), "'h2o' needs a token budget"),
        (("--method", "h2o:intervall=16", "--budget", "64"), "no option 'intervall'"),
        (("--method", "h3o", "--budget", "64"), "there is no method 'h3o'"),
        (("--method", "lazy_eviction:window=auto", "--budget", "64"), "window=auto is calibrated by"),
        (("--method", "gate", "--budget", "64"), "needs gates"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(arguments, said):
    with pytest.raises(SeergateError, match=said):
        attached_model(options(*arguments))


@pytest.mark.parametrize("adapter", [lm_eval_adapter, lighteval_adapter])
def test_the_documented_command_names_files_that_exist(adapter):
    words = (adapter.__doc__ or "").split()
    named = [word for word in words if word.startswith("docs/")]
    assert named and all((ROOT / word).exists() for word in named)
    said = (ROOT / "docs" / "evaluation.md").read_text()
    assert f"python -m {adapter.__name__}" in said and all(word in said for word in named)


def test_the_examples_have_true_answers():
    problems = make_task("chain_sum", problems=8, variables=12, seed=1).problems()
    rows = [json.loads(line) for line in (EXAMPLES / "chain_sum" / "test.jsonl").read_text().splitlines()]
    assert [(row["id"], row["answer"]) for row in rows] == [(p.problem_id, p.gold) for p in problems]
    assert [row["question"] for row in rows] == [p.messages[0]["content"] for p in problems]


def test_the_example_of_lm_eval_grades_the_last_box():
    path = EXAMPLES / "lm_eval" / "grading.py"
    module_spec = importlib.util.spec_from_file_location("example_grading", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    for text, right in ((r"\boxed{ 3 }", 1.0), (r"\boxed{ 3 } \boxed{ 4 }", 0.0), ("3", 0.0)):
        assert module.process_results({"answer": "3"}, [text]) == {"accuracy": right}


@pytest.mark.slow
def test_the_example_of_lm_eval_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(ROOT)
    model = str(support.save(tmp_path / "model"))
    task = ["--tasks", "seergate_chain_sum", "--include-path", "docs/examples/lm_eval", "--limit", "2"]
    lm_eval_adapter.main(["--model", model, "--method", "h2o:interval=16", "--budget", "64", *task])
    text = capsys.readouterr().out
    found = json.loads(text[text.index("{\n") :])
    assert found["seergate_chain_sum"]["accuracy,none"] == 0.0  # random weights
    assert found["seergate_chain_sum"]["sample_len"] == 2


@pytest.mark.slow
@pytest.mark.hub  # lighteval downloads a file when it lists its tasks
def test_the_example_of_lighteval_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lighteval")
    monkeypatch.chdir(ROOT)
    model = str(support.save(tmp_path / "model"))
    task = ["--tasks", "seergate_chain_sum|0", "--custom-tasks", "docs/examples/lighteval/chain_sum.py"]
    task += ["--limit", "2", "--out", str(tmp_path / "out")]
    lighteval_adapter.main(["--model", model, "--method", "h2o:interval=16", "--budget", "64", *task])
    text = capsys.readouterr().out
    assert json.loads(text[text.index("{\n") :])["all"]["accuracy"] == 0.0  # random weights
