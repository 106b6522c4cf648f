"""Evaluation: tasks, generation, grading, resumable runs and their statistics."""

from __future__ import annotations

from seergate.eval.runner import RunOptions, evaluate, sweep
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks import Problem, Task, make_task

__all__ = ["MethodSpec", "Problem", "RunOptions", "Sampling", "Task", "evaluate", "make_task", "sweep"]
