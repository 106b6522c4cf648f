"""Evaluation: tasks, generation, grading, resumable runs and their statistics."""

from __future__ import annotations

from seergate.eval.generation.engine import Limit
from seergate.eval.run_config import RunOptions
from seergate.eval.runner import evaluate, sweep
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks.registry import make_task
from seergate.eval.tasks.task import Problem, Task

__all__ = ["Limit", "MethodSpec", "Problem", "RunOptions", "Sampling", "Task", "evaluate", "make_task", "sweep"]
