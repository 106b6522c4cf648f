import json
from dataclasses import replace

import pytest
import yaml
from PIL import Image

from seergate import GateBank, GateConfig, SeergateError
from seergate.eval import Limit, MethodSpec, RunOptions, evaluate, make_task, store, sweep
from seergate.eval.regrade import regrade
from seergate.eval.report import write_report
from seergate.eval.runner import encoded_prompts
from seergate.eval.settings import grid, with_each
from seergate.eval.store import read_samples
from tests.support import evaluation as support
from tests.support import killed_run
from tests.support.evaluation import edit_samples
from tests.support.killed_run import compared
from tests.support.models import tiny_model
from tests.support.running import invalid, refused

FIELDS = {"task", "problem_id", "sample_idx", "seed", "prompt", "completion", "n_tokens", "finish_reason", "pred"}
FIELDS |= {"gold", "correct", "density"}


def small(out, spec=None, *, model=None, tokenizer=None, task=None, **options):
    task = task or make_task("chain_sum", problems=4, variables=5)
    made = model or support.model(), tokenizer or support.tokenizer()
    given = RunOptions(**{"max_new_tokens": 36, "batch_size": 2, **options})
    return evaluate(*made, task, spec or MethodSpec("dense"), out, given)


def test_a_run_directory_holds_what_it_should(tmp_path):
    metrics = small(tmp_path, MethodSpec("oracle", 32, 16))
    rows = read_samples(tmp_path)
    assert len(rows) == 4 and all(set(row) >= FIELDS and 0 < row["density"] < 1 for row in rows)
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    expected_metrics = {"truncation_rate": 1.0, "mean_tokens": 36, "max_tokens": 36, "n_problems": 4}
    assert expected_metrics.items() <= metrics.items()
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert {"name": "oracle", "token_budget": 32, "block_size": 16}.items() <= config["method"].items()
    assert config["generation"]["max_new_tokens"] == 36
    assert {"torch", "transformers", "git", "hardware"} <= set(config["environment"])


def test_reasoning_that_was_cut_is_no_answer(tmp_path):
    tokenizer = support.tokenizer()
    task = replace(make_task("chain_sum", problems=2, variables=5), grader="contains")
    assert small(tmp_path / "plain", task=task)["unanswered_rate"] == 0
    tokenizer.chat_template += "<think>\n"
    assert small(tmp_path / "opened", tokenizer=tokenizer, task=task)["unanswered_rate"] == 1
    assert regrade(tmp_path / "opened").changed == []
    edit_samples(tmp_path / "opened", lambda rows: [row | {"completion": f"</think> {row['gold']}"} for row in rows])
    assert regrade(tmp_path / "opened").after == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [1, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])], ids=["short", "storm"]
)
def test_killed_at_random_moments_a_run_ends_as_if_it_had_not_been(tmp_path, kills):
    """SIGKILL again and again, from before the first import to the last sample; then to the end."""
    met = killed_run.storm(str(support.save(tmp_path / "model")), tmp_path, kills)
    assert met["before"] + met["between"] == kills


def test_a_finished_run_is_not_generated_again(tmp_path):
    first = small(tmp_path)
    before = (tmp_path / "samples.jsonl").read_bytes()
    calls = []
    assert compared(small(tmp_path, on_progress=calls.append)) == compared(first)
    assert (tmp_path / "samples.jsonl").read_bytes() == before and calls == []
    edit_samples(tmp_path, lambda rows: rows[::-1])
    assert compared(small(tmp_path)) == compared(first)
    with store.SampleLog(tmp_path), pytest.raises(SeergateError, match="another process"):
        small(tmp_path)


