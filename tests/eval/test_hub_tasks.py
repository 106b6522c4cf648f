"""Hub tasks on local files with the Hub's columns."""

import json
import os
from collections import Counter

import datasets
import pytest
import yaml
from huggingface_hub import constants

from seergate.eval import MethodSpec, RunOptions, Sampling, evaluate, make_task
from seergate.eval.tasks.hub_tasks import HUB_TASKS
from tests.support import evaluation as support
from tests.support.running import invalid, refused


def write(path, records):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(records).to_csv(path)
    else:
        datasets.Dataset.from_list(records).to_parquet(path)
    return str(path)


AIME = [{"id": 60, "problem": "Find $n$.", "answer": "025"}, {"id": 61, "problem": "Find $m$.", "answer": "204"}]
MATH = [{"unique_id": "test/algebra/1.json", "problem": "1/2?", "answer": r"\frac{1}{2}", "solution": "s"}]
GSM8K = [{"question": "How many?", "answer": "He has 2 * 600 = 1200.\n#### 1,200"}]
GPQA = [
    {"Record ID": f"rec{i}", "Question": f"Which one, {i}?\n", "Correct Answer": f"right {i}\n"}
    | {f"Incorrect Answer {k}": f" wrong {i}.{k}" for k in (1, 2, 3)}
    for i in range(40)
]


@pytest.mark.parametrize(("name", "suffix"), [("aime24", ".jsonl"), ("aime24", ".parquet"), ("aime25", ".csv")])
def test_aime(tmp_path, name, suffix):
    task = make_task(name, source=write(tmp_path / f"x{suffix}", AIME))
    first, second = task.problems()
    assert (first.problem_id, first.gold, second.gold) == ("60", "25", "204")
    (turn,) = first.messages
    assert turn["content"] == "Find $n$.\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert (task.samples, task.max_total_tokens, task.max_new_tokens, task.grader) == (64, 32768, None, "math")
    assert task.budgets == (2048, 4096, 6144, 8192)
    assert task.sampling is None  # the model's generation configuration decides


def test_math500_and_gsm8k(tmp_path):
    task = make_task("math500", source=write(tmp_path / "m.jsonl", MATH))
    (problem,) = task.problems()
    assert (problem.problem_id, problem.gold) == ("test/algebra/1.json", r"\frac{1}{2}")
    assert (task.samples, task.budgets[0]) == (8, 1024)
    unnamed = [MATH[0] | {"unique_id": None}, MATH[0], MATH[0] | {"unique_id": None}]
    some = make_task("math500", source=write(tmp_path / "u.jsonl", unnamed)).problems()
    assert [problem.problem_id for problem in some] == ["0", "test/algebra/1.json", "2"]
    (problem,) = make_task("gsm8k", source=write(tmp_path / "g.jsonl", GSM8K)).problems()
    assert problem.gold == "1200"
    records = [{"id": 1, "question": "Which?\n\n\nA. x\nB. y\n\nBox it.", "answer": "A"}]
    (problem,) = make_task("gpqa_diamond_published", source=write(tmp_path / "p.jsonl", records)).problems()
    assert problem.messages[0]["content"] == records[0]["question"] and problem.gold == "A"
    records = [AIME[0] | {"answer": 25.0}, AIME[1] | {"answer": 204.0}]  # a column with gaps
    task = make_task("aime24", source=write(tmp_path / "x.parquet", records))
    assert [problem.gold for problem in task.problems()] == ["25", "204"]


def test_gpqa_shuffles_its_options_the_same_way_for_everybody(tmp_path):
    source = write(tmp_path / "gpqa.csv", GPQA)
    task = make_task("gpqa_diamond", source=source)
    problems = task.problems()
    assert problems == make_task("gpqa_diamond", source=source).problems()
    for i, problem in enumerate(problems):
        text = problem.messages[0]["content"]
        assert f"\n{problem.gold}. right {i}\n" in text
        assert text.startswith(f"Which one, {i}?\n\nA. ")
        assert text.endswith("put your choice letter without any other text with \\boxed{} in the end.")
        assert all(f". wrong {i}.{k}\n" in text for k in (1, 2, 3))
    assert set(Counter(p.gold for p in problems)) == set("ABCD")
    assert (task.samples, task.grader, task.chance) == (16, "letter", 0.25)


def test_texts_of_a_table_that_look_like_gaps_are_texts_and_gaps_in_ids_are_filled(tmp_path):
    record = GPQA[0] | {"Incorrect Answer 1": "None", "Incorrect Answer 3": "N/A", "Record ID": None}
    problems = make_task("gpqa_diamond", source=write(tmp_path / "gpqa.csv", [record, record])).problems()
    assert [problem.problem_id for problem in problems] == ["0", "1"]
    assert all(f". {text}\n" in p.messages[0]["content"] for p in problems for text in ("None", "N/A", "wrong 0.2"))


@pytest.mark.parametrize("name", HUB_TASKS)
def test_sources_are_pinned_to_a_commit(name):
    commit = HUB_TASKS[name].address.rpartition("@")[2].removeprefix("https://raw.githubusercontent.com/")
    digits = next(part for part in commit.split("/") if len(part) == 40)
    assert set(digits) <= set("0123456789abcdef")
    assert make_task(name).options["source"] == HUB_TASKS[name].address


