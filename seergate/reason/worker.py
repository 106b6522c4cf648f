"""Who runs the `Evaluator`: a thread of its own, or the one that emits the events. Neither can make decoding fail."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import torch

from seergate.reason.evaluator import Evaluator, Event

START_SECONDS = 10.0
"""How long decoding waits, once, for the thread to start; without one nothing is shared."""


class InlineWorker:
    """Handles events at once, in the caller's thread.

    Args:
        evaluator: what handles them.

    Attributes:
        error: what the evaluator raised, if it did; from then on events are ignored and nothing is decided any more.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.error: BaseException | None = None

    def put(self, events: Sequence[Event]) -> None:
        """Hand events over, in the order in which they happened."""
        self._handle(events)

    def _handle(self, events: Sequence[Event]) -> None:
        if self.error is None:
            try:
                for event in events:
                    self.evaluator.handle(event)
            except Exception as error:  # sharing saves memory; it must not cost a generation
                self.error = error

    def wait(self, timeout: float) -> bool:
        """Wait until all events have been handled; whether they have."""
        return True

    def stop(self) -> None:
        """End it. May be called again."""


class ThreadWorker(InlineWorker):
    """Handles events on a thread, which starts with the first of them. `put` never waits for one of them.

    The thread computes on one core, without helpers that would take the cores from decoding. It gives way between two
    small pieces of work: Python runs one thread at a time, and decoding goes first. A thread that cannot be started,
    or that is no more (as in a forked process), is an `error` like any other.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        super().__init__(evaluator)
        self._events: queue.SimpleQueue[Sequence[Event] | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, events: Sequence[Event]) -> None:
        """See `InlineWorker`."""
        if self._thread is None and self.error is None:
            self._start()
        if self._running():
            self._events.put(events)  # otherwise nobody would take them

    def _start(self) -> None:
        cores, started = torch.get_num_threads(), threading.Event()
        thread = threading.Thread(target=self._run, args=(started,), name="seergate reason_cache", daemon=True)
        try:
            thread.start()
        except Exception as error:  # the system has no more threads to give
            self.error = error
            return
        self._thread = thread
        if not started.wait(START_SECONDS):
            self.error = TimeoutError(f"its thread did not start within {START_SECONDS:g} seconds")
        torch.set_num_threads(cores)  # what threads to come get; those that are there have numbers of their own

    def _running(self) -> bool:
        """Whether events will be taken. If the thread has ended, that is noted."""
        if self.error is None and self._thread is not None and not self._thread.is_alive():
            self.error = RuntimeError("its thread has ended")
        return self.error is None

    def _run(self, started: threading.Event) -> None:
        try:
            torch.get_num_threads()  # a thread takes the common number when it is first asked
            if self.error is None:  # it has been waited for
                torch.set_num_threads(1)
        except BaseException as error:
            self.error = error
        started.set()
        while (work := self._events.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
                continue
            try:
                self._handle(work)
            except BaseException as error:  # SystemExit would end a thread without a word
                self.error = error

    def wait(self, timeout: float) -> bool:
        """See `InlineWorker`."""
        if self._thread is None or not self._thread.is_alive():
            return self._events.empty()
        done = threading.Event()
        self._events.put(done)
        return done.wait(timeout)

    def stop(self) -> None:
        """See `InlineWorker`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._events.put(None)
            thread.join(timeout=5)


def give_way() -> None:
    """Let other threads run."""
    time.sleep(0)
