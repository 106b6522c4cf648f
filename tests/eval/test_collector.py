"""Samples are on the disk when they are finished, and graded while others are generated."""

from __future__ import annotations

import resource
import threading
from contextlib import contextmanager

import pytest

from seergate.errors import SeergateError
from seergate.eval.collector import Collector
from seergate.eval.generation.engine import Generation, Request
from seergate.eval.grading.judge import GradingPool
from seergate.eval.store import GRADE, SAMPLES, UNGRADED, SampleLog, key_of, read_samples
from tests.eval.test_runner import small, timeless
from tests.support import evaluation as support

WAIT = 60.0


def run(out, model=None, **options):
    return small(out, model=model, **{"max_new_tokens": 24, "batch_size": 1, **options})


def test_decoding_goes_on_while_an_answer_is_graded(tmp_path, monkeypatch):
    """Grades are given only after the model has gone on; where decoding waited for them, both would wait for ever."""
    model, real, grade_requested, went_on = support.model(), GradingPool.grade, threading.Event(), threading.Event()
    model.register_forward_hook(lambda *_: went_on.set() if grade_requested.is_set() else None)

    def late(pool, *arguments):
        grade_requested.set()
        assert went_on.wait(WAIT), "decoding waits for a grade"
        return real(pool, *arguments)

    monkeypatch.setattr(GradingPool, "grade", late)
    assert run(tmp_path, model)["n_samples"] == 4


def test_the_accuracy_so_far_is_told_while_answers_are_generated(tmp_path):
    """With one process: the second answer is not begun before the first has been told of."""
    model, first_reported, seen, steps = support.model(), threading.Event(), [], []

    def wait(*_):
        steps.append(1)
        if len(steps) == 25:  # the prompt and 23 further tokens make an answer of 24
            assert first_reported.wait(WAIT), "nothing is told while answers are generated"

    def on_progress(now):
        seen.append((now.done, now.total, len(steps)))
        if now.done == 1:
            first_reported.set()

    model.register_forward_hook(wait)
    run(tmp_path, model, on_progress=on_progress)
    assert [(done, total) for done, total, _ in seen] == [(done, 4) for done in range(5)]
    assert seen[1][2] <= 25 < len(steps) == 4 * 24


