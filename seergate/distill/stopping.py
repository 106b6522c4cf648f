"""Signals that stop a run, which then saves a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from seergate.distill.distributed import CommonError

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
"""Signals that a cluster sends before it kills a process, and that of Ctrl-C; a run then saves a checkpoint after the
step and stops. A second Ctrl-C stops at once.
"""


class Stopped(CommonError):
    """Raised when a run has saved a checkpoint after a stop signal; ``signal`` is the number of the signal."""

    def __init__(self, when: str, number: int, resumes: bool) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name} {when}, which is saved; the same command"
            f"{'' if resumes else ', without --no-resume,'} continues"
        )
        self.signal = number


@contextmanager
def stop_requests(is_main: bool, resumes: bool) -> Iterator[set[int]]:
    """Collect the numbers of the `STOP_SIGNALS` that this process receives during the ``with`` block. In the main
    process, the first Ctrl-C prints a message; without ``resumes``, the same command would start over. Signals that
    the process ignores, as a background process ignores Ctrl-C, stay ignored.

    Raises:
        Stopped: at the end of the block, if a signal came too late for a step to take notice of it.
    """
    received: set[int] = set()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield received
        return

    def receive(number: int, _: object) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.add(number)
        if number == signal.SIGINT and is_main:  # not by `print`, which this may have interrupted
            os.write(2, b"\nstopping after this step, which is then saved; Ctrl-C again stops at once\n")

    numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
    before = {n: signal.signal(n, receive) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Stopped("after the last step", max(received), resumes)
