"""`seergate tune` on a tiny GGUF file: what is refused, how time is divided, and all of it, killed and continued."""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from seergate.cli import tune
from seergate.cli.tune import decide, pair_seconds
from seergate.config import GateConfig
from seergate.distill.config import load_train_config
from seergate.distill.estimate import make_plan
from seergate.distill.held_out import divide
from seergate.distill.long_text import texts, texts_here
from seergate.durable import lock
from seergate.errors import SeergateError
from seergate.eval import run_plan as running
from seergate.gates.files import CONFIG_FILE
from seergate.models.gate_bank import GateBank
from seergate.pretrained import load_tokenizer
from tests.models.test_gguf import llama, write_gguf
from tests.support.models import tiny_model
from tests.support.running import ROOT, refusal, run_seergate

HOURS, MOST = 3, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "Tiny.gguf"
    write_gguf(file, llama())
    return file


@pytest.fixture
def data(tmp_path):
    """48 rows of some hundreds of words, and a line that is not a row."""
    drawn, words = random.Random(0), (ROOT / "docs" / "concepts.md").read_text().split()
    rows = [json.dumps({"text": " ".join(drawn.choices(words, k=120))}) for _ in range(48)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*rows, "nothing"]) + "\n")
    return file


def test_two_thirds_of_the_time_train_and_the_rest_evaluates():
    assert pair_seconds(dense=4.0, gate=3.0, dense_text=2.0, gate_text=1.0, budgets=3) == 4 + 2 * 2 + 3 * (3 + 1)
    plan = decide(1.0, 600.0, 10.0, 20.0, packs=1000, held_out=40)
    assert (plan.steps, plan.problems, plan.texts) == (200, 50, 40)
    assert (plan.training, plan.evaluation) == (2000.0, 1000.0)


def test_no_text_is_trained_on_more_than_twice_and_evaluation_gets_what_is_left():
    plan = decide(1.0, 600.0, 10.0, 20.0, packs=30, held_out=400)
    assert (plan.steps, plan.problems, plan.texts) == (60, 120, 120)
    assert decide(10.0, 0.0, 10.0, 20.0, packs=30, held_out=400).problems == tune.MOST
    assert decide(1.0, 600.0, 10.0, 20.0, packs=30, held_out=400, packs_per_step=2).steps == 30