def test_what_waits_for_its_grade_survives_and_is_not_made_again(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")

    def ill(pool, *arguments):
        raise SeergateError("the judge is ill")

    monkeypatch.setattr(GradingPool, "grade", ill)
    with pytest.raises(SeergateError, match="the judge is ill"):
        run(tmp_path / "run", batch_size=4)
    monkeypatch.undo()
    path, kept = tmp_path / "run" / UNGRADED, read_samples(tmp_path / "run", UNGRADED)
    assert kept and read_samples(tmp_path / "run") == []
    with path.open("ab") as file:
        file.write(b'{"task": "chain_sum", "problem_id": "5-0-')  # a kill inside a write
    seen = []
    metrics = run(tmp_path / "run", on_progress=seen.append)
    assert seen[-1].made == 4 - len(kept) and seen[-1].done == 4
    assert not path.exists() and not (tmp_path / "whole" / UNGRADED).exists()
    assert timeless(metrics) == timeless(whole)
    answers = [{key_of(s): s["completion"] for s in read_samples(tmp_path / name)} for name in ("run", "whole")]
    assert answers[0] == answers[1]


def generation(number: int) -> Generation:
    key = ("chain_sum", str(number), 0)
    return Generation(Request(key, "prompt", (5, 6, 7)), rf"\boxed{{ {number % 10} }}", (1, 2), "stop", 0.5, {})


def collector(log, judges, number, **options):
    golds = {str(i): "3" for i in range(number)}
    return Collector("dense", number, "digit", golds, log, [], judges, **options)


def test_a_finished_sample_is_on_the_disk(tmp_path):
    """At every moment, in one file or the other, while several threads finish samples and several grade them."""
    numbers, lost = iter(range(48)), []

    def work(sink):
        for number in numbers:
            answer = generation(number)
            sink.take(answer)
            try:
                stored_samples = read_samples(tmp_path, UNGRADED)
            except FileNotFoundError:  # nothing waits any more
                stored_samples = []
            stored_samples += read_samples(tmp_path)  # what has left the first file is in this one
            if answer.request.key not in map(key_of, stored_samples):
                lost.append(number)

    seen = []
    with SampleLog(tmp_path) as log, GradingPool(3) as judges:
        with collector(log, judges, 48, on_progress=seen.append) as sink:
            threads = [threading.Thread(target=work, args=(sink,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not (tmp_path / UNGRADED).exists()
    samples = read_samples(tmp_path)
    assert not lost and len(samples) == 48 and sum(s["correct"] for s in samples) == 5
    assert [now.done for now in seen] == list(range(1, 49))
    assert (seen[-1].correct, seen[-1].made, seen[-1].tokens, seen[-1].eta) == (5, 48, 96, 0)


def test_what_still_waits_is_not_forgotten(tmp_path, monkeypatch):
    """One sample is graded while another, new or left by an earlier run, waits for its grade."""
    release, real, done = threading.Event(), GradingPool.grade, threading.Event()

    def grade(pool, grader, completion, gold):
        assert "3" not in completion or release.wait(WAIT)
        return real(pool, grader, completion, gold)

    monkeypatch.setattr(GradingPool, "grade", grade)
    for kept in (False, True):
        out = tmp_path / str(kept)
        out.mkdir()
        release.clear()
        done.clear()
        options = {"on_progress": lambda now: done.set()}
        with SampleLog(out) as log, GradingPool(2) as judges, collector(log, judges, 5, **options) as sink:
            if kept:
                left = [sink._ungraded(generation(number)) for number in (4, 3)]
                for sample in left:
                    log.keep(sample)
                sink.take_kept(left)
            else:
                sink.take(generation(3))
                sink.take(generation(4))
            assert done.wait(WAIT)
            assert [s["problem_id"] for s in read_samples(out)] == ["4"]
            assert "3" in [s["problem_id"] for s in read_samples(out, UNGRADED)]
            release.set()
        assert len(read_samples(out)) == 2 and not (out / UNGRADED).exists()


def test_a_judge_that_is_ended_gives_no_verdict(tmp_path, monkeypatch):
    """Interrupted while it waits for the last grade, which then comes from a process that was killed."""
    grade_requested, ended, done = threading.Event(), threading.Event(), threading.Event()

    def stopped(pool, *arguments):
        grade_requested.set()
        assert ended.wait(WAIT)
        return real(pool, "digit", "killed", "3")

    real = GradingPool.grade
    monkeypatch.setattr(GradingPool, "grade", stopped)
    with SampleLog(tmp_path) as log, GradingPool() as judges:
        sink = collector(log, judges, 4)
        inner, finish = sink.threads.shutdown, sink._grade

        def interrupted(wait=True, **options):
            if wait:
                assert grade_requested.wait(WAIT)
                raise KeyboardInterrupt
            inner(wait=wait, **options)

        def noted(sample):
            finish(sample)
            done.set()

        sink.threads.shutdown, sink._grade = interrupted, noted
        with pytest.raises(KeyboardInterrupt), sink:
            sink.take(generation(3))
        ended.set()
        assert done.wait(WAIT)
    assert read_samples(tmp_path) == []
    (kept,) = read_samples(tmp_path, UNGRADED)
    assert kept["problem_id"] == "3" and "correct" not in kept


@pytest.mark.parametrize("where", ["taken", "kept by an earlier run", "there already"])
def test_a_sample_that_comes_twice_is_refused(tmp_path, where):
    with SampleLog(tmp_path) as log, GradingPool() as judges:
        sample = collector(log, judges, 3)._ungraded(generation(0))
        done = [sample | {"correct": True}] if where == "there already" else []
        sink = Collector("dense", 3, "digit", {str(i): "3" for i in range(3)}, log, done, judges)
        if where == "taken":
            sink.take(generation(0))
        elif not done:
            sink.take_kept([sample])
        with pytest.raises(SeergateError, match=r"the sample \('chain_sum', '0', 0\) came twice"), sink:
            sink.take(generation(0))
    assert all(len(read_samples(tmp_path, name)) <= 1 for name in (SAMPLES, UNGRADED))


@contextmanager
def room_for(path, size):
    """As if the disk were full once a file is so many bytes longer: a part of a line still fits."""
    limits, used = resource.getrlimit(resource.RLIMIT_FSIZE), path.stat().st_size if path.exists() else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (used + size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", [SAMPLES, UNGRADED])
def test_a_line_for_which_there_is_no_room_leaves_nothing(tmp_path, name):
    """Neither a part of it at once, nor the rest of it later."""
    with SampleLog(tmp_path) as log, GradingPool() as judges:
        grade = dict.fromkeys(GRADE)
        made = [collector(log, judges, 3)._ungraded(generation(number)) | grade for number in range(3)]
        write = log.keep if name == UNGRADED else log.append
        write(made[0])
        with pytest.raises(OSError, match="File too large"), room_for(tmp_path / name, 20):
            write(made[1])
        write(made[2])
    assert read_samples(tmp_path, name) == [made[0], made[2]]


def test_a_sample_that_cannot_be_kept_stops_whoever_makes_others(tmp_path):
    with SampleLog(tmp_path) as log, GradingPool() as judges:
        sink = collector(log, judges, 2)
        with pytest.raises(OSError, match="File too large"), room_for(tmp_path / UNGRADED, 20):
            sink.take(generation(0))
        with pytest.raises(OSError, match="File too large"):
            sink.take(generation(1))
        with pytest.raises(OSError, match="File too large"), sink:
            pass
    assert read_samples(tmp_path) == read_samples(tmp_path, UNGRADED) == []
