"""Grades stored samples again: completions are stored, so a better grader never needs another generation."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.environment import GRADES_WITH, grader_version
from seergate.eval.grading.graders import check_gold, check_grader
from seergate.eval.grading.judge import GradingPool, graded_text
from seergate.eval.grading.programs import PROGRAM
from seergate.eval.runner import write_metrics
from seergate.eval.statistics.intervals import clustered
from seergate.eval.statistics.metrics import by_problem

UNFINISHED = "regrading"
"""A key of the task in `config.yaml` while samples are replaced. A kill leaves it there, so that the run is not
resumed or compared as one of either grader until it has been graded again."""


@dataclass(frozen=True)
class Regraded:
    """Number of samples, accuracy before and after, and (problem, sample, old verdict, new verdict) of each change."""

    total: int
    before: float
    after: float
    changed: list[tuple[str, int, str, str]]


def regrade(
    directory: Path,
    *,
    grader: str | None = None,
    dry_run: bool = False,
    processes: int = 1,
    run_programs: bool = False,
) -> Regraded:
    """Grade the samples of one run directory again and derive its metrics from the new grades. The grader is written
    to the run's configuration, so that the run is not resumed with another one.

    Args:
        grader: a key of `seergate.eval.grading.graders.GRADERS`; the run's own if ``None``.
        dry_run: write nothing.
        run_programs: whether the grader ``program`` may run programs (`seergate.eval.grading.programs`).

    Raises:
        SeergateError: if the directory is not a run, the grader is unknown or cannot grade the right answers, or,
            unless in a dry run, another process is writing to the directory.
    """
    config = store.read_config(directory)
    task = config.get("task")
    if not isinstance(task, dict) or "grader" not in task:
        raise SeergateError(f"{directory / store.CONFIG} has no task.grader; it is not from an evaluation, or damaged")
    name = grader or str(task["grader"])
    # the log keeps other processes from appending; opening it mends the file, which a dry run must not do
    with nullcontext() if dry_run else store.SampleLog(directory):
        samples = store.read_samples(directory)
        if not samples or "completion" not in samples[0]:  # texts that were scored have no answers
            return Regraded(0, float("nan"), float("nan"), [])
        check_grader(name)
        if name == PROGRAM and task["name"] != "humaneval":
            raise SeergateError(f"the grader {PROGRAM!r} is for humaneval only; {directory} is of {task['name']}")
        for sample in samples if grader else ():
            try:
                check_gold(name, sample["gold"])
            except SeergateError as error:
                raise SeergateError(f"{directory}, problem {sample['problem_id']}: {error}") from None
        before = clustered(by_problem(samples, "correct")).mean
        with GradingPool(processes, run_programs=run_programs) as pool:
            grades = pool.grade_all((name, graded_text(s), s["gold"]) for s in samples)
        changed = []
        for sample, grade in zip(samples, grades, strict=True):
            old = _verdict(sample["correct"], sample["pred"], sample.get("grade_reason"))
            sample |= {"pred": grade.pred, "correct": grade.correct, "grade_reason": grade.reason}
            new = _verdict(grade.correct, grade.pred, grade.reason)
            if old != new:
                changed.append((str(sample["problem_id"]), int(sample["sample_idx"]), old, new))
        after = clustered(by_problem(samples, "correct")).mean
        if not dry_run:
            _write(directory, _graded_by(name, config), samples)
    return Regraded(len(samples), before, after, changed)


def _write(directory: Path, config: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Replace the configuration, the samples and the metrics of a run."""
    unfinished = config | {"task": config["task"] | {UNFINISHED: "cut short, to be done again"}}
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    try:
        store.write_yaml(directory / store.CONFIG, unfinished)
        store.write_text(directory / store.SAMPLES, lines)
        store.write_yaml(directory / store.CONFIG, config)
        write_metrics(directory)
    except OSError as error:
        raise SeergateError(f"{directory} is only graded in part: {error}; repeat the command") from error


def _graded_by(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The run's configuration with this grader and the installed version of its library."""
    task = {key: value for key, value in config["task"].items() if key != UNFINISHED}
    environment = {
        key: value for key, value in config.get("environment", {}).items() if key not in GRADES_WITH.values()
    }
    return {**config, "task": {**task, "grader": name}, "environment": environment | grader_version(name)}


def _verdict(correct: bool, pred: str | None, reason: str | None) -> str:
    return f"{'right' if correct else 'wrong'} ({pred!r}; {reason})"
