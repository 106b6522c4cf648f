"""A pool of processes that compare answers. A process that takes too long is killed and replaced; the run goes on.

The limit is in processor time, so that a verdict does not depend on the load of the machine. If a process dies, that
counts as a verdict only if the comparison itself caused it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

from seergate.errors import SeergateError, how_to_install
from seergate.eval.grading import equivalence
from seergate.eval.grading.graders import Grade, grade
from seergate.eval.grading.programs import PROGRAM, check_programs_run, run_program

SECONDS = 10.0
"""Maximum processor time of a comparison. math-verify takes milliseconds for an ordinary answer."""

WALL = 6
"""Wall-clock limit as a multiple of the processor time, for idle processes and systems without the other limit."""

START_SECONDS = 120.0
"""Maximum seconds for a process to import math-verify on a busy machine."""

FAULTS = {-signal.SIGSEGV: "crashed", -signal.SIGABRT: "crashed", equivalence.OUT_OF_MEMORY: "ran out of memory"}
"""Exit statuses that the comparison itself causes, in words; they count as verdicts."""


class _Judge:
    """One grading process, which starts when it is first needed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.process: subprocess.Popen[str] | None = None

    def compare(self, gold: str, answer: str) -> tuple[bool, str]:
        """Compare an answer with the gold answer; return the verdict and its reason in words."""
        if self.process is not None and self.process.poll() is not None:  # killed while it was idle
            self._end()
        try:
            if self.process is None:
                self._start()
            reply, late = self._ask(json.dumps([gold, answer]), WALL * self.seconds)
        except BaseException:  # such as an interrupt: a late reply must not be taken for the next answer's
            self._end()
            raise
        if reply is not None:
            correct, reason = json.loads(reply)
            return bool(correct), str(reason)
        status = self._end()
        if late:
            fault: str | None = f"took longer than {WALL * self.seconds:g} seconds"
        elif hasattr(signal, "SIGPROF") and status == -signal.SIGPROF:
            fault = f"took more than {self.seconds:g} seconds of processor time"
        else:
            fault = FAULTS.get(status or 0)
        if fault is None:
            raise SeergateError(
                f"the process that grades mathematics was killed from outside (exit status {status}; -9 may mean that "
                "the machine has too little memory); the answer has no grade yet: run the same command again"
            )
        return False, f"math-verify was stopped: it {fault}"

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", equivalence.__file__, str(self.seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a terminal's Ctrl-C is for the main process, which then ends this one
        )
        if self._ask(None, START_SECONDS)[0] is None:
            raise SeergateError(
                "the process that grades mathematics did not start; try: python -c 'import math_verify'"
            )

    def _ask(self, line: str | None, seconds: float) -> tuple[str | None, bool]:
        """Write a line (or nothing) and wait for a reply. Return the reply, ``None`` if there is none, and whether the
        process was killed for taking too long.
        """
        process, late = self.process, threading.Event()
        assert process is not None and process.stdin is not None and process.stdout is not None

        def kill() -> None:
            late.set()
            process.kill()  # SIGKILL: a loop inside C code ignores weaker signals

        timer = threading.Timer(seconds, kill)
        timer.start()
        reply = ""
        try:
            if line is not None:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        return (reply if reply.endswith("\n") else None), late.is_set()

    def _end(self) -> int | None:
        """End the process, if any, and return its exit status (its own if it had already died); else ``None``."""
        process, self.process = self.process, None
        if process is None:
            return None
        process.kill()
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was still in the buffer is of no interest
                    pipe.close()
        return status


def graded_text(sample: dict[str, Any]) -> str:
    """A sample's completion; after ``<think>`` if its prompt ends so and it was cut: such reasoning is no answer."""
    opened = sample.get("finish_reason") == "length" and str(sample.get("prompt", "")).rstrip().endswith("<think>")
    return ("<think>" if opened else "") + str(sample["completion"])


class GradingPool(AbstractContextManager["GradingPool"]):
    """Grades completions; threads may share it. A context manager: leaving it ends the processes.

    Args:
        processes: maximum number of comparisons at once; the processes start when they are first needed.
        seconds: maximum processor time of one comparison.
        run_programs: whether programs in completions may run (`seergate.eval.grading.programs`).
    """

    def __init__(self, processes: int = 1, seconds: float = SECONDS, run_programs: bool = False) -> None:
        self.processes, self.run_programs = processes, run_programs
        self._judges = [_Judge(seconds) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Judge] = queue.SimpleQueue()
        for judge in self._judges:
            self._idle.put(judge)

    def grade(self, grader: str, completion: str, gold: str) -> Grade:
        """Grade one completion; waits for a free process if it needs one.

        Raises:
            SeergateError: for an unknown grader, if math-verify is needed and not installed, or if the process that
                runs it was killed from outside; and if the completion holds a program, which must not run.
        """
        if grader == PROGRAM:
            check_programs_run(self.run_programs)
            return grade(grader, completion, gold, run_program)
        return grade(grader, completion, gold, self._equivalent)

    def grade_all(self, items: Iterable[tuple[str, str, str]]) -> list[Grade]:
        """Grade many ``(grader, completion, gold)`` on all processes; the grades are in the same order."""
        with ThreadPoolExecutor(self.processes) as threads:
            return list(threads.map(lambda item: self.grade(*item), items))

    def _equivalent(self, gold: str, answer: str) -> tuple[bool, str]:
        check_installed()
        judge = self._idle.get()
        try:
            return judge.compare(gold, answer)
        finally:
            self._idle.put(judge)

    def __exit__(self, *error: object) -> None:
        for judge in self._judges:
            judge._end()


def check_installed() -> None:
    """Raise `SeergateError` if math-verify, which grades mathematics, is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise SeergateError(f"grading mathematics needs math-verify; {how_to_install('eval')}")


@functools.cache
def try_judge() -> None:
    """Raise `SeergateError` if math-verify is not installed or does not start."""
    check_installed()
    with GradingPool(1) as pool:
        pool._judges[0]._start()
