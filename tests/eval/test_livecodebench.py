"""Programs for LiveCodeBench's evaluator: which part of an answer they are, and the file that it reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from seergate.cli.main import main
from seergate.eval import MethodSpec, RunOptions, Sampling, evaluate, make_task
from seergate.eval.grading import grade
from seergate.eval.livecodebench import last_program
from tests.eval import support

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("", ""),
        ("print(1)", ""),
        ("```python\nprint(1)\n```", "print(1)"),
        ("First\n```python\na\n```\nbetter\n```py\nfor b in c:\n    d\n```\nThat is it.", "for b in c:\n    d"),
        ("```python\na\n```\nor\n```python\nb", "a"),  # cut off by the limit: what was finished counts
        ("```python\nnever closed", ""),
        ("```\nleft open\n```python\nb\n```", "b"),
        ("the sign ``` and `x` in a line\n```\ny = 1\n```", "y = 1"),
        ("````\n```\na\n```\n````", "```\na\n```"),
        ("```python\r\na\r\n```\r\n", "a\r"),
        ("```python\nx = '\u2028'\n```", "x = '\u2028'"),
        ("Here it is: ```python\na\n```", "a"),
        ("That is ```c++\na\n```<|im_end|>", "a"),
        ("```python\na\n```<|im_end|>", "a"),
        ("```python\na\n``` </s>", "a"),
        ("```python\na\n```<\uff5cend\u2581of\u2581sentence\uff5c><|endoftext|>", "a"),
        ('```python\ns = "a ```python\nb"\n```', 's = "a ```python\nb"'),
        ("a fence is ```, write ```x``` or ``` so\n```\na\n```", "a"),
        ("1. so:\n   ```python\n   a\n   ```", "   a"),
    ],
)
def test_the_program_is_the_last_block_that_is_closed(completion, program):
    assert last_program(completion) == program


@pytest.fixture
def run_dir(tmp_path):
    """Two samples each of two problems, given as messages, with programs for answers."""
    ids, path = ("abc301_a", "1873_B"), tmp_path / "livecodebench.jsonl"
    turns = [{"role": "system", "content": "a1"}, {"role": "user", "content": "a2"}]
    path.write_text("".join(json.dumps({"id": i, "messages": turns, "answer": ""}) + "\n" for i in ids))
    task = make_task(str(path), grader="exact")
    options = RunOptions(max_new_tokens=4, samples=2, sampling=Sampling(temperature=1.0))
    out = tmp_path / "run"
    evaluate(support.model(), support.tokenizer(), task, MethodSpec("dense"), out, options)
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    for sample in lines:
        asked = sample["problem_id"], sample["sample_idx"]
        sample["completion"] = "I do not know." if asked == (ids[1], 0) else f"```python\nprint{asked}\n```"
    (out / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in reversed(lines)))
    return out


def test_no_answer_counts_as_right(run_dir):
    """Nor does an empty box, in a run that is graded elsewhere."""
    assert grade("exact", "\\boxed{}", "", lambda gold, answer: (True, "")).correct is False
    assert json.loads((run_dir / "metrics.json").read_text())["accuracy"] == 0


def test_the_file_is_what_the_evaluator_reads(run_dir, tmp_path, capsys):
    assert main(["eval", "livecodebench", str(run_dir), "--out", str(tmp_path / "programs.json")]) == 0
    assert "programs for 2 problems; 1 answers hold none" in capsys.readouterr().out
    found = json.loads((tmp_path / "programs.json").read_text())
    assert {row["question_id"]: row["code_list"] for row in found} == {
        "abc301_a": ["print('abc301_a', 0)", "print('abc301_a', 1)"],
        "1873_B": ["", "print('1873_B', 1)"],
    }
    assert len(found) == 2
    assert main(["eval", "livecodebench", str(run_dir)]) == 0
    assert json.loads((run_dir / "programs.json").read_text()) == found


def test_an_unfinished_run_is_refused(run_dir, tmp_path, capsys):
    """The evaluator wants every problem, and equally many programs for each."""
    path = run_dir / "samples.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert main(["eval", "livecodebench", str(run_dir)]) == 2
    assert "has 3 of 4 answers; let `seergate eval` make the others first" in capsys.readouterr().err
    assert not (run_dir / "programs.json").exists()
    assert main(["eval", "livecodebench", str(tmp_path / "nowhere")]) == 2


def test_the_recipe_in_the_documents_is_python():
    text = (ROOT / "docs" / "harnesses.md").read_text()
    (recipe,) = re.findall(r"```python\n(.*?)```", text[text.index("## LiveCodeBench") :], re.S)[:1]
    compile(recipe, "harnesses.md", "exec")
    assert all(name in recipe for name in ('"id"', '"messages"', '"answer"'))
