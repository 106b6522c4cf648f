"""Progress on the console: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any


class ProgressBar:
    """A bar per task on a terminal. Elsewhere there are no bars, and `say` prints plain lines.

    Attributes:
        shown: whether there is a terminal.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.shown = wanted and sys.stdout.isatty()
        if self.shown:
            from rich import progress

            self._bar: Any = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[note]}"),
            )
            self._bar.start()

    def add(self, description: str, total: int, done: int = 0) -> object:
        """Begin a task; returns its handle."""
        return self._bar.add_task(description, total=total, completed=done, note="") if self.shown else None

    def update(self, task: object, done: int, note: str) -> None:
        """Show how far a task is, and a note beside it."""
        if self.shown:
            self._bar.update(task, completed=done, note=note)

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.shown:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.shown:
            self._bar.stop()


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
