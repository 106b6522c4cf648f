"""Worked examples before a question, answers that end at a text, on local files with the Hub's columns."""

import json
from dataclasses import replace

import pytest

from seergate.eval import MethodSpec, RunOptions, evaluate, make_task
from seergate.eval.generation.samples import Generation, Request
from seergate.eval.store import read_config, read_samples
from seergate.eval.tasks.shots import MINERVA
from tests.support import evaluation as support
from tests.support.running import refused

ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TRAIN = [
    {"question": "Two and two?", "answer": "2+2 = <<2+2=4>>4.\n#### 4"},
    {"question": "A thousand and one? ", "answer": "It is that.\n#### 1,001"},
]


@pytest.fixture
def files(tmp_path):
    rows = {"test": [{"question": "How many?", "answer": "All.\n#### 7"}], "train": TRAIN}
    rows["math"] = [{"problem": "1/2?", "answer": "0.5", "solution": r"It is $\boxed{0.5}$."}]
    rows["other"] = [{"problem": "1/4?", "answer": "0.25", "solution": r"It is $\boxed{0.25}$."}]
    rows["bare"] = [{"problem": "1/2?", "answer": "0.5", "solution": "It is 0.5."}]
    for name, records in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {name: str(tmp_path / f"{name}.jsonl") for name in rows}


def only(task):
    (problem,) = task.bound(support.tokenizer()).problems()
    return problem


def test_examples_as_a_text_and_as_turns(files):
    plain = make_task("gsm8k:shots=2", source=files["test"], shots_source=files["train"])
    assert only(plain).prompt == (
        "Question: Two and two?\nAnswer: 2+2 = 4.\nThe answer is \\boxed{4}.\n\n"
        "Question: A thousand and one?\nAnswer: It is that.\nThe answer is \\boxed{1001}.\n\n"
        "Question: How many?\nAnswer:"
    )
    assert (only(plain).gold, only(plain).messages, plain.stop, plain.grader) == ("7", (), ("\nQuestion:",), "math")
    chat = only(make_task("gsm8k:shots=1:chat=true", source=files["test"], shots_source=files["train"]))
    assert chat.prompt is None and [turn["role"] for turn in chat.messages] == ["user", "assistant", "user"]
    turns = ["Two and two?" + ASK, "2+2 = 4.\nThe answer is \\boxed{4}.", "How many?" + ASK]
    assert [turn["content"] for turn in chat.messages] == turns
    four = only(make_task("math500:shots=4", source=files["math"])).prompt
    assert four is not None and four.count("Question: ") == 5 and all(solution in four for _, solution in MINERVA)
    own = only(make_task("math500:shots=1", source=files["math"], shots_source=files["other"])).prompt
    assert own == "Question: 1/4?\nAnswer: It is $\\boxed{0.25}$.\n\nQuestion: 1/2?\nAnswer:"
    assert make_task("gsm8k", source=files["test"]).problems()[0].messages[0]["content"] == "How many?" + ASK


def test_mistakes_are_told(files):
    for name, options, message in (
        ("gsm8k:shots=-1", {}, "shots is -1"),
        ("gsm8k:shots=3", {"shots_source": "train"}, r"shots is 3; .*train\.jsonl has only 2"),
        ("math500:shots=5", {}, "shots is 5; the 4 examples of 'math500' has only 4"),
        ("gsm8k", {"shots_source": "train"}, "shots_source is .* with shots 0; give shots"),
        ("gsm8k:shots=1", {"shots_source": "math"}, r"record 0 of .*math\.jsonl: 'answer' has no '####'"),
        ("math500:shots=1", {"shots_source": "bare"}, r"record 0 of .*bare\.jsonl: 'solution' has no"),
        ("aime24:shots=1", {}, "shots is 1; the task 'aime24' has no worked examples"),
        ("math500:chat=false", {}, "chat is false with shots 0; give shots"),
        ("gpqa_diamond:chat=false", {}, "chat is false; the task 'gpqa_diamond' has no worked examples"),
        ("math500:shots=1", {"shots_source": "math"}, "the problem 0 is one of the worked examples"),
        ("math500:shots=1:chat=true", {"shots_source": "math"}, "the problem 0 is one of the worked examples"),
        ("gsm8k:shots=1", {"shots_source": "nowhere"}, "the file of the worked examples, nowhere, does not exist"),
    ):
        given = {key: files.get(value, value) for key, value in options.items()}
        with pytest.raises(ValueError, match=message):
            only(make_task(name, source=files["math" if "math" in name else "test"], **given))


def test_an_answer_is_cut_before_a_stop_text():
    tokenizer = support.tokenizer()
    words = tokenizer("a1 1 a2 2 a3 3").input_ids
    for stop, kept, used, reason in (
        (("a2",), "a1 1 ", 3, "stop"),
        (("3", "2 a3"), "a1 1 a2 ", 5, "stop"),
        (("a9",), "a1 1 a2 2 a3 3", 6, "length"),
        ((), "a1 1 a2 2 a3 3", 6, "length"),
    ):
        made = Generation.of(Request("x", "", (3,), stop=stop), words, {2}, tokenizer, 0.0, {})
        assert (made.completion, made.n_tokens, made.finish_reason) == (kept, used, reason), stop


def test_generation_ends_at_a_stop_text(tmp_path):
    task, whole, cut = make_task("chain_sum", problems=2, variables=6), tmp_path / "whole", tmp_path / "cut"

    def run(task, out):
        options = RunOptions(max_new_tokens=12, batch_size=2)
        evaluate(support.model(), support.tokenizer(), task, MethodSpec("dense"), out, options)

    run(task, whole)
    rows = {row["problem_id"]: row for row in read_samples(whole)}
    stop = next(iter(rows.values()))["completion"].split()[4]
    run(replace(task, stop=(stop,)), cut)
    for row in read_samples(cut):
        text = rows[row["problem_id"]]["completion"]
        assert row["completion"] == text.partition(stop)[0]
        if stop in text:
            assert row["finish_reason"] == "stop" and row["n_tokens"] == len(text.partition(stop)[0].split()) + 1
    assert read_config(cut)["generation"]["stop"] == [stop] and "stop" not in read_config(whole)["generation"]
    refused(r"generation\.stop was None and is", run, replace(task, stop=(stop,)), whole)