def test_a_file_whose_name_is_also_a_pattern_is_read_as_it_is(tmp_path):
    for name, answer in (("m1.jsonl", "1"), ("m[1].jsonl", "2")):
        (tmp_path / name).write_text(f'{{"problem": "Which?", "answer": "{answer}"}}')
    (problem,) = make_task("math500", source=str(tmp_path / "m[1].jsonl")).problems()
    assert problem.gold == "2"


@pytest.mark.parametrize(
    ("suffix", "form"),
    [(".csv", "problem,answer\n?,{}\n?,{}\n"), (".jsonl", "{}\n{}"), (".json", "[{},\n {}]"), (".jsonl", "[{}, {}]")],
)
def test_answers_are_read_as_they_are_written(tmp_path, suffix, form):
    """Whatever the other records hold, and again if the file changes, even if its time stays."""
    source = tmp_path / f"m{suffix}"
    numbers = [("12345678901234567", "0.5"), ("9007199254740993", "7"), (f"{10**30}", "0.25")]
    texts = [("2009-12-25", "2010-01-01"), ("1.50", "001"), ("0.1234567890123456789", "1e-3")]
    for written in numbers + texts:
        cells = written
        if suffix != ".csv":
            cells = [f'{{"problem": "?", "answer": {a if written in numbers else json.dumps(a)}}}' for a in written]
        source.write_text(form.format(*cells))
        os.utime(source, (0, 0))
        problems = make_task("math500", source=str(source)).problems()
        assert tuple(problem.gold for problem in problems) == written


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.jsonl", None, "does not exist"),
        ("x.txt", "{}", "must end in"),
        ("bad.jsonl", "{", "bad.jsonl, line 1 is not JSON"),
        ("numbers.json", "[1, 2]", "record 0 of .*numbers.json is of type int; it must be an object"),
        ("x.jsonl", '{"question": "?", "answer": "1"}', "record 0 of .* has no field 'problem'; it has question"),
        *((f"empty.{kind}", text, f"empty.{kind}") for kind in ("jsonl", "json", "csv") for text in ("", "\n")),
        ("empty.json", "[]", "empty.json, is empty"),
        ("more.csv", "problem,answer\na,b,c\n", "more.csv have more cells"),
    ],
)
def test_files_that_hold_no_problems_are_named(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    refused(said, lambda: make_task("math500", source=str(tmp_path / name)).problems())


def test_without_a_hub_one_line_names_the_option_for_a_copy(monkeypatch, caplog):
    """At once: the libraries that read from it try again for half a minute, and say so each time."""
    invalid("problems is 0", make_task, "aime24", problems=0)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name, option in (("aime24", "--task-source"), ("gsm8k:shots=1", "--shots-source")):
        refused(f"give its path as {option}.*: the Hub could not be asked", make_task(name).problems)
    assert "Retrying" not in caplog.text


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        *(("aime24", {**AIME[0], "answer": wrong}, "must be") for wrong in (None, "n/a", "33.0", 33.5, "")),
        ("aime24", {**AIME[0], "problem": None}, "'problem' is None"),
        ("math500", {**MATH[0], "answer": None}, "'answer' is None"),
        ("math500", {**MATH[0], "answer": " "}, "'answer' is blank"),
        ("math500", {**MATH[0], "problem": "\ud800"}, "surrogates not allowed"),
        ("gsm8k", {**GSM8K[0], "answer": "He has 1200."}, "has no '####'"),
        ("gsm8k", {**GSM8K[0], "answer": "He has 1200. ####"}, "the answer is empty"),
        ("gpqa_diamond", {**GPQA[0], "Incorrect Answer 2": None}, "'Incorrect Answer 2' is None"),
        ("gpqa_diamond", {**GPQA[0], "Correct Answer": None}, "'Correct Answer' is None"),
        ("gpqa_diamond_published", {"question": "Which?", "answer": "a"}, "must be one capital letter"),
        ("gpqa_diamond_published", {"question": None, "answer": "A"}, "'question' is None"),
    ],
)
def test_a_record_that_is_no_problem_is_named(tmp_path, name, record, said):
    task = make_task(name, source=write(tmp_path / "bad.jsonl", [record]))
    refused(f"record 0 of .*bad.jsonl: .*{said}", task.problems)


@pytest.mark.hub
@pytest.mark.parametrize(("name", "problems"), [("aime24", 30), ("aime25", 30), ("math500", 500), ("gsm8k", 1319)])
def test_the_hub_has_what_is_pinned(name, problems):
    assert len(make_task(name).problems()) == problems


def test_a_run_on_a_local_copy(tmp_path):
    """From file to metrics, with letters as the grader; where the file lies does not matter on resuming."""
    records = [{"id": i, "question": f"a{i} 1 a2", "answer": "A"} for i in range(3)]
    out = tmp_path / "run"
    for name in ("one.jsonl", "two.jsonl"):
        task = make_task("gpqa_diamond_published", source=write(tmp_path / name, records), problems=2)
        options = RunOptions(samples=2, sampling=Sampling(temperature=0.6), max_total_tokens=40)
        metrics = evaluate(support.model(), support.tokenizer(), task, MethodSpec("dense"), out, options)
    assert (metrics["n_problems"], metrics["n_samples"]) == (2, 4)
    assert metrics["pass_at_k"] == {"1": 0.0, "2": 0.0}
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["task"]["source"].endswith("one.jsonl")
    assert config["generation"]["max_total_tokens"] == 40
