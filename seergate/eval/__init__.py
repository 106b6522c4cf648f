"""Evaluation: tasks, generation, grading, resumable runs and their statistics."""

from __future__ import annotations

from seergate.eval.engine import Limit
from seergate.eval.run_config import RunOptions
from seergate.eval.runner import evaluate, sweep
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.eval.task import Problem, Task
from seergate.eval.tasks import make_task

__all__ = ["Limit", "MethodSpec", "Problem", "RunOptions", "Sampling", "Task", "evaluate", "make_task", "sweep"]
