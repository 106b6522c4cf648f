"""Accuracy against what decoding was measured to hold and to read: on these axes methods can be compared.

A token budget means something else for every method, and some have none; bytes are bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from seergate.report.load import Setting, Sweep
from seergate.report.plots import conditions, pyplot, save
from seergate.report.styles import line_style, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = {"own_bytes_mean": "kB held per sequence, mean", "bytes_read_per_step": "kB read per step"}
"""Metric -> label of its axis."""


def bytes_plot(sweep: Sweep, path: Path) -> Path | None:
    """Two panels: against mean resident bytes, and against bytes read per step. ``None`` with fewer than two points.

    Error bars are one standard error; dense and what has no budget to vary are single points.
    """
    plt = pyplot()
    from matplotlib.ticker import LogLocator

    measured = [s for s in sweep.settings if all(s.metrics[figure] for figure in FIGURES)]
    if len(measured) < 2:
        return None
    lines = _series(measured)
    height = max(4.4, 0.22 * len(lines) + 1.2)
    figure, axes = plt.subplots(1, 2, figsize=(12.5, height), sharey=True)
    for axis, (metric, label) in zip(axes, FIGURES.items(), strict=True):
        for name, settings in lines.items():
            _line(axis, name, sorted(settings, key=lambda s: float(s.metrics[metric])), metric, list(lines))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(LogLocator(2, subs=(1, 1.5)))
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlabel(label)
        axis.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="accuracy (%)", ylim=(-2, 104))
    axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"Accuracy against bytes\n{conditions(sweep)}; bars: one standard error", fontsize=10)
    return save(figure, path)


def _series(settings: list[Setting]) -> dict[str, list[Setting]]:
    """The points of each line: budgets or thresholds of a series; variants of a method that has neither."""
    lines: dict[str, list[Setting]] = {}
    for s in settings:
        by_threshold = s.method if s.threshold is None else f"{s.series}, thresholds"
        lines.setdefault(by_threshold if s.budget is None else s.series, []).append(s)
    return lines


def _line(axis: Axes, name: str, settings: list[Setting], metric: str, names: list[str]) -> None:
    errors = [0.0 if s.metrics["accuracy_se"] is None else 100 * s.metrics["accuracy_se"] for s in settings]
    how = {**style(name), "linestyle": line_style(name, names)}
    if name == "dense":
        how["marker"] = "o"
        axis.axhline(100 * settings[0].accuracy.mean, color=how["color"], linestyle="--", linewidth=0.8, zorder=1)
    axis.errorbar(
        [s.metrics[metric] / 1e3 for s in settings],
        [100 * s.accuracy.mean for s in settings],
        yerr=errors,
        capsize=2,
        elinewidth=0.8,
        label=name,
        zorder=3 if name.startswith("gate") else 2,
        **how,
    )
