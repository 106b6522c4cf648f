"""ReasonCache's worker thread: it leaves the other cores theirs, and nothing that ends it does harm."""

import threading
from functools import partial

import pytest
import torch

from seergate.methods.reason_cache import worker as reason_worker
from seergate.methods.reason_cache.worker import Worker


def test_the_worker_computes_on_one_core_and_leaves_the_others_theirs():
    before, seen, later = torch.get_num_threads(), [], []
    torch.set_num_threads(3)
    worker = Worker(threaded=True)
    try:
        worker.put([lambda: seen.append(torch.get_num_threads())])
        assert worker.wait(60) and worker.error is None
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (seen, torch.get_num_threads(), later) == ([1], 3, [3])
    finally:
        worker.stop()
        torch.set_num_threads(before)


def raising(kind):
    raise kind


def test_a_thread_outlives_what_would_end_it():
    worker, seen = Worker(threaded=True), []
    try:
        worker.put([partial(raising, SystemExit), lambda: seen.append(1)])
        assert worker.wait(60)
        worker.put([lambda: seen.append(2)])
        assert isinstance(worker.error, SystemExit) and worker.wait(60) and not seen, "nothing is decided any more"
    finally:
        worker.stop()


def test_without_a_thread_an_interrupt_is_the_callers():
    worker = Worker(threaded=False)
    with pytest.raises(KeyboardInterrupt):
        worker.put([partial(raising, KeyboardInterrupt)])
    assert worker.error is None


def test_a_thread_that_is_no_more():
    worker, seen = Worker(threaded=True), []
    worker.put([lambda: seen.append(1)])
    assert worker.wait(60)
    worker._process = -1  # a fork of the process has none of its threads
    for _ in range(2):
        worker.put([lambda: seen.append(2)])
        assert str(worker.error) == "its thread has ended" and worker.wait(0) and seen == [1]
    worker._pool.shutdown()


def test_a_thread_that_cannot_be_started(monkeypatch):
    worker, seen = Worker(threaded=True), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: raising(RuntimeError("can't start new thread")))
        worker.put([lambda: seen.append(1)])
    assert str(worker.error) == "can't start new thread" and worker.wait(0) and not seen
    worker.stop()


def test_a_thread_that_hangs_before_it_begins(monkeypatch):
    """As where the interpreter is too busy: decoding waits for so long and then goes on without it."""
    released, cores, seen = threading.Event(), torch.get_num_threads(), []
    monkeypatch.setattr(reason_worker, "START_SECONDS", 0.05)

    class Hanging(Worker):
        def _begin(self):
            released.wait(60)
            super()._begin()

    worker = Hanging(threaded=True)
    worker.put([lambda: seen.append(1)])
    assert isinstance(worker.error, TimeoutError)
    released.set()
    worker.stop()
    assert not seen and torch.get_num_threads() == cores
