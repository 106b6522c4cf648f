"""Makes the calls of the `Evaluator`, on a thread of its own or on the cache's. Errors do not reach decoding."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

START_SECONDS = 10.0
"""How long decoding waits, once, for the thread to start; without one nothing is shared."""

Calls = Sequence[Callable[[], Any]]


class Worker:
    """Makes calls in the order in which they come: at once, or on a thread, which starts with the first of them.

    `put` never waits for a thread. It computes on one core, without helpers that would take the cores from decoding.

    Attributes:
        error: the exception of a call, or the reason why there is no thread; later calls are dropped.
    """

    def __init__(self, threaded: bool) -> None:
        self.threaded, self._process = threaded, os.getpid()
        self.error: BaseException | None = None
        self._pool: ThreadPoolExecutor | None = None

    def put(self, calls: Calls) -> None:
        """Hand calls over."""
        if not self.threaded:
            self._make(calls)
        elif self.error is None:
            try:
                self._running().submit(self._make, calls)
            except Exception as error:  # the system has no more threads to give, say
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
            torch.set_num_threads(cores)  # what threads to come get; those that are there have numbers of their own
            if not started:
                raise TimeoutError(f"its thread did not start within {START_SECONDS:g} seconds")
        return self._pool

    def _begin(self) -> None:
        torch.get_num_threads()  # a thread takes the common number when it is first asked
        if self.error is None:  # it has been waited for
            torch.set_num_threads(1)

    def wait(self, timeout: float) -> bool:
        """Wait until all calls have been made; false if the timeout ends first."""
        return self._pool is None or self.error is not None or bool(wait([self._pool.submit(int)], timeout).done)

    def stop(self) -> None:
        """End the thread; calls that wait are dropped. May be called again."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(cancel_futures=True)
