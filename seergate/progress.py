"""Progress on the console: a bar on a terminal, plain lines elsewhere, and a line where a command is silent."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from seergate.escaping import Terminal, visible

SILENT_SECONDS = 10.0
"""Seconds without output after which a command prints a line about its work."""


class _Work:
    """Work in progress: what it is, and when it began."""

    def __init__(self, text: str) -> None:
        self.text, self.began = text, time.monotonic()


_works: list[_Work] = []
_threads: list[threading.Thread] = []


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Name the work of the ``with`` block in the lines of `heartbeat`, such as ``loading the model``."""
    work = _Work(what)
    _works.append(work)
    try:
        yield
    finally:
        _works.remove(work)


class _Watched:
    """A text stream that notes the time of the last output to any stream of its kind."""

    written = 0.0

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text, and note the time."""
        _Watched.written = time.monotonic()
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def heartbeat(wanted: bool = True) -> Iterator[None]:
    """In the ``with`` block, print a line to standard error whenever nothing was printed for `SILENT_SECONDS`, such as
    ``still loading the model (20 s)``. Has no effect inside of another such block or if it is not ``wanted``.
    """
    if _threads or not wanted or sys.stdout is None or sys.stderr is None:
        yield
        return
    out, error = _Watched(sys.stdout), _Watched(sys.stderr)
    began, ended = _Work("working"), threading.Event()

    def beat() -> None:
        while not ended.wait(max(0.01, _Watched.written + SILENT_SECONDS - time.monotonic())):
            if time.monotonic() - _Watched.written >= SILENT_SECONDS:
                work = [began, *(each for each in _works.copy() if each.began >= began.began)][-1]
                with contextlib.suppress(OSError, ValueError):  # nobody reads the stream, or it is closed
                    print(f"still {work.text} ({duration(time.monotonic() - work.began)})", file=error, flush=True)

    _Watched.written = time.monotonic()
    _threads.append(threading.Thread(target=beat, name="heartbeat", daemon=True))
    _threads[0].start()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):  # type: ignore[type-var]
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
        self.shown, self._wanted = wanted and sys.stdout is not None and sys.stdout.isatty(), wanted
        self._work: _Work | None = None
        if self.shown:
            from rich import console, progress

            # The bar's own escape sequences must reach the terminal.
            out: Any = sys.stdout
            while isinstance(out, (Terminal, _Watched)):
                out = out.stream
            self._bar: Any = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[note]}", markup=False),
                console=console.Console(file=_Watched(out)),  # type: ignore[arg-type]
            )
            self._bar.start()

    def add(self, description: str, total: int, done: int = 0) -> Any:
        """Start a task; returns its handle for `update`."""
        description = visible(description)
        if self.shown:
            return self._bar.add_task(description, total=total, completed=done, note="")
        self._forget()
        if self._wanted:
            self._work = _Work(f"at {description}, {done}/{total}")
            _works.append(self._work)
        return description, total

    def update(self, task: Any, done: int, note: str) -> None:
        """Show the progress of a task, and a note next to it."""
        if self.shown:
            self._bar.update(task, completed=done, note=note)
        elif self._work is not None:
            description, total = task
            self._work.text = f"at {description}, {done}/{total}" + (f", {note}" if note else "")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.shown:
            self._bar.console.print(visible(line), markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Stop updating; the bars stay on the screen."""
        if self.shown:
            self._bar.stop()
        self._forget()

    def _forget(self) -> None:
        if self._work in _works:
            _works.remove(self._work)


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
