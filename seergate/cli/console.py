"""Console output of commands: errors, and a report's findings."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from seergate.errors import is_users, sentence
from seergate.progress import bars_on_terminals_only, heartbeat

if TYPE_CHECKING:
    from seergate.eval.report.write import Report

OK, USER_ERROR, INTERRUPTED, SIGNALLED = 0, 2, 130, 128
"""Exit codes. After a signal, the exit code is `SIGNALLED` plus the signal's number."""


def guarded(
    run: Callable[[], int | None],
    tell: Callable[[str, BaseException], None] = lambda message, _: print(message, file=sys.stderr),
    interrupted: str = "interrupted; what was finished is kept",
) -> int:
    """Run a command and return its exit code (0 for ``None``). A user error, an interrupt, or an output that nobody
    reads any more (``seergate ... | head -1``) is reported by ``tell`` and becomes an exit code; any other exception
    is a bug and propagates. While the command runs, lines name work that takes long, and a log file gets no progress
    bars (`seergate.progress`).
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


def say_report(report: Report) -> None:
    """Print the report's findings, one per line, and its path."""
    print(
        "\nWhat the report shows:" if report.findings else "\nThere is nothing to compare: no dense run is among them."
    )
    for line in report.findings:
        print(f"- {line}")
    print(f"\nreport: {report.markdown}  (the same with pictures inside: {report.html})")
