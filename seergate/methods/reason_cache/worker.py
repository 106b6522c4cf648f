"""Runs the calls of the `Evaluator`, on a separate thread or on the cache's. Errors do not reach decoding."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

START_SECONDS = 10.0
"""Maximum seconds that decoding waits, once, for the thread to start; without a thread nothing is shared."""

Calls = Sequence[Callable[[], Any]]


class Worker:
    """Runs calls in order: at once, or on a thread that starts with the first call.

    After its start, `put` never waits for the thread, which computes on one core and so takes none from decoding.

    Attributes:
        error: the exception of a call, or the reason why there is no thread; later calls are dropped.
    """

    def __init__(self, threaded: bool) -> None:
        self.threaded, self._process = threaded, os.getpid()
        self.error: BaseException | None = None
        self._pool: ThreadPoolExecutor | None = None

    def put(self, calls: Calls) -> None:
        """Run calls, or submit them to the thread."""
        if not self.threaded:
            self._make(calls)
        elif self.error is None:
            try:
                self._running().submit(self._make, calls)
            except Exception as error:  # such as no more threads
                self.error = error

    def _make(self, calls: Calls) -> None:
        if self.error is None:
            try:
                for call in calls:
                    call()
            except BaseException as error:  # sharing saves memory; it must not cost a generation
                if not self.threaded and not isinstance(error, Exception):
                    raise  # an interrupt of the caller
                self.error = error

    def _running(self) -> ThreadPoolExecutor:
        if self._process != os.getpid():
            raise RuntimeError("its thread has ended")  # a fork of the process has none of its threads
        if self._pool is None:
            self._pool, cores = ThreadPoolExecutor(1, "seergate reason_cache"), torch.get_num_threads()
            started = wait([self._pool.submit(self._begin)], START_SECONDS).done
            torch.set_num_threads(cores)  # the default of new threads; existing ones keep their own number
            if not started:
                raise TimeoutError(f"its thread did not start within {START_SECONDS:g} seconds")
        return self._pool

    def _begin(self) -> None:
        torch.get_num_threads()  # a thread takes the default at its first query
        if self.error is None:  # the wait has not timed out
            torch.set_num_threads(1)

    def wait(self, timeout: float) -> bool:
        """Wait until all calls have been made; false if the timeout ends first."""
        return self._pool is None or self.error is not None or bool(wait([self._pool.submit(int)], timeout).done)

    def stop(self) -> None:
        """End the thread; calls that wait are dropped. May be called again."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(cancel_futures=True)