def test_the_limits_of_a_task_and_of_the_caller(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a1 1 a2 2", "answer": "3"}\n')
    task = make_task(str(path), grader="exact")
    assert str(RunOptions().limit(task)) == "at most 32768 tokens, prompt included"
    assert str(RunOptions(max_new_tokens=7).limit(task)) == "at most 7 new tokens"
    out = tmp_path / "run"
    metrics = small(out, task=task, max_new_tokens=None, max_total_tokens=9)
    assert (metrics["mean_prompt_tokens"], metrics["mean_tokens"]) == (4, 5)
    config = yaml.safe_load((out / "config.yaml").read_text())["generation"]
    assert (config["max_new_tokens"], config["max_total_tokens"]) == (None, 9)
    refused("leaves no room for an answer", small, tmp_path / "x", task=task, max_new_tokens=None, max_total_tokens=4)


def test_the_limits_of_the_model(tmp_path):
    """A task's own limit is cut to them; what the caller asks for beyond them is refused, and so is a long prompt."""
    path, tokenizer = tmp_path / "mine.jsonl", support.tokenizer()
    path.write_text('{"prompt": "a1 1 a2 2", "answer": "3"}\n')
    task = make_task(str(path), grader="exact")
    text = tiny_model("qwen3", max_position_embeddings=16).config

    def limit(**options):
        return encoded_prompts(tokenizer, task.problems(), task, RunOptions(**options), text)[1]

    assert limit() == Limit(None, 16)
    assert limit(max_new_tokens=12) == Limit(12)
    assert limit(max_new_tokens=13, max_total_tokens=16) == Limit(13, 16)
    for options in ({"max_new_tokens": 13}, {"max_total_tokens": 17}):
        refused("longest prompt has 4: the model has 16 positions", limit, **options)
    fresh = replace(task, max_total_tokens=None, max_new_tokens=12)
    assert [RunOptions().limit_of(fresh, text, n) for n in (4, 5)] == [Limit(12), Limit(12, 16)]
    path.write_text(json.dumps({"prompt": "a1 " * 17, "answer": "3"}))
    refused("the prompt of problem 1 has 17 tokens; the model has 16 positions", limit)
    text.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    refused("has 17 tokens; the model's dynamic RoPE has other frequencies beyond 16", limit)


def test_regrading_changes_grades_only(tmp_path):
    small(tmp_path)
    texts = ["\\boxed{ 5 }", "\\boxed{ 5 }", "5", "\\boxed{5.0}"]
    edit_samples(tmp_path, lambda rows: [row | {"completion": texts.pop(0), "gold": "5"} for row in rows])
    path, rows = tmp_path / "samples.jsonl", read_samples(tmp_path)
    before = path.read_bytes()
    dry = regrade(tmp_path, dry_run=True)
    assert (dry.before, dry.after, len(dry.changed)) == (0.0, 0.5, 3)  # the bare 5 was wrong and stays it
    assert path.read_bytes() == before
    regrade(tmp_path)
    graded = read_samples(tmp_path)
    assert [row["correct"] for row in graded] == [True, True, False, False]
    assert [row["completion"] for row in graded] == [row["completion"] for row in rows]
    assert json.loads((tmp_path / "metrics.json").read_text())["accuracy"] == 0.5
    assert regrade(tmp_path).changed == []
    for grader, message in (
        ("maths", "no grader 'maths'"),
        ("program", "is for humaneval only; .* is of chain_sum"),
        ("letter", "the answer '5' must be one capital letter for the grader 'letter'"),
    ):
        refused(message, regrade, tmp_path, grader=grader)
    for name, old, new, message in (
        ("samples.jsonl", '"gold"', '"glod"', "a sample without 'gold'"),
        ("config.yaml", "grader:", "grad:", "has no task.grader"),
    ):
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text(whole.replace(old, new))
        refused(message, regrade, tmp_path)
        (tmp_path / name).write_text(whole)


@pytest.mark.parametrize("end", [b"", b'\n{"task": "chain_s'], ids=["no newline", "cut short"])
def test_a_dry_run_writes_nothing_and_whole_lines_are_kept(tmp_path, end):
    """Neither what an editor left without its newline, nor what a kill left, is touched; a real run mends both."""
    small(tmp_path)
    path = tmp_path / "samples.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + end)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert regrade(tmp_path, dry_run=True).total == 4
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    with store.SampleLog(tmp_path):
        assert path.read_bytes() == whole


def test_a_run_that_was_regraded_says_by_what_and_is_not_continued_otherwise(tmp_path):
    small(tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    edit_samples(tmp_path, lambda rows: [row | {"gold": "A"} for row in rows[:2]])
    refused(r"problem \S+: the answer 'A' must be a number", regrade, tmp_path, grader="number")
    regrade(tmp_path, grader="letter", dry_run=True)
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert regrade(tmp_path, grader="letter").changed == []  # and yet the next sample would be graded otherwise
    refused(r"other settings: task\.grader was 'letter' and is 'digit'", small, tmp_path)
    regrade(tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["task"]["grader"] == "letter", "its own by now"
    regrade(tmp_path, grader="math")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["environment"]["math-verify"]
    regrade(tmp_path, grader="digit")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == yaml.safe_load(before)
    assert small(tmp_path)["n_samples"] == 4


@pytest.mark.parametrize("killed", [False, True])
def test_regrading_that_fails_is_to_be_repeated(tmp_path, monkeypatch, killed):
    """And the run belongs to no grader until then, as its samples may have grades of either."""
    small(tmp_path)
    edit_samples(tmp_path, lambda rows: [row | {"completion": "\\boxed{5}", "gold": "5"} for row in rows])
    write = store.write_text

    def full(path, text):
        if path.name == "samples.jsonl":
            raise KeyboardInterrupt if killed else OSError(28, "No space left on device", str(path))
        write(path, text)

    error, said = (KeyboardInterrupt, None) if killed else (SeergateError, r"in part: .*No space.*; repeat the comm")
    with monkeypatch.context() as patch, pytest.raises(error, match=said):
        patch.setattr(store, "write_text", full)
        regrade(tmp_path, grader="exact")
    for grader in ("digit", "exact"):
        task = replace(make_task("chain_sum", problems=4, variables=5), grader=grader)
        refused(r"task\.regrading was 'cut short", small, tmp_path, task=task)
    regrade(tmp_path)
    task = yaml.safe_load((tmp_path / "config.yaml").read_text())["task"]
    assert (task["grader"], "regrading" in task) == ("exact", False)
    assert all(row["correct"] for row in read_samples(tmp_path))


def test_damage_is_told(tmp_path):
    small(tmp_path)
    path = tmp_path / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for second, third, message in (
        ("rubbish\n", lines[1], "line 2 is damaged"),
        (lines[1], lines[0], "line 3 repeats"),
        ("[" * 100_000 + "\n", lines[2], "line 2 is damaged"),
        (lines[1].replace('"seconds"', '"s"'), lines[2], "'seconds'"),
    ):
        path.write_text(lines[0] + second + third)
        refused(message, small, tmp_path)


@pytest.mark.slow
def test_sweep_measures_recall_on_one_set_of_contexts(tmp_path):
    task = make_task("chain_sum", problems=3, variables=8)
    specs = grid(["random", "dense", "oracle", "streaming_llm"], [48, 4096], 16)
    assert specs[0].label == "dense"
    options = RunOptions(max_new_tokens=64, batch_size=3, measure_recall=True, model_name="some/model")
    results = sweep(support.model(), support.tokenizer(), task, specs, tmp_path, options)
    covering = {f"{name}-4096" for name in ("random", "oracle", "streaming_llm")}
    assert set(results) == {"dense", "random-48", "oracle-48", "streaming_llm-48", *covering}
    dense, random, oracle = (results[label] for label in ("dense", "random-48", "oracle-48"))
    assert random["recall"] < oracle["recall"] < 1 and len(oracle["recall_per_layer"]) == 2
    assert results["oracle-4096"]["recall"] == results["random-4096"]["recall"] == pytest.approx(1.0)
    assert dense["recall"] is None and dense["agreement"] == 1.0
    whole = [dense["next_token_kl"], results["random-4096"]["next_token_kl"]]
    assert whole == pytest.approx([0.0, 0.0], abs=1e-5)
    assert 0 < oracle["next_token_kl"] < random["next_token_kl"]
    assert results["streaming_llm-48"]["next_token_kl"] > 1e-3  # measured for what evicts, too
    assert random["dense_perplexity"] == pytest.approx(dense["perplexity"])
    assert random["perplexity"] > dense["perplexity"]  # greedy text is what dense expects
    answers = {label: {s["problem_id"]: s["completion"] for s in read_samples(tmp_path / label)} for label in results}
    same = {label for label, completions in answers.items() if completions == answers["dense"]}
    assert covering < same and "random-48" not in same, "a budget that covers everything changes nothing"
    report = write_report(str(tmp_path))
    text = report.markdown.read_text()
    assert {plot.name for plot in report.plots} == {"accuracy.png", "bytes.png", "length.png", "recall.png"}
    for plot in report.plots:
        with Image.open(plot) as image:
            assert image.width > 800 and len(image.convert("RGB").getcolors(maxcolors=10**7)) > 20
        assert f"({plot.name})" in text
    for metrics in (oracle, random):
        assert f"{100 * metrics['recall']:.1f}" in text and f"{metrics['bytes_read_per_step'] / 1000:.1f}" in text
    assert "some/model" in text


@pytest.mark.slow
def test_settings_that_come_later_are_measured_on_the_same_contexts(tmp_path):
    """And what was measured on others is measured anew."""

    def run(*names):
        task = make_task("chain_sum", problems=2, variables=8)
        options = RunOptions(max_new_tokens=40, batch_size=2, measure_recall=True)
        specs = grid(list(names), [32], 16)
        sweep(support.model(), support.tokenizer(), task, specs, tmp_path, options)
        return [json.loads((tmp_path / spec.label / "proxies.json").read_text()) for spec in specs]

    dense, oracle = run("dense", "oracle")
    assert oracle["reference"] == dense["reference"] == "dense"
    assert oracle["contexts"] == dense["contexts"]
    assert oracle["dense_perplexity"] == pytest.approx(dense["perplexity"])
    path = tmp_path / "oracle-32" / "proxies.json"
    before = path.stat().st_mtime_ns
    assert run("dense", "oracle", "random")[:2] == [dense, oracle]
    assert path.stat().st_mtime_ns == before
    path.write_text(json.dumps(oracle | {"contexts": "others", "next_token_kl": 9.0}))
    assert run("dense", "oracle") == [dense, oracle]


@pytest.mark.parametrize(("method", "scorer"), [("gate", "attn_gate"), ("trim_kv", "trim_kv")])
def test_a_run_goes_on_when_its_gates_are_given_a_name(method, scorer, tmp_path):
    """The method's own name changes nothing; under another it goes on once its directory has that name too."""
    bank = GateBank.for_model(support.model(), GateConfig(8, 16, scorer=scorer))
    arguments = support.model(), support.tokenizer(), make_task("chain_sum", problems=1, variables=5)
    specs, options = grid([method], [32], 8), RunOptions(max_new_tokens=4)
    made = sweep(*arguments, specs, tmp_path, options, gates=bank)
    own, other = {method: bank}, {"a": bank}
    assert sweep(*arguments, with_each(specs, own), tmp_path, options, gates=own) == made
    (tmp_path / f"{method}-32").rename(tmp_path / f"{method}-32-a")
    assert [*sweep(*arguments, with_each(specs, other), tmp_path, options, gates=other).values()] == [*made.values()]


def test_settings_are_checked_before_work(tmp_path):
    task = make_task("chain_sum", problems=1, variables=5)
    arguments = (support.model(), support.tokenizer(), task)
    twins = dict.fromkeys("ab", GateBank.for_model(support.model(), GateConfig(8, 16)))
    workers = {"loader": lambda: None, "ray_address": "auto"}
    for specs, options, given, message in (
        ([MethodSpec("gate", 64)], {}, {}, "needs gates"),
        ([MethodSpec("quest", 8, 16)], {}, {}, "token_budget is 8"),
        ([MethodSpec("dense"), MethodSpec("dense")], {}, {}, "given twice"),
        (grid(["quest", "quest:block_size=8"], [32], 8), {}, {}, "32' and 'quest-32-block_size=8' mean the same"),
        (with_each(grid(["gate"], [32], 8), twins), {}, {"gates": twins}, "gate-32-a' and 'gate-32-b' mean the same"),
        ([MethodSpec("dense")], {"engine": "vllm"}, workers, "'vllm', a server, which generates without workers"),
        (grid(["oracle"], [32], 8), {"measure_recall": True}, {}, "measure_recall needs dense among the methods"),
    ):
        invalid(message, sweep, *arguments, specs, tmp_path / "out", RunOptions(**options), **given)
    assert not (tmp_path / "out").exists()
    refused("training mode; call model.eval", small, tmp_path / "out", model=support.model().train(), task=task)
    assert not (tmp_path / "out").exists()
    invalid("batch_size is 0", evaluate, *arguments, MethodSpec("dense"), tmp_path / "out", RunOptions(batch_size=0))
