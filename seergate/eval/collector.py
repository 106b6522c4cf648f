"""Takes finished samples: writes them at once, grades them while others are generated, and counts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.generation.engine import Generation
from seergate.eval.grading.judge import GradingPool


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


class Collector:
    """Writes samples and grades them in other threads, because a grade may take seconds.

    A sample is on the disk when `take` returns: first ungraded (`SampleLog.keep`), later graded in `samples.jsonl`.
    A context manager: leaving it waits for all grades; after an error it waits only for those in progress and leaves
    the others to the next run.

    Args:
        golds: problem id -> right answer.
        samples: graded samples that the run already has.
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
        self.made = self.tokens = self.waiting = 0
        self.error: BaseException | None = None
        self.abandoned = False
        self.began, self.lock = time.monotonic(), threading.Lock()
        self.threads = ThreadPoolExecutor(judges.processes, thread_name_prefix="grading")

    def take(self, generation: Generation) -> None:
        """Write a sample and queue it for grading. Several threads may call it.

        Raises:
            SeergateError: if the sample was taken before.
            BaseException: the error of this or an earlier sample; the run cannot continue.
        """
        sample = self._ungraded(generation)
        with self.lock:
            if self.error is not None:
                raise self.error
            try:
                self._note([sample])
                self.log.keep(sample)
            except BaseException as error:  # the other threads stop as well
                self.error = error
                raise
            self.made += 1
            self.tokens += generation.n_tokens
            self._queue([sample])

    def take_kept(self, samples: Sequence[dict[str, Any]]) -> None:
        """Queue the ungraded samples of an earlier run for grading."""
        with self.lock:
            self._note(samples)
            self._queue(samples)

    def _note(self, samples: Sequence[dict[str, Any]]) -> None:
        """Note the samples' keys; raise if one was taken before, because a file with duplicates cannot be read."""
        for key in map(store.key_of, samples):
            if key in self.seen:
                raise SeergateError(f"the sample {key} came twice; this is an error in seergate, please report it")
            self.seen.add(key)

    def _queue(self, samples: Sequence[dict[str, Any]]) -> None:
        self.waiting += len(samples)  # count all first: `_grade` deletes the ungraded samples when none waits
        for sample in samples:
            self.threads.submit(self._grade, sample)

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
            grade = self.judges.grade(self.grader, sample["completion"], sample["gold"])
            with self.lock:
                if self.abandoned:  # the grading processes are being ended, so this grade may be wrong
                    return
                graded = {"pred": grade.pred, "correct": grade.correct, "grade_reason": grade.reason}
                self.log.append({**sample, **graded})
                self.done += 1
                self.correct += grade.correct
                self.waiting -= 1
                if not self.waiting:
                    self.log.forget()
                self.report()
        except BaseException as error:  # `take` raises it in the generating thread
            self.error = self.error or error

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.threads.shutdown(cancel_futures=kind is not None)
        except BaseException:  # an interrupt: the user does not want to wait
            self.abandoned = True
            self.threads.shutdown(wait=False, cancel_futures=True)
            raise
        if kind is None and self.error is not None:
            raise self.error
