"""Progress on the console: a bar on a terminal, plain lines elsewhere, and a line about work that takes long."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from seergate.escaping import Terminal, visible

SILENT_SECONDS = 10.0
"""Seconds between two lines of a command about the same work, and before the first."""

_works: list[tuple[str, float]] = []
_threads: list[threading.Thread] = []


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Name the work of the ``with`` block in the lines of `heartbeat`, such as ``loading the model``."""
    work = what, time.monotonic()
    _works.append(work)
    try:
        yield
    finally:
        _works.remove(work)


@contextlib.contextmanager
def heartbeat(wanted: bool = True) -> Iterator[None]:
    """In the ``with`` block, print a line to standard error every `SILENT_SECONDS` while the innermost `working` block
    lasts, such as ``still loading the model (20 s)``, unless a `ProgressBar` is shown. Has no effect inside of another
    such block or if it is not ``wanted``.
    """
    if _threads or not wanted or sys.stderr is None:
        yield
        return
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(SILENT_SECONDS):
            for what, began in _works[-1:]:
                seconds = time.monotonic() - began
                if seconds < SILENT_SECONDS or hasattr(sys.stdout, "rich_proxied_file"):
                    continue
                from tqdm import tqdm

                with contextlib.suppress(OSError, ValueError):  # nobody reads the stream, or it is closed
                    tqdm.write(f"still {what} ({duration(seconds)})", file=sys.stderr)  # above bars of libraries

    _threads.append(threading.Thread(target=beat, name="heartbeat", daemon=True))
    _threads[0].start()
    try:
        yield
    finally:
        ended.set()
        _threads.pop().join()


@contextlib.contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """In the ``with`` block, hide the bars of libraries unless standard error is a terminal: in a file, each update of
    a bar would be a line.
    """
    if sys.stderr is None or sys.stderr.isatty():
        yield
        return
    from tqdm import tqdm  # all libraries' bars are of this class or of a subclass

    before = tqdm.__init__
    tqdm.__init__ = functools.partialmethod(before, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = before


class ProgressBar:
    """One progress bar per task on a terminal. Elsewhere there are no bars: `say` prints plain lines, and `heartbeat`
    names the last task.

    Attributes:
        shown: whether bars are shown: they are ``wanted`` and standard output is a terminal.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        from rich import console, progress

        self.shown = wanted and sys.stdout is not None and sys.stdout.isatty()
        self._named = wanted and not self.shown
        self._working = contextlib.ExitStack()
        # The bar's own escape sequences must reach the terminal.
        out: Any = sys.stdout
        while isinstance(out, Terminal):
            out = out.stream
        self._bar: Any = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[note]}", markup=False),
            console=console.Console(file=out),
            disable=not self.shown,
        )
        self._bar.start()

    def add(self, description: str, total: int, done: int = 0) -> Any:
        """Start a task; returns its handle for `update`."""
        self._name(f"at {visible(description)}, {done}/{total}")
        return self._bar.add_task(visible(description), total=total, completed=done, note="")

    def update(self, task: Any, done: int, note: str) -> None:
        """Show the progress of a task, and a note next to it."""
        self._bar.update(task, completed=done, note=note)
        shown = self._bar.tasks[task]
        self._name(f"at {shown.description}, {done}/{shown.total}" + (f", {note}" if note else ""))

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.shown:
            self._bar.console.print(visible(line), markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Stop updating; the bars stay on the screen."""
        if self.shown:  # older releases of rich end a disabled bar with an empty line
            self._bar.stop()
        self._name("")

    def _name(self, text: str) -> None:
        """Name the work in the lines of `heartbeat` from now on, unless bars are shown; an empty text ends it."""
        self._working.close()
        if text and self._named:
            self._working.enter_context(working(text))


def duration(seconds: float) -> str:
    """A time as text, in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def notes(say: Callable[[str], object]) -> Iterator[None]:
    """Pass warnings to ``say`` as single lines, without source locations."""

    def show(message: Warning | str, *_: object) -> None:
        say(visible(f"note: {' '.join(str(message).split())}"))

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield
