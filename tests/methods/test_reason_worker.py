"""ReasonCache's worker thread: it leaves the other cores theirs, and nothing that ends it does harm."""

from __future__ import annotations

import threading

import torch

from seergate.reason import worker as reason_worker
from seergate.reason.worker import ThreadWorker


def test_the_worker_computes_on_one_core_and_leaves_the_others_theirs():
    class Looks:
        """Handles an event by looking where it runs."""

        def handle(self, event):
            self.cores = torch.get_num_threads()

    before, later = torch.get_num_threads(), []
    torch.set_num_threads(3)
    worker = ThreadWorker(Looks())
    try:
        worker.put(["an event"])
        assert worker.wait(60) and worker.error is None
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (worker.evaluator.cores, torch.get_num_threads(), later) == (1, 3, [3])
    finally:
        worker.stop()
        torch.set_num_threads(before)


class Acts:
    """Handles an event by doing it."""

    def handle(self, event):
        event()


def leaving():
    raise SystemExit


def test_a_thread_outlives_what_would_end_it():
    worker, seen = ThreadWorker(Acts()), []
    try:
        worker.put([leaving, lambda: seen.append(1)])
        assert worker.wait(60) and isinstance(worker.error, SystemExit)
        worker.put([lambda: seen.append(2)])
        assert worker.wait(60) and not seen, "nothing is decided after an error"
    finally:
        worker.stop()


def test_a_thread_that_is_no_more():
    worker = ThreadWorker(Acts())
    worker.put([lambda: None])
    thread = worker._thread
    worker._events.put(None)  # ends it, as a fork of the process would
    thread.join(60)
    assert not thread.is_alive() and worker.error is None
    worker.put([lambda: None])
    assert str(worker.error) == "its thread has ended" and worker._events.empty()
    worker.put([lambda: None])
    assert worker._events.empty() and worker.wait(0)
    worker.stop()


def test_a_thread_that_cannot_be_started(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    worker = ThreadWorker(Acts())
    worker.put([lambda: None])
    assert str(worker.error) == "can't start new thread" and worker._events.empty() and worker.wait(0)
    worker.stop()


def test_a_thread_that_hangs_before_it_begins(monkeypatch):
    """As where the interpreter is too busy: decoding waits for so long and then goes on without it."""
    released, cores = threading.Event(), torch.get_num_threads()
    monkeypatch.setattr(reason_worker, "START_SECONDS", 0.05)

    class Hanging(ThreadWorker):
        def _run(self, started):
            released.wait(60)
            super()._run(started)

    worker = Hanging(Acts())
    worker.put([lambda: None])
    assert isinstance(worker.error, TimeoutError) and worker._events.empty()
    released.set()
    thread = worker._thread
    worker.stop()
    assert not thread.is_alive() and torch.get_num_threads() == cores
