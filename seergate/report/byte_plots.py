"""Accuracy against what decoding was measured to hold and to read: on these axes methods can be compared.

A token budget means something else for every method, and some have none; bytes are bytes.
"""

from __future__ import annotations

from pathlib import Path

from seergate.report.load import Setting, Sweep
from seergate.report.plots import CONVENTIONS, CROWD, LEGEND, WIDTH, conditions, error_bars, pyplot, save, tidy
from seergate.report.styles import style

FIGURES = {"own_bytes_mean": "kB held per sequence, mean", "bytes_read_per_step": "kB read per step"}
"""Metric -> label of its axis."""


def bytes_plot(sweep: Sweep, path: Path) -> Path | None:
    """Two panels: against mean resident bytes, and against bytes read per step. ``None`` with fewer than two points.

    What no setting beats in both, bytes and accuracy, is joined by a grey line, the Pareto front, above guessing;
    series without a setting on either front, but for dense, are grey where there are more than `CROWD` of them.
    """
    measured = [s for s in sweep.settings if all(s.metrics[figure] for figure in FIGURES)]
    if len(measured) < 2:
        return None
    lines = _series(measured)
    chance = sweep.config["task"].get("chance") or 0.0
    fronts = {metric: pareto(measured, metric, chance) for metric in FIGURES}
    ahead = {s.directory for front in fronts.values() for s in front}
    behind = {n for n, own in lines.items() if n != "dense" and not ahead & {s.directory for s in own}}
    grey = behind if len(lines) > CROWD else set()
    figure, axes = pyplot().subplots(2, 1, figsize=(WIDTH, 8.4), sharey=True, layout="constrained")
    for axis, (metric, label) in zip(axes, FIGURES.items(), strict=True):
        for name, settings in lines.items():
            points = sorted(((s.metrics[metric] / 1e3, s) for s in settings), key=lambda point: point[0])
            if name not in grey:
                error_bars(axis, name, list(lines), points)
                continue
            how = {**style(name), "color": "#CCCCCC", "linewidth": 0.8, "markersize": 3, "zorder": 1}
            axis.plot([x for x, _ in points], [100 * s.accuracy.mean for _, s in points], **how)
        if front := [(s.metrics[metric] / 1e3, 100 * s.accuracy.mean) for s in fronts[metric]]:
            (first, _), (_, best), last = front[0], front[-1], max(s.metrics[metric] / 1e3 for s in measured)
            x, y = zip((first, 100 * chance), *front, (last, best), strict=True)
            axis.step(x, y, where="post", color="0.8", linewidth=5, zorder=0, label="Pareto front")
        if grey:
            axis.plot([], [], color="#CCCCCC", linewidth=0.8, label=f"{len(grey)} others")
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set(xlabel=f"{label} (fewer is better: left)", ylabel="accuracy (%)", ylim=(-2, 104))
        tidy(axis)
        axis.legend(**LEGEND)
    figure.suptitle(f"Accuracy against bytes\n{conditions(sweep)}; {CONVENTIONS}", fontsize=10)
    return save(figure, path)


def pareto(settings: list[Setting], metric: str, chance: float) -> list[Setting]:
    """Settings on the Pareto front of accuracy and bytes, above chance, sorted by bytes."""
    front: list[Setting] = []
    for s in sorted(settings, key=lambda s: (float(s.metrics[metric]), -s.accuracy.mean)):
        if s.accuracy.mean > (front[-1].accuracy.mean if front else chance):
            front.append(s)
    return front


def _series(settings: list[Setting]) -> dict[str, list[Setting]]:
    """The points of each line: budgets or thresholds of a series; variants of a method that has neither."""
    lines: dict[str, list[Setting]] = {}
    for s in settings:
        by_threshold = s.method if s.threshold is None else f"{s.series}, thresholds"
        lines.setdefault(by_threshold if s.budget is None else s.series, []).append(s)
    return lines
