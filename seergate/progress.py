"""Progress on the console: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from seergate.escaping import Terminal, visible


class ProgressBar:
    """One progress bar per task on a terminal. Elsewhere there are no bars, and `say` prints plain lines.

    Attributes:
        shown: whether bars are shown: they are ``wanted`` and standard output is a terminal.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.shown = wanted and sys.stdout.isatty()
        if self.shown:
            from rich import console, progress

            # The bar's own escape sequences must reach the terminal.
            out = sys.stdout.stream if isinstance(sys.stdout, Terminal) else sys.stdout
            self._bar: Any = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[note]}", markup=False),
                console=console.Console(file=out),
            )
            self._bar.start()

    def add(self, description: str, total: int, done: int = 0) -> object:
        """Start a task; returns its handle for `update`."""
        return self._bar.add_task(visible(description), total=total, completed=done, note="") if self.shown else None

    def update(self, task: object, done: int, note: str) -> None:
        """Show the progress of a task, and a note next to it."""
        if self.shown:
            self._bar.update(task, completed=done, note=note)

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


def duration(seconds: float) -> str:
    """A time as text, in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
