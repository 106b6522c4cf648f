import json

import pytest

from seergate.eval.calibration.calibrator import other_problems
from seergate.eval.tasks.chain_sum import TRAINING_SEEDS, make_problems
from seergate.eval.tasks.registry import make_task
from seergate.eval.tasks.task import as_text, contents_hash
from tests.support.running import invalid, refused


def test_chain_sum_is_reproducible_and_extends():
    few = make_task("chain_sum", problems=3, variables=10, seed=4).problems()
    many = make_task("chain_sum", problems=6, variables=10, seed=4).problems()
    assert many[:3] == few and contents_hash(few) != contents_hash(many)
    assert few != make_task("chain_sum", problems=3, variables=10, seed=5).problems()


def test_the_limit_leaves_room_for_the_right_answer():
    task = make_task("chain_sum", problems=1, variables=80)
    problem = next(make_problems(1, 80, 0))
    assert len(problem.solution.split()) < task.max_new_tokens


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("chain_sun", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"variables": 3}, "variables is 3"),
        ("chain_sum", {"problems": 0}, "problems is 0"),
        ("chain_sum", {"seed": TRAINING_SEEDS}, "seed is 1000000"),
        ("chain_sum", {"grader": "math"}, "no option 'grader'; there are problems, variables"),
        ("nowhere.jsonl", {}, "nowhere.jsonl does not exist"),
    ],
)
def test_mistakes_are_told(name, options, said):
    invalid(said, make_task, name, **options)


def test_jsonl(tmp_path):
    path = tmp_path / "mine.jsonl"
    records = [
        {"question": "1+1?", "answer": 2.0},  # as tables with gaps write integers
        {"prompt": "Q: 2+2, boxed\nA:", "answer": "4", "id": "four"},
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "u"}], "id": None, "answer": "x"},
    ]
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n", encoding="utf-8")
    task = make_task(path)
    one, two, three = task.problems()
    assert (task.name, task.grader, one.gold) == ("mine", "math", "2")
    assert one.messages[0]["content"].endswith("within \\boxed{}.")
    assert (two.problem_id, two.prompt) == ("four", "Q: 2+2, boxed\nA:")
    assert len(three.messages) == 2 and (one.problem_id, three.problem_id) == ("1", "3")
    assert len(make_task(str(path), problems=2, grader="exact").problems()) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{not json}\n", "line 1 is not JSON"),
        (b'{"prompt": "boxed x", "answer": 1}\n{"prompt": "boxed x"}\n', "line 2 has no 'answer'"),
        (b'{"answer": 1}\n', "none of"),
        (b'{"messages": [], "answer": 1}\n', "must be a list"),
        (b'{"prompt": "boxed x", "answer": 1, "id": 1}\n{"prompt": "boxed y", "answer": 1, "id": 1}\n', "twice"),
        (b'{"prompt": "boxed x", "answer": null}\n', "line 1: 'answer' is None; it must be a text or a finite number"),
        (b'{"prompt": "boxed x", "answer": ["2"]}\n', r"line 1: 'answer' is \['2'\]"),
        (b'{"prompt": "boxed x", "answer": NaN}\n', "'answer' is nan"),
        (b'{"prompt": "boxed x", "answer": true}\n', "'answer' is True"),
        (b'{"prompt": "boxed x", "answer": " "}\n', "line 1: the answer is empty"),
        (b'{"question": null, "answer": 1}\n', "line 1: 'question' is None; it must be a text"),
        (b'{"question": " ", "answer": 1}\n', "line 1: 'question' is blank"),
        (b'{"question": "1+1?", "answer": "1+1=<<1+1=2>>2\\n#### 2"}\n', "line 1: the answer .* only what stands"),
        (b'{"prompt": 5, "answer": 1}\n', "line 1: 'prompt' is 5"),
        (b'{"messages": [{"role": "user", "content": null}], "answer": 1}\n', "line 1: 'messages' must be a list"),
        (b'{"messages": [{"role": "user", "content": 5}], "answer": 1}\n', "line 1: 'messages' must be a list"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "1"}], "answer": 1}',
            "'messages' end with an assistant's turn",
        ),
        (b'{"prompt": "boxed \\ud800", "answer": 1}\n', "line 1 holds half a surrogate pair"),
        (b'{"prompt": "boxed x", "answer": ' + b"1" * 5000 + b"}\n", "line 1 is not JSON"),
        (b'{"question": "[{\\"role\\": \\"user\\", \\"content\\": \\"x\\"}]", "answer": 1}', "conversation as"),
        (b"", "no problems"),
        (b'{"prompt": "boxed \xff", "answer": 1}\n', "not UTF-8"),
    ],
)
def test_bad_files_are_told(tmp_path, text, said):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text)
    refused(said, lambda: make_task(str(path)).problems())


def test_gold_answers_are_checked_against_the_grader(tmp_path):
    path = tmp_path / "letters.jsonl"
    for gold in ("b", 1):
        rows = [{"prompt": "boxed x", "answer": "B"}, {"prompt": "boxed y", "answer": gold}]
        path.write_text("\n".join(map(json.dumps, rows)))
        message = "letters.jsonl, line 2: the answer .* must be one capital letter"
        refused(message, lambda: make_task(str(path), grader="letter").problems())
        assert len(make_task(str(path)).problems()) == 2


def test_files_called_like_tasks_are_files(tmp_path, monkeypatch):
    """Also one with a byte order mark; other problems to calibrate on there are none."""
    monkeypatch.chdir(tmp_path)
    for name in ("needle:1.jsonl", "chain_sum.jsonl"):
        (tmp_path / name).write_text('{"prompt": "boxed x", "answer": 0.5}', encoding="utf-8-sig")
        task = make_task(name)
        assert task.problems()[0].gold == "0.5" and other_problems(task) == (task, None)
    assert other_problems(make_task("chain_sum"))[0].options["seed"] != 0


def test_a_box_is_asked_for_where_it_is_graded(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "1+1?", "answer": 2}\n{"prompt": "1+1 =", "answer": 2}')
    for grader in ("exact", "contains", "number"):
        chat_problem, left = make_task(str(path), grader=grader).problems()
        assert chat_problem.messages[0]["content"] == "1+1?" and left.prompt == "1+1 ="
    message = r"line 2: the prompt does not ask for \\boxed\{\}, .*: exact, contains, num"
    refused(message, lambda: make_task(str(path)).problems())


@pytest.mark.parametrize(
    ("value", "text"),
    [(5.0, "5"), (-0.0, "0"), (2.5, "2.5"), (1e-5, "0.00001"), (6.02e23, "602" + "0" * 21), (100.0, "100"), (7, "7")],
)
def test_a_number_is_its_digits(value, text):
    assert as_text("answer", value) == text
