"""The adapter to lm-eval and its example task; where lm-eval is installed, it runs."""

import json
import runpy
import sys

import pytest
import torch
import yaml

import seergate
from seergate.eval import make_task
from seergate.eval.harness import likelihoods
from seergate.eval.settings import method_spec
from seergate.methods import H2O
from seergate.models.attach import handle_of
from seergate.models.names import TINY_GATES, TINY_MODEL
from tests.support import evaluation as support
from tests.support.running import ROOT, refused

EXAMPLES = ROOT / "docs" / "examples"


def test_a_method_is_given_as_to_seergate_eval():
    assert method_spec("h2o:interval=16", 64).method(None) == H2O(token_budget=64, interval=16)
    spec = method_spec("quest:token_budget=96:dense_layers=0+1", block_size=8)
    assert (spec.token_budget, spec.method(None).block_size, spec.method(None).dense_layers) == (96, 8, (0, 1))
    assert spec.label != method_spec("quest", 96).label
    assert method_spec("dense").label == "dense"
    for given, message in (
        (("h2o",), "'h2o' needs a token budget"),
        (("lazy_eviction:window=auto", 64), "window=auto is not calibrated here"),
        (("quest:budget_share=0.1", 128), "budget is 128; 'quest:budget_share=0.1' already sets how much is read"),
        (("rpc", 128), "budget is 128; 'rpc' takes no token budget"),
        (("raas", 128, 32), "block_size is 32; write raas:block_size=32"),
    ):
        refused(message, method_spec, *given)


def test_the_documented_command_names_files_that_exist():
    words = (ROOT / "seergate" / "eval" / "lm_eval_adapter.py").read_text().split()
    named = [word for word in words if word.startswith("docs/")]
    assert named and all((ROOT / word).exists() for word in named)
    documentation = (ROOT / "docs" / "harnesses.md").read_text()
    assert "python -m seergate.eval.lm_eval_adapter" in documentation and all(word in documentation for word in named)


def test_the_examples_have_true_answers():
    problems = make_task("chain_sum", problems=8, variables=12, seed=1).problems()
    rows = [json.loads(line) for line in (EXAMPLES / "chain_sum" / "test.jsonl").read_text().splitlines()]
    assert [(row["id"], row["answer"]) for row in rows] == [(p.problem_id, p.gold) for p in problems]
    assert [row["question"] for row in rows] == [p.messages[0]["content"] for p in problems]


def test_the_example_of_lm_eval_grades_the_last_box():
    process_results = runpy.run_path(str(EXAMPLES / "lm_eval" / "grading.py"))["process_results"]
    for text, right in ((r"\boxed{ 3 }", 1.0), (r"\boxed{ 3 } \boxed{ 4 }", 0.0), ("3", 0.0)):
        assert process_results({"answer": "3"}, [text]) == {"accuracy": right}


PAIRS = [
    (list(range(4, 44)), [7, 8, 9]),
    (list(range(30, 90)), [5]),
    ([6], list(range(4, 60))),
    ([9], [4, 3]),
    (list(range(10, 13)), list(range(4, 40))),
]


@pytest.mark.parametrize("method", ["quest", "h2o"])
def test_continuations_are_decoded_behind_the_last_token_of_their_context(method):
    model = support.model()
    with seergate.attached(model, method_spec(method, 16, 8 if method == "quest" else None).method(None)) as handle:
        answers = {number: answer for number, *answer in likelihoods(model, PAIRS)}
        assert handle.stats()["steps"] > 0 and handle.stats()["density"] < 1
        for number, (context, continuation) in enumerate(PAIRS):
            ids = torch.tensor([[*context, *continuation]])
            start = max(1, len(context) - 1)
            scores = seergate.score(model, ids, start=start, logits=True)
            log_probs = scores.log_probs[0, len(context) - start :]
            assert answers[number][0] == pytest.approx(float(log_probs.sum()), abs=1e-4)
            chosen = scores.logits[0, len(context) - start :].argmax(-1).tolist()
            assert answers[number][1] == (chosen == continuation)
        together = {number: answer for number, *answer in likelihoods(model, PAIRS, 4)}
    for number, (value, greedy) in answers.items():
        assert together[number] == [pytest.approx(value, abs=1e-4), greedy]
    dense = {number: value for number, value, _ in likelihoods(model, PAIRS)}
    assert all(abs(dense[i] - answers[i][0]) > 1e-3 for i in (0, 1, 2, 4)), "beyond the budget the method shows"
    assert dense[3] == pytest.approx(answers[3][0], abs=1e-4), "within it, it reads all"


