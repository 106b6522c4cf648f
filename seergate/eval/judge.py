"""A pool of processes that compare answers. One that takes too long is killed and replaced; the run goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from seergate.errors import SeergateError, how_to_install
from seergate.eval.grading import Grade, grade

SECONDS = 10.0
"""For one comparison. math-verify takes milliseconds on what is meant as an answer."""

START_SECONDS = 120.0
"""For a process to import math-verify, on a machine that is busy."""


class _Judge:
    """One process."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.process: subprocess.Popen[str] | None = None

    def compare(self, gold: str, answer: str) -> tuple[bool, str]:
        if self.process is None:
            self._start()
        reply = self._ask(json.dumps([gold, answer]), self.seconds)
        if reply is None:
            self.close()
            return (
                False,
                f"math-verify was stopped: it took longer than {self.seconds:g} seconds, or ran out of memory",
            )
        correct, reason = json.loads(reply)
        return bool(correct), str(reason)

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "seergate.eval.equivalence"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        if self._ask(None, START_SECONDS) is None:
            self.close()
            raise SeergateError(
                "the process that grades mathematics did not start; try: python -c 'import math_verify'"
            )

    def _ask(self, line: str | None, seconds: float) -> str | None:
        """Write a line (or nothing) and wait for one; ``None`` if it does not come."""
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)  # SIGKILL: a loop inside C code heeds nothing less
        timer.start()
        try:
            if line is not None:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            return process.stdout.readline() or None
        except BrokenPipeError:
            return None
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # what was still in the buffer is of no interest
                        pipe.close()


class GradingPool:
    """Grades completions; threads may share it. A context manager: leaving it ends the processes.

    Args:
        processes: how many comparisons may run at once. They start when first needed.
        seconds: for one comparison.
    """

    def __init__(self, processes: int = 1, seconds: float = SECONDS) -> None:
        self.processes = processes
        self._judges = [_Judge(seconds) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Judge] = queue.SimpleQueue()
        for judge in self._judges:
            self._idle.put(judge)

    def grade(self, grader: str, completion: str, gold: str) -> Grade:
        """Grade one completion; waits for a free process if it needs one.

        Raises:
            SeergateError: for an unknown grader, or if math-verify is needed and not installed.
        """
        return grade(grader, completion, gold, self._equivalent)

    def grade_all(self, items: Iterable[tuple[str, str, str]]) -> list[Grade]:
        """`grade` of many ``(grader, completion, gold)``, in their order, on all processes."""
        with ThreadPoolExecutor(self.processes) as threads:
            return list(threads.map(lambda item: self.grade(*item), items))

    def _equivalent(self, gold: str, answer: str) -> tuple[bool, str]:
        check_installed()
        judge = self._idle.get()
        try:
            return judge.compare(gold, answer)
        finally:
            self._idle.put(judge)

    def close(self) -> None:
        """End the processes."""
        for judge in self._judges:
            judge.close()

    def __enter__(self) -> GradingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_installed() -> None:
    """Refuse to begin what could not be graded.

    Raises:
        SeergateError: if math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise SeergateError(f"grading mathematics needs math-verify; {how_to_install('eval')}")
