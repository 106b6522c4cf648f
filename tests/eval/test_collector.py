"""Samples are graded while others are generated, and then written."""

import resource
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from seergate.errors import SeergateError
from seergate.eval.collector import Collector
from seergate.eval.generation.samples import Generation, Request
from seergate.eval.grading.judge import GradingPool
from seergate.eval.store import SAMPLES, SampleLog, key_of, read_samples
from tests.eval.test_grading import ENDLESS
from tests.eval.test_runner import small
from tests.support import evaluation as support
from tests.support.killed_run import compared

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


def test_an_error_of_a_grade_ends_the_run_which_then_goes_on(tmp_path, monkeypatch):
    """Beside a file of ungraded samples, which an earlier release left after a kill."""
    whole, real = run(tmp_path / "whole"), GradingPool.grade
    out = tmp_path / "run"
    out.mkdir()
    (out / "ungraded.jsonl").write_text('{"task": "chain_sum", "problem_id": "5-0-')

    def ill(pool, *arguments):
        if read_samples(out):
            raise SeergateError("the judge is ill")
        return real(pool, *arguments)

    with monkeypatch.context() as patch, pytest.raises(SeergateError, match="the judge is ill"):
        patch.setattr(GradingPool, "grade", ill)
        run(out)
    assert len(read_samples(out)) == 1
    seen = []
    assert compared(run(out, on_progress=seen.append)) == compared(whole)
    assert (seen[0].done, seen[-1].done, seen[-1].made) == (1, 4, 3)
    answers = [{key_of(s): s["completion"] for s in read_samples(tmp_path / name)} for name in ("run", "whole")]
    assert answers[0] == answers[1]


def generation(number: int) -> Generation:
    key = ("chain_sum", str(number), 0)
    return Generation(Request(key, "prompt", (5, 6, 7)), rf"\boxed{{ {number % 10} }}", (1, 2), "stop", 0.5, {})


def collector(log, judges, number, done=(), **options):
    golds = {str(i): "3" for i in range(number)}
    return Collector("dense", number, "digit", golds, log, list(done), judges, **options)


def test_every_sample_is_graded_written_and_told_of_once(tmp_path):
    seen = []
    with SampleLog(tmp_path) as log, GradingPool(3) as pool, collector(log, pool, 48, on_progress=seen.append) as sink:
        for number in range(48):
            sink.take(generation(number))
    samples = read_samples(tmp_path)
    assert len(samples) == 48 and sum(s["correct"] for s in samples) == 5
    assert [now.done for now in seen] == list(range(1, 49))
    assert (seen[-1].correct, seen[-1].made, seen[-1].tokens, seen[-1].eta) == (5, 48, 96, 0)


def test_finished_samples_are_kept_when_another_fails(tmp_path, monkeypatch):
    """An error in the generation waits for the grades that are due."""
    failed, real = threading.Event(), GradingPool.grade

    def late(pool, *arguments):
        assert failed.wait(WAIT)
        return real(pool, *arguments)

    monkeypatch.setattr(GradingPool, "grade", late)
    with pytest.raises(EOFError), SampleLog(tmp_path) as log, GradingPool() as pool, collector(log, pool, 3) as sink:
        sink.take(generation(0))
        sink.take(generation(1))
        failed.set()
        raise EOFError
    assert len(read_samples(tmp_path)) == 2


def test_a_judge_that_is_ended_gives_no_verdict(tmp_path, monkeypatch):
    """An interrupt while the last grades are awaited kills the process of the one, and the other never begins."""
    with SampleLog(tmp_path) as log, GradingPool(seconds=60) as judges:
        (judge,), threads, asked = judges._judges, [], threading.Event()
        sink, ask = collector(log, judges, 2), judge._ask
        sink.grader, shutdown = "math", sink.threads.shutdown

        def noted(line, seconds):
            if line is not None:
                threads.append(threading.current_thread())
                asked.set()
            return ask(line, seconds)

        def interrupted(wait=True, **options):
            if wait:
                assert asked.wait(WAIT)
                raise KeyboardInterrupt
            shutdown(wait=wait, **options)

        judge._ask, sink.threads.shutdown = noted, interrupted
        with pytest.raises(KeyboardInterrupt), sink:
            for number in range(2):
                sink.take(replace(generation(number), completion=ENDLESS))
    (grading,) = threads
    grading.join(WAIT)
    assert sink.error is not None and len(threads) == 1 and read_samples(tmp_path) == []


@pytest.mark.parametrize("where", ["taken", "there already"])
def test_a_sample_that_comes_twice_is_refused(tmp_path, where):
    with SampleLog(tmp_path) as log, GradingPool() as judges:
        done = [{"task": "chain_sum", "problem_id": "0", "sample_idx": 0, "correct": True}]
        sink = collector(log, judges, 3, done if where == "there already" else [])
        if where == "taken":
            sink.take(generation(0))
        with pytest.raises(SeergateError, match=r"the sample \('chain_sum', '0', 0\) came twice"), sink:
            sink.take(generation(0))
    assert len(read_samples(tmp_path)) == (where == "taken")


@contextmanager
def room_for(path, size):
    """As if the disk were full once a file is so many bytes longer: a part of a line still fits."""
    limits, used = resource.getrlimit(resource.RLIMIT_FSIZE), path.stat().st_size if path.exists() else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (used + size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_line_for_which_there_is_no_room_leaves_nothing(tmp_path):
    """Neither a part of it at once, nor the rest of it later."""
    with SampleLog(tmp_path) as log, GradingPool() as judges:
        made = [collector(log, judges, 3)._ungraded(generation(n)) | {"pred": None, "correct": None} for n in range(3)]
        log.append(made[0])
        with pytest.raises(OSError, match="File too large"), room_for(tmp_path / SAMPLES, 20):
            log.append(made[1])
        log.append(made[2])
    assert read_samples(tmp_path) == [made[0], made[2]]


def test_a_sample_that_cannot_be_written_stops_the_run(tmp_path):
    with SampleLog(tmp_path) as log, GradingPool() as judges:
        sink = collector(log, judges, 2)
        with pytest.raises(OSError, match="File too large"), room_for(tmp_path / SAMPLES, 20), sink:
            sink.take(generation(0))
        with pytest.raises(OSError, match="File too large"):
            sink.take(generation(1))
    assert read_samples(tmp_path) == []
