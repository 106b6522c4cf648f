"""Progress of evaluations: lines in a log, a bar on a terminal, and the remaining time."""

import dataclasses
import os
import pty
import re
import sys
import threading
import time
import warnings
from functools import partial

import pytest
from tqdm.auto import tqdm
from transformers.utils import logging

from seergate import progress
from seergate.cli.console import guarded
from seergate.distill.callbacks import Console, StepLog
from seergate.eval import progress as eval_progress
from seergate.eval.collector import Progress
from seergate.eval.progress import EvalProgress


def at(done, *, total=40, label="gate-128", seconds=None, made=None):
    """A run of which a sample takes half a second and 100 tokens; three of four are right."""
    made = done if made is None else made
    seconds = 0.5 * made if seconds is None else seconds
    return Progress(label, done, total, correct=3 * done // 4, made=made, tokens=100 * made, seconds=seconds)


@pytest.fixture(autouse=True)
def _no_work(monkeypatch):
    """Not even that of a display that another test has left open."""
    monkeypatch.setattr(progress, "_works", [])


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(eval_progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_say_what_is_done_and_how_long_the_rest_takes(capsys, clock):
    with EvalProgress(3) as progress:
        progress(at(0))
        assert capsys.readouterr().out == "", "nothing is known yet"
        clock[0] += 7
        progress(at(4))
        assert capsys.readouterr().out == "[1/3] gate-128: 4/40 answers, 200 tokens/s, 18 s left (7 s)\n"
        progress(at(1, label="quest-128"))
    assert progress.started == 2


def test_a_line_comes_at_most_every_few_seconds_and_always_at_the_end(capsys, clock):
    with EvalProgress(2) as progress:
        for label in ("dense", "gate"):
            for done in range(41):
                progress(at(done, label=label))
                clock[0] += 0.5
        lines = capsys.readouterr().out.splitlines()
    seen = [tuple(map(int, re.match(r"\[(\d)/2\] \w+: (\d+)/40", line).groups())) for line in lines]
    assert seen == [(1, 1), (1, 11), (1, 21), (1, 31), (1, 40), (2, 9), (2, 19), (2, 29), (2, 39), (2, 40)]
    assert "left" not in lines[4] and "left" in lines[3], "at the end nothing is left"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        *((at(20, seconds=s), f", {said} (") for s, said in ((99.4, "99 s left"), (100, "2 min left"))),
        *((at(20, seconds=s), f", {said} (") for s, said in ((3600, "60 min left"), (9000, "2.5 h left"))),
        (at(32, made=2, seconds=10.0), "32/40 answers, 20 tokens/s, 40 s left"),  # 30 were there before
        *((at(n, seconds=20.0), "tokens/s (") for n in (1, 3)),  # samples that run side by side end together
        (at(4, seconds=20.0), "tokens/s, 3 min left ("),
        (at(1), "1/40 answers, 200 tokens/s ("),  # the right ones are told at the end: easy ones come first
        (dataclasses.replace(at(1), correct=None), "1/40 texts, 200 tokens/s ("),
        (at(1, total=1), "1/1 answers, 0 % right, 200 tokens/s"),
    ],
)
def test_what_a_line_says(capsys, clock, now, said):
    EvalProgress(1)(now)
    assert said in capsys.readouterr().out


def test_a_warning_is_one_line(capsys, clock):
    with EvalProgress(1) as progress:
        progress(at(4))
        warnings.warn("the prompt\nis long", stacklevel=1)
    assert capsys.readouterr().out.splitlines()[1:] == ["note: the prompt is long"]


def test_on_a_terminal_it_is_a_bar(monkeypatch):
    """A real one (a pseudo-terminal), so that what draws the bar finds what it asks for."""
    master, slave = pty.openpty()
    seen = bytearray()

    def read():
        try:
            while part := os.read(master, 4096):
                seen.extend(part)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(progress, "SILENT_SECONDS", 0.01)
        with EvalProgress(2) as shown, progress.heartbeat(), progress.working("scoring"):
            for done in range(41):
                shown(at(done))
            time.sleep(0.1)
            warnings.warn("[eval] files in [/tmp/x] are old", stacklevel=1)
            shown(at(10, label="quest-128"))
        monkeypatch.undo()
    reader.join(30)
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    last = text[text.rindex("gate-128") :]
    assert "40/40" in last and "75 % right, 200 tokens/s" in last
    assert "quest-128" in last and "10/40" in last and "15 s left" in last
    assert "note: [eval] files in [/tmp/x] are old" in text
    assert "answers" not in text and "still" not in text, "no plain lines beside it"


def test_a_command_says_what_it_is_doing(monkeypatch, capsys):
    """A line on standard error for each time that the innermost work lasts; and none without work or beside a bar."""
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.5)

    def run():
        with progress.working("reading"), progress.working("loading the model"):
            time.sleep(1.7)
        time.sleep(0.6)

    assert guarded(partial(guarded, run)) == 0, "the inner one has no lines of its own"
    output = capsys.readouterr()
    assert output.out == "" and not progress._works
    assert re.fullmatch(r"(still loading the model \(\d s\)\n)+", output.err), output.err
    monkeypatch.setenv("RANK", "1")
    assert guarded(run) == 0 and capsys.readouterr().err == "", "the main process says it"


def test_a_command_tells_its_last_progress(monkeypatch, capsys):
    """In a file, where the next sample may take hours; the time is that since the last one."""
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.5)

    def run():
        with EvalProgress(1) as shown:
            shown(at(4))
            time.sleep(1.2)

    assert guarded(run) == 0 and not progress._works
    told = r"(still at gate-128, 4/40, 200 tokens/s, 18 s left \(\d s\)\n)+"
    assert re.fullmatch(told, capsys.readouterr().err)


def test_bars_of_libraries_are_for_terminals(capsys):
    def run():
        assert list(tqdm(range(3))) == list(logging.tqdm(range(3))) == [0, 1, 2]

    assert guarded(run) == 0 and capsys.readouterr().err == ""
    run()
    assert "3/3" in capsys.readouterr().err, "they are back after the command"


def test_time_left_of_training_is_that_of_the_steps_of_this_process(capsys, clock):
    """50 of 100 steps were there. The first of this process, a warm-up, is not counted; evaluations between are."""
    shown = Console(100, 50, 1, "", True)
    for step, seconds in ((51, 70), (52, 10), (53, 20), (100, 1)):
        clock[0] += seconds
        shown.on_step(StepLog(step, 0.5, [0.5], {}, (0,), 1.0, 1e-3, 100, 1.0, 1.0))
    shown.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("lr 1.00e-03")[1].strip() for line in lines] == ["", "8 min left", "12 min left", ""]
