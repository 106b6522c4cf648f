"""Evaluation: tasks, generation, grading, resumable runs and their statistics."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seergate.eval.engine import Limit
    from seergate.eval.runner import RunOptions, evaluate, sweep
    from seergate.eval.sampling import Sampling
    from seergate.eval.settings import MethodSpec
    from seergate.eval.task import Problem, Task
    from seergate.eval.tasks import make_task

_HOMES = {
    "Limit": "engine",
    "MethodSpec": "settings",
    "Problem": "task",
    "RunOptions": "runner",
    "Sampling": "sampling",
    "Task": "task",
    "evaluate": "runner",
    "make_task": "tasks",
    "sweep": "runner",
}

__all__ = ["Limit", "MethodSpec", "Problem", "RunOptions", "Sampling", "Task", "evaluate", "make_task", "sweep"]


def __getattr__(name: str) -> Any:
    """Import names when they are asked for: the processes that grade need neither torch nor transformers."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"seergate.eval.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
