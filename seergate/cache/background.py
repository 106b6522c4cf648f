"""Background: work that goes on while the decoding thread does other things, and must be done before it is needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class Job:
    """Work that has been handed over. Doing it twice must be the same as doing it once.

    Args:
        work: what is to be done.
        future: of the thread that it was handed to.
    """

    def __init__(self, work: Callable[[], None], future: Future[None]) -> None:
        self._work, self._future, self._process = work, future, os.getpid()

    def finish(self) -> None:
        """Return when it is done. What the thread has not begun yet is done here, and so is, in a forked process, what
        its parent's thread may have been doing.

        Raises:
            BaseException: whatever the work raised.
        """
        if self._process != os.getpid() or self._future.cancel():
            self._work()
        else:
            self._future.result()


class Background:
    """One thread that does jobs in their order.

    It starts with the first job and ends with this object or the process; a forked process gets its own. It computes
    on one core, without helpers that would take the cores from decoding.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0

    def __reduce__(self) -> tuple[type[Background], tuple[()]]:
        return Background, ()  # a copy has a thread of its own

    def start(self, work: Callable[[], None]) -> Job:
        """Hand work over."""
        if self._executor is None or self._process != os.getpid():
            self._executor, self._process = _one_thread(), os.getpid()
        return Job(work, self._executor.submit(work))


def _one_thread() -> ThreadPoolExecutor:
    cores = torch.get_num_threads()
    executor = ThreadPoolExecutor(1, "seergate background", initializer=_on_one_core)
    executor.submit(torch.get_num_threads).result()  # it has started
    torch.set_num_threads(cores)  # what threads to come get; those that are there have numbers of their own
    return executor


def _on_one_core() -> None:
    torch.get_num_threads()  # a thread takes the common number when it is first asked
    torch.set_num_threads(1)