def test_a_continuation_that_is_the_most_probable_one_is_told():
    model = support.model()
    context = list(range(4, 30))
    written = model.generate(torch.tensor([context]), max_new_tokens=3, do_sample=False)[0, len(context) :].tolist()
    answers = likelihoods(model, [(context, written), (context, [*written[:2], written[2] + 1])], 2)
    assert [greedy for _, _, greedy in sorted(answers)] == [True, False]


def test_the_example_of_lm_eval_runs(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(ROOT)
    given = f"pretrained={support.save(tmp_path / 'model')},method=h2o:interval=16,budget=64"
    command = ["lm-eval", "run", "--model", "seergate", "--model_args", given, "--limit", "2", "--apply_chat_template"]
    command += ["--tasks", "seergate_chain_sum", "--include_path", "docs/examples/lm_eval"]
    monkeypatch.setattr(sys, "argv", [*command, "--output_path", str(tmp_path / "out")])
    runpy.run_module("seergate.eval.lm_eval_adapter", run_name="__main__")
    (kept,) = (tmp_path / "out").rglob("results_*.json")
    metrics = json.loads(kept.read_text())["results"]["seergate_chain_sum"]
    assert metrics["accuracy,none"] == 0.0 and metrics["sample_len"] == 2  # random weights


def scored_task(folder, name, kind, **more):
    words = support.tokenizer().convert_ids_to_tokens(list(range(10, 40)))
    rows = [{"text": " ".join(words[i:] * 4), "choices": [words[i], words[i + 1]], "label": 1} for i in range(4)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": str(folder / f"{name}.jsonl")}}
    task |= {"test_split": "train", "output_type": kind, "metadata": {"version": 1.0}, **more}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def test_scored_tasks_of_lm_eval_are_decoded_sparsely(tmp_path, monkeypatch):
    """Dense attention gives what the harness's own model gives; a method gives something else."""
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import model_registry
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.delitem(model_registry._objs, "seergate", raising=False)  # of the module that ran as a program
    from seergate.eval.lm_eval_adapter import SeergateLM

    task_fields = {"doc_to_text": "{{text}}", "doc_to_choice": "choices", "doc_to_target": "label"}
    scored_task(tmp_path, "choices", "multiple_choice", **task_fields)
    scored_task(tmp_path, "rolling", "loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")
    model = str(support.save(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)

    def evaluated(harness_model):
        tasks = TaskManager(include_path=str(tmp_path))
        results = simple_evaluate(harness_model, tasks=["choices", "rolling"], task_manager=tasks, bootstrap_iters=0)
        chosen = [[float(answer[0]) for answer in each["filtered_resps"]] for each in results["samples"]["choices"]]
        return chosen, results["results"]["rolling"]["word_perplexity,none"]

    for options, why in (
        ({"peft": "a"}, "'peft' has no effect"),
        ({"bugdet": 7}, "'bugdet' has no effect.*budget"),
        ({"budget": 64}, "budget is 64, which has no effect on the method 'dense'"),
        (
            {"method": "quest", "budget": 64, "gates": TINY_GATES},
            "gates is .*, which has no effect on the method 'quest'",
        ),
        (
            {"budget": 64, "gates": TINY_GATES, "block_size": 32},
            "block_size is 32, which has no effect on the method 'gate'",
        ),
    ):
        refused(why, SeergateLM, model, **options)
    beside = SeergateLM(TINY_MODEL, budget=64)
    assert handle_of(beside.model).method.name == "gate", "in gates/ of the model's directory"
    with monkeypatch.context() as several:
        several.setenv("WORLD_SIZE", "2")
        refused("runs in one process", SeergateLM, model)
    short = SeergateLM(model, method="dense", max_length=8)
    refused("a continuation has 9 tokens", short._loglikelihood_tokens, [(None, [4], list(range(9)))])
    theirs = evaluated(HFLM(pretrained=model, device="cpu"))
    dense = evaluated(SeergateLM(model, method="dense"))
    torch.testing.assert_close(torch.tensor(dense[0]), torch.tensor(theirs[0]), atol=1e-4, rtol=1e-4)
    assert dense[1] == pytest.approx(theirs[1], rel=1e-4)
    mixed = SeergateLM(model, method="dense", mixed_precision_dtype="bfloat16")
    one = ("", ""), [4, 5, 6], [7, 8]
    rounded, exact = (x._loglikelihood_tokens([one])[0][0] for x in (mixed, SeergateLM(model, method="dense")))
    assert 1e-5 < abs(rounded - exact) < 0.1
    sparse = evaluated(SeergateLM(model, method="quest", budget=16, block_size=8, batch_size=2))
    assert (torch.tensor(sparse[0]) - torch.tensor(dense[0])).abs().min() > 1e-3
    assert abs(sparse[1] / dense[1] - 1) > 1e-4
