"""Grades stored samples again: completions are kept, so a better grader never needs another generation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from seergate.eval import store
from seergate.eval.grading import check_grader
from seergate.eval.judge import GradingPool
from seergate.eval.metrics import by_problem
from seergate.eval.runner import write_metrics
from seergate.eval.stats import clustered


@dataclass(frozen=True)
class Regraded:
    """What grading again did.

    Attributes:
        total: samples.
        before, after: accuracy.
        changed: (problem, sample, old verdict, new verdict).
    """

    total: int
    before: float
    after: float
    changed: list[tuple[str, int, str, str]]


def regrade(directory: Path, *, grader: str | None = None, dry_run: bool = False, processes: int = 1) -> Regraded:
    """Grade the samples of one run directory again and derive its metrics anew.

    Args:
        directory: the run directory.
        grader: a key of `seergate.eval.grading.GRADERS`; the task's own if ``None``.
        dry_run: write nothing.
        processes: for the comparisons.

    Raises:
        SeergateError: if the directory is not a run, is being written to, or the grader is unknown.
    """
    name = grader or str(store.read_config(directory)["task"]["grader"])
    check_grader(name)
    with store.SampleLog(directory):  # nobody else may append meanwhile
        samples = store.read_samples(directory)
        if not samples:
            return Regraded(0, float("nan"), float("nan"), [])
        before = clustered(by_problem(samples, lambda s: s["correct"])).mean
        with GradingPool(processes) as pool:
            grades = pool.grade_all((name, s["completion"], s["gold"]) for s in samples)
        changed = []
        for sample, grade in zip(samples, grades, strict=True):
            old = _verdict(sample["correct"], sample["pred"], sample.get("grade_reason"))
            sample |= {"pred": grade.pred, "correct": grade.correct, "grade_reason": grade.reason}
            new = _verdict(grade.correct, grade.pred, grade.reason)
            if old != new:
                changed.append((str(sample["problem_id"]), int(sample["sample_idx"]), old, new))
        after = clustered(by_problem(samples, lambda s: s["correct"])).mean
        if changed and not dry_run:
            lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
            store.write_text(directory / store.SAMPLES, lines)
    if not dry_run:
        write_metrics(directory)
    return Regraded(len(samples), before, after, changed)


def _verdict(correct: bool, pred: str | None, reason: str | None) -> str:
    return f"{'right' if correct else 'wrong'} ({pred!r}; {reason})"
