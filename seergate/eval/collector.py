"""Takes finished samples: grades them while others are generated, writes them and counts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.generation.samples import Generation
from seergate.eval.grading.judge import GradingPool, graded_text


@dataclass(frozen=True)
class Progress:
    """Progress of a setting: samples ``done`` of ``total``, how many are ``correct`` (``None`` if nothing is graded);
    and samples ``made``, ``tokens`` generated and ``seconds`` spent since the run was started or resumed.
    """

    label: str
    done: int
    total: int
    correct: int | None
    made: int
    tokens: int
    seconds: float

    @property
    def eta(self) -> float | None:
        """Estimated seconds until the setting is done; ``None`` until a tenth of the missing samples is made, because
        the first samples of a batch end late and together.
        """
        left = self.total - self.done
        return self.seconds * left / self.made if self.made and 10 * self.made >= self.made + left else None


class Collector(AbstractContextManager["Collector"]):
    """Grades samples in other threads, because a grade may take seconds, and writes them to ``samples.jsonl``.

    A context manager: leaving it waits for all grades. A sample whose grade fails or is killed is not written, and the
    next run makes it again.

    Args:
        golds: problem id -> right answer.
        samples: samples that the run already has.
        on_progress: called after every grade, from a grading thread; one call at a time.
    """

    def __init__(
        self,
        label: str,
        total: int,
        grader: str,
        golds: Mapping[str, str],
        log: store.SampleLog,
        samples: Sequence[dict[str, Any]],
        judges: GradingPool,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.label, self.total, self.grader, self.golds = label, total, grader, golds
        self.log, self.judges, self.on_progress = log, judges, on_progress
        self.seen = set(map(store.key_of, samples))
        self.done, self.correct = len(samples), sum(sample["correct"] for sample in samples)
        self.made = self.tokens = 0
        self.error: BaseException | None = None
        self.began, self.lock = time.monotonic(), threading.Lock()
        self.threads = ThreadPoolExecutor(judges.processes, thread_name_prefix="grading")

    def take(self, generation: Generation) -> None:
        """Queue a sample to be graded and written.

        Raises:
            SeergateError: if the sample was taken before, because a file with duplicates cannot be read.
            BaseException: the error of an earlier sample; the run cannot continue.
        """
        if self.error is not None:
            raise self.error
        key = generation.request.key
        if key in self.seen:
            raise SeergateError(f"the sample {key} came twice; this is an error in seergate, please report it")
        self.seen.add(key)
        self.made += 1
        self.tokens += generation.n_tokens
        self.threads.submit(self._grade, self._ungraded(generation))

    def report(self) -> None:
        """Call the progress listener."""
        if self.on_progress is not None:
            counts = self.done, self.total, self.correct, self.made, self.tokens
            self.on_progress(Progress(self.label, *counts, time.monotonic() - self.began))

    def _ungraded(self, generation: Generation) -> dict[str, Any]:
        """A line of `samples.jsonl` without the grade."""
        task, problem_id, sample_idx = generation.request.key
        return {
            "task": task,
            "problem_id": problem_id,
            "sample_idx": sample_idx,
            "seed": generation.request.seed,
            "prompt": generation.request.prompt,
            "completion": generation.completion,
            "n_prompt_tokens": len(generation.request.ids),
            "n_tokens": generation.n_tokens,
            "finish_reason": generation.finish_reason,
            "gold": self.golds[problem_id],
            "seconds": round(generation.seconds, 6),
            **generation.costs,
        }

    def _grade(self, sample: dict[str, Any]) -> None:
        try:
            grade = self.judges.grade(self.grader, graded_text(sample), sample["gold"])
            with self.lock:
                self.log.append(sample | {"pred": grade.pred, "correct": grade.correct, "grade_reason": grade.reason})
                self.done += 1
                self.correct += grade.correct
                self.report()
        except BaseException as error:  # raised in the generating thread, by `take` or at the end
            self.error = self.error or error

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.threads.shutdown()
        except BaseException:  # an interrupt: the user does not want to wait
            self.threads.shutdown(wait=False, cancel_futures=True)
            raise
        if kind is None and self.error is not None:
            raise self.error
