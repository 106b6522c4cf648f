"""The plot of a model card: accuracy against token budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

DPI = 120


def results_plot(results: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw accuracy against budget, a line per task and method, with standard errors; dense is a horizontal line.

    Args:
        results: see `Adapter.results`.
        path: of the PNG file.

    Returns:
        Whether there is a plot: not without results at a budget, nor without matplotlib.
    """
    lines: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for result in results:
        budget, accuracy = result.get("token_budget"), result.get("accuracy")
        if isinstance(budget, int) and isinstance(accuracy, (int, float)):
            key = str(result.get("task", "")), str(result.get("method", ""))
            lines.setdefault(key, []).append((budget, 100 * accuracy, 100 * (result.get("standard_error") or 0.0)))
    if not lines:
        return False
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter, ScalarFormatter
    except ImportError:
        return False
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")  # no pyplot: its state would be the process's
    axes = figure.add_subplot()
    tasks = sorted({task for task, _ in lines})
    for (task, method), points in lines.items():
        budgets, means, errors = zip(*sorted(points), strict=True)
        axes.errorbar(budgets, means, yerr=errors, marker="o", capsize=3, label=_label(task, method, tasks))
    for result in results:
        if result.get("method") == "dense" and isinstance(result.get("accuracy"), (int, float)):
            name = _label(str(result.get("task", "")), "dense", tasks)
            axes.axhline(100 * result["accuracy"], color="black", linestyle="--", linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({budget for points in lines.values() for budget, _, _ in points}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="token budget", ylabel="accuracy (%)", ylim=(0, 104))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return True


def _label(task: str, method: str, tasks: list[str]) -> str:
    return method if len(tasks) == 1 else f"{method}, {task}"
