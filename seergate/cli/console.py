"""Console output of commands: errors, progress (a bar on a terminal, else plain lines), and a report's findings."""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from seergate.errors import is_users, sentence
from seergate.escaping import visible
from seergate.progress import ProgressBar, bars_on_terminals_only, duration, heartbeat

if TYPE_CHECKING:
    from seergate.eval.collector import Progress
    from seergate.eval.report.write import Report


OK, USER_ERROR, INTERRUPTED, SIGNALLED = 0, 2, 130, 128
"""Exit codes. After a signal, the exit code is `SIGNALLED` plus the signal's number."""

LINE_SECONDS = 5.0
"""Minimum seconds between two lines of progress if there is no terminal."""


def guarded(
    run: Callable[[], int | None],
    tell: Callable[[str, BaseException], None] = lambda message, _: print(message, file=sys.stderr),
    interrupted: str = "interrupted; what was finished is kept",
) -> int:
    """Run a command and return its exit code (0 for ``None``). A user error, an interrupt, or an output that nobody
    reads any more (``seergate ... | head -1``) is reported by ``tell`` and becomes an exit code; any other exception
    is a bug and propagates. While the command runs, it is never silent for long, and a log file gets no progress bars
    (`seergate.progress`).
    """
    try:
        with heartbeat(wanted=os.environ.get("RANK", "0") == "0"), bars_on_terminals_only():
            return run() or OK
    except BrokenPipeError as error:
        if not _discard_unread():
            raise
        tell("stopped, as nothing reads the output any more (broken pipe); what was finished is kept", error)
        return SIGNALLED + signal.SIGPIPE
    except (ValueError, OSError) as error:
        if not is_users(error):
            raise
        number = getattr(error, "signal", None)
        tell(sentence(error) if number else f"error: {sentence(error)}", error)
        return SIGNALLED + number if number else USER_ERROR
    except KeyboardInterrupt as error:
        tell(interrupted, error)
        return INTERRUPTED


def _discard_unread() -> bool:
    """Send output streams whose pipe is broken to the null device; return whether there are any."""
    unread = False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(io.UnsupportedOperation):  # a stream without a file
            poller = select.poll()
            poller.register(number := stream.fileno(), 0)  # asks for errors only
            if poller.poll(0):
                unread = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return unread


@contextlib.contextmanager
def notes(say: Callable[[str], object]) -> Iterator[None]:
    """Pass warnings to ``say`` as single lines, without source locations."""

    def show(message: Warning | str, *_: object) -> None:
        say(visible(f"note: {' '.join(str(message).split())}"))

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


class EvalProgress:
    """Progress display of a sweep over ``settings`` settings."""

    def __init__(self, settings: int) -> None:
        self.settings, self.started, self.label = settings, 0, ""
        self.began, self.said = time.monotonic(), -math.inf
        self.bar = ProgressBar()
        self.task: Any = None
        self.notes = notes(self.bar.say)

    def __enter__(self) -> EvalProgress:
        self.notes.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()
        self.notes.__exit__(*error)

    def __call__(self, now: Progress) -> None:
        """Show the progress after a finished sample."""
        if now.label != self.label:
            self.label = now.label
            self.started += 1
            self.task = self.bar.add(now.label, now.total)
        parts = []
        if now.done == now.total and now.correct is not None:  # before that, short answers are over-represented
            parts.append(f"{100 * now.correct / now.done:.0f} % right")
        if now.tokens:
            parts.append(f"{now.tokens / max(1e-9, now.seconds):.0f} tokens/s")
        if now.eta:
            parts.append(f"{duration(now.eta)} left")
        note = ", ".join(parts)
        self.bar.update(self.task, now.done, note)
        if self.bar.shown:
            return
        if now.done and (now.done == now.total or time.monotonic() - self.said >= LINE_SECONDS):
            self.said = time.monotonic()
            seconds = self.said - self.began
            self.bar.say(
                f"[{self.started}/{self.settings}] {now.label}: {now.done}/{now.total} answers, {note} "
                f"({seconds:.0f} s)"
            )


def say_report(report: Report) -> None:
    """Print the report's findings, one per line, and its path."""
    print(
        "\nWhat the report shows:" if report.findings else "\nThere is nothing to compare: no dense run is among them."
    )
    for line in report.findings:
        print(f"- {line}")
    print(f"\nreport: {report.markdown}  (the same with pictures inside: {report.html})")
