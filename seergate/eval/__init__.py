"""Evaluation: tasks, generation, grading, resumable runs and their statistics."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seergate.eval.generation.samples import Limit
    from seergate.eval.run_config import RunOptions
    from seergate.eval.runner import evaluate, sweep
    from seergate.eval.sampling import Sampling
    from seergate.eval.settings import MethodSpec
    from seergate.eval.tasks.registry import make_task
    from seergate.eval.tasks.task import Problem, Task

_HOMES = {
    "Limit": "generation.samples",
    "MethodSpec": "settings",
    "Problem": "tasks.task",
    "RunOptions": "run_config",
    "Sampling": "sampling",
    "Task": "tasks.task",
    "evaluate": "runner",
    "make_task": "tasks.registry",
    "sweep": "runner",
}

__all__ = ["Limit", "MethodSpec", "Problem", "RunOptions", "Sampling", "Task", "evaluate", "make_task", "sweep"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: training reads the tasks, which import neither torch nor transformers."""
    if name in _HOMES:
        return getattr(import_module(f"seergate.eval.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'seergate.eval' has no attribute {name!r}")
