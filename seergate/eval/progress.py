"""Progress of a sweep on the console: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from typing import Any

from seergate.eval.collector import Progress
from seergate.progress import ProgressBar, duration, notes

LINE_SECONDS = 5.0
"""Minimum seconds between two lines of progress if there is no terminal."""


class EvalProgress:
    """Progress display of a sweep over ``settings`` settings."""

    def __init__(self, settings: int) -> None:
        self.settings, self.started, self.label = settings, 0, ""
        self.began, self.last_line = time.monotonic(), -math.inf
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
        if now.done and (now.done == now.total or time.monotonic() - self.last_line >= LINE_SECONDS):
            self.last_line = time.monotonic()
            done = f"{now.done}/{now.total} {'texts' if now.correct is None else 'answers'}"
            seconds = self.last_line - self.began
            self.bar.say(f"[{self.started}/{self.settings}] {now.label}: {done}, {note} ({seconds:.0f} s)")