@pytest.mark.parametrize(("hours", "step"), [(0.1, 10.0), (0.5, 300.0)])
def test_too_short_a_time_is_refused_with_one_that_is_enough(hours, step):
    with pytest.raises(SeergateError, match=rf"hours is {hours}; it must be at least ([\d.]+), as 20 steps") as error:
        decide(hours, 60.0, step, 20.0, packs=1000, held_out=40)
    enough = float(str(error.value).split("at least ")[1].split(",")[0])
    assert hours < enough < 5
    decide(enough, 60.0, step, 20.0, packs=1000, held_out=40)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hours", "0"], "hours is 0.0; it must be a positive number"),
        (["--hours", "1", "--threads", "0"], "threads is 0; it must be a whole number, 1 or greater"),
        (["--hours", "1", "--data", "nowhere.jsonl"], "data is 'nowhere.jsonl'; there is no such file or directory"),
        (["--hours", "1", "--budget", "32"], "budget is 32; it must be at least 48, which is 3 blocks, and below 384"),
        (["--hours", "1", "--budget", "400"], "budget is 400; it must be at least 48"),
        (["--hours", "1", "--max-length", "1024"], "the model has 512 positions"),
        (["--hours", "1", "--max-length", "32768"], "max_length is 32768; the model has 512 positions"),
        (["--hours", "1", "--max-length", "0"], "max_length is 0; it must be a positive integer"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(arguments, said, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refusal(run_seergate("tune", str(model), *arguments))
    assert not list(tmp_path.iterdir())


def test_memory_is_estimated_for_both_kinds_of_gates(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["tune", str(model), "--hours", "3", "--data", str(data), "--max-length", "512"]
    monkeypatch.setattr("seergate.distill.estimate.overhead", lambda *_: 0)
    tune.add_arguments(parser := argparse.ArgumentParser())
    plan = make_plan(tune._checked(parser.parse_args(arguments[1:])).config)
    monkeypatch.setattr("seergate.distill.estimate.capacity", lambda *_: plan.total + 1)  # those per group would fit
    assert "the model does not fit into" in refusal(run_seergate(*arguments))


def test_gates_that_diverge_while_they_are_measured_are_refused(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "_train", lambda *given: [])
    command = ["tune", str(model), "--hours", "1", "--data", str(data), "--max-length", "256"]
    assert "gates that diverge in 3 steps, see above, give no time to measure" in refusal(run_seergate(*command))


def test_models_that_are_none_and_files_without_texts_are_refused(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.jsonl").write_text("".join(data.read_text().splitlines(keepends=True)[:10]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.jsonl").write_text('{"content": "a text"}\n' * 48)
    for arguments, message in (
        (["nowhere.gguf"], "the model file 'nowhere.gguf' does not exist"),
        ([str(model), "--data", "few.jsonl"], "few.jsonl: 10 texts, 10 of them of 384 tokens or more; there must"),
        ([str(model), "--data", "empty"], "data is 'empty', in which there is no text"),
        ([str(model), "--data", "other.jsonl"], "--max-length; 48 rows are left out (row 1: no messages"),
    ):
        assert message in refusal(run_seergate("tune", *arguments, "--hours", "1"))


def test_two_at_once_are_refused_before_anything_is_written(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    with open("out/.lock", "w") as file:
        lock(file, Path("out"), "")
        command = ["tune", str(model), "--hours", "1", "--data", str(data), "--out", "out"]
        assert "another process is writing to out; wait" in refusal(run_seergate(*command))
    assert [path.name for path in Path("out").iterdir()] == [".lock"]


def test_options_may_change_until_the_time_is_divided(model, data, tmp_path, monkeypatch):
    """As after a refusal of the first; the texts are then made of the new ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune._Job, "prepare", lambda job: refuse())
    command = ["tune", str(model), "--hours", "1", "--max-length", "256", "--out", "out", "--data"]

    def refuse():
        raise SeergateError("stopped here")

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text("{}")
    mine = [*command[:-2], "mine", "--data", str(data)]
    assert "has train.jsonl, which is not of a tune run" in refusal(run_seergate(*mine))
    (tmp_path / "mine" / "train.jsonl").rename(tmp_path / "mine" / "report.md")
    assert "report.md is not a report of seergate's" in refusal(run_seergate(*mine))
    (tmp_path / "other.jsonl").write_text(data.read_text())
    for file in (data, tmp_path / "other.jsonl", tmp_path / "other.jsonl"):
        if file != data:  # another file, or the same one with other texts
            file.write_text(file.read_text().swapcase().replace('"TEXT"', '"text"'))
        assert "stopped here" in refusal(run_seergate(*command, str(file)))
        rows = [json.loads(line)["text"] for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
        assert rows and all(text in file.read_text() for text in (json.dumps(row)[1:-1] for row in rows))


def test_windows_of_texts_are_divided_too(model, tmp_path):
    """What is held out is no part of what is trained on, and is as it was."""
    config, tokenizer = replace(load_train_config(str(model)), max_length=512), load_tokenizer(model)
    text = (ROOT / "docs" / "evaluation.md").read_text()
    (tmp_path / "a.md").write_text(text)
    rows, held_out, malformed = divide(str(tmp_path), config, tokenizer, 384)
    assert not malformed and len(held_out) == 8 and len(rows) > 8
    assert all(each in text and len(tokenizer(each).input_ids) >= 384 for each in held_out)
    trained = [row["text"] for row in rows]
    assert not any(each[100:200] in other for each in held_out for other in trained)
    assert any("As quoted above" in each for each in trained)
    assert any("the entry of" in each.lower() for each in trained)
    (tmp_path / "b.md").write_text(text)  # again
    twice = divide(str(tmp_path), config, tokenizer, 384)
    assert len(twice.rows) + len(twice.held_out) == len(rows) + len(held_out)
    lines = [json.dumps({"text": f"text number {i // 2} " * 40}) for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join([*lines, "{"]))
    rows, held_out, malformed = divide(str(tmp_path / "pairs.jsonl"), config, tokenizer, 100)
    assert len(rows) == 12 and len(held_out) == 8 and not set(held_out) & {row["text"] for row in rows}
    assert malformed == ["row 41: not JSON"]


def test_python_library_is_what_is_trained_on_by_default():
    """Without the text of the needles, and without what others have installed."""
    places = texts_here()
    assert any(path.name == "argparse.py" for path in places)
    assert not {"pydoc_data", "site-packages"} & {path.name for path in places}
    assert "argument" in next(texts([path for path in places if path.name == "argparse.py"]))


@pytest.mark.parametrize(
    ("group", "head", "kept"),
    [
        (1.0, 0.94, "none"),
        (1.0, 0.96, "proj"),
        (0.5, 0.8, "proj"),
        (1.0, None, "proj"),
        (None, 1.0, "none"),
        (None, None, "proj"),
        ("diverged", None, "none"),
        (None, "diverged", "proj"),
    ],
)
def test_a_query_per_head_is_kept_if_its_held_out_kl_is_clearly_lower(group, head, kept, tmp_path, monkeypatch):
    runs = [tmp_path / "proj", tmp_path / "none"]
    for run, kl in zip(list(runs), (group, head), strict=True):
        if kl == "diverged":
            runs.remove(run)
            continue
        bank = GateBank.for_model(tiny_model("llama"), GateConfig(block_size=16, q_pooling=run.name))
        bank.training_record = {"kl_held_out": kl}
        bank.save_pretrained(run)
    monkeypatch.setattr(tune, "_train", lambda config, steps: runs)
    config = replace(load_train_config("tiny-reasoner"), output_dir=str(tmp_path / "out" / "training"))
    tune._Job(None, config, []).train(20)
    assert GateBank.from_pretrained(tmp_path / "out" / "gates").config.q_pooling == kept


STOPPED = f"""
import os, signal, sys
from seergate.cli import main, tune
from seergate.distill import callbacks, training_run

class Console(callbacks.Callback):
    def __init__(self, steps, *_):
        self.steps = steps

    def on_step(self, log):
        if log.step == self.steps > tune.STEPS_TIMED:
            os.kill(os.getpid(), signal.SIGTERM)

tune.MOST = {MOST}
if sys.argv[1] == "stop":
    training_run.Console = Console
sys.exit(main.main(sys.argv[2:]))
"""
"""With "stop", a run that gets SIGTERM as training ends."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_of_it_killed_and_continued(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "MOST", MOST)
    out = tmp_path / "runs" / "tune-tiny"
    command = ["tune", str(model), "--hours", str(HOURS), "--data", str(data), "--max-length", "256", "--threads", "1"]
    out.parent.mkdir()
    piped = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", STOPPED, "go", *command, "--out", str(out)], **piped)
    deadline = time.monotonic() + 250
    while (
        not list(out.glob("training/*/checkpoints/step-*")) and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    state = json.loads((out / "tune.json").read_text())
    assert "trained" not in state and not (out / "gates" / CONFIG_FILE).exists()
    steps = state["decision"]["steps"]
    assert steps == 76 and state["decision"]["problems"] == 8  # twice 40 texts in 38 packs

    def again(*more, place=str(out)):
        return run_seergate(*command, "--out", place, *more)

    (out / "gates").mkdir()
    assert "was begun by an earlier version of seergate" in refusal(again())
    (out / "gates").rmdir()
    message = refusal(again("--budget", "96"))
    assert "budget is [96], but" in message and "was begun with [48, 64, 128]" in message

    ended = subprocess.run([sys.executable, "-c", STOPPED, "stop", *command, "--out", str(out)], text=True, **piped)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert "stopped by SIGTERM after step 76 of 76, which is saved" in ended.stderr
    assert "it/s]" not in ended.stderr and "Loading weights" not in ended.stderr
    assert not (out / "needle").exists() and "trained" not in json.loads((out / "tune.json").read_text())

    evaluated, run_plan = list[str](), running.run_plan

    def interrupted(plan):
        evaluated.append(plan.task)
        if plan.task == "perplexity":
            raise KeyboardInterrupt
        return run_plan(plan)

    with monkeypatch.context() as patch:
        patch.setattr(running, "run_plan", interrupted)
        done = again(place=os.path.relpath(out))
    assert done.returncode == 130 and evaluated == ["needle", "perplexity"]
    assert f"decided: {steps} steps" in done.stdout and "continuing after step" in done.stdout
    kept = {path: path.read_bytes() for path in (out / "needle").glob("*/samples.jsonl")}
    assert len(kept) == 4

    done = again()
    assert done.returncode == 0, done.stderr
    assert "step " not in done.stdout.replace("steps of training", ""), "training is over"
    assert {path: path.read_bytes() for path in kept} == kept
    *_, first, second, third, _, gates, report = done.stdout.splitlines()
    assert first.startswith("Answers cannot measure a budget's loss: dense attention itself answers 0 of 8")
    assert second.startswith("On 8 held-out texts of 192 tokens dense attention has a perplexity of ")
    assert third.startswith("So ") and third.endswith(".")
    assert gates == f"gates: {out / 'gates'}" and report == f"report: {out / 'report.html'}"
    assert "needle" in (out / "report.md").read_text() and "perplexity" in (out / "report.md").read_text()
    group, head = (
        json.loads((out / "training" / pooling / CONFIG_FILE).read_text())["training"]["kl_held_out"]
        for pooling in ("proj", "none")
    )
    trained = json.loads((out / "gates" / CONFIG_FILE).read_text())["training"]["config"]
    assert 0 < group != head > 0 and trained["q_pooling"] == ("none" if head < 0.95 * group else "proj")
    assert (trained["max_steps"], trained["block_size"], trained["init"]) == (steps, 16, "model")
    held_out = {json.loads(line)["text"] for line in (out / "held_out.jsonl").read_text().splitlines()}
    learned = {json.loads(line)["text"] for line in (out / "train.jsonl").read_text().splitlines()}
    assert len(held_out) == 8 and len(learned) == 40 and not held_out & learned

    with monkeypatch.context() as patch:
        patch.setattr(running, "run_plan", None)
        assert again().stdout.splitlines()[-6:] == [first, second, third, "", gates, report], "nothing is left to do"
    shutil.rmtree(out)
