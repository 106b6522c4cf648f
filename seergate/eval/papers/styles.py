"""The papers' figures and tables on our own runs: the plot, the table and the findings of each.

Figure numbers without a paper refer to SeerAttention-R (arXiv 2506.08889). Only run directories are read, so a figure
can be made from results that were computed elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from seergate.eval.report.findings import findings
from seergate.eval.report.load import Setting, Sweep
from seergate.eval.report.plots import (
    LEGEND,
    accuracy_plot,
    conditions,
    error_bars,
    new_figure,
    powers_of_two,
    save,
    tidy,
)
from seergate.eval.report.published import PROBLEMS, deviations, model_key, table_1
from seergate.eval.report.tables import NONE, SETTING, Columns, core_table, figure_of, table, table_beside

Points = dict[str, list[tuple[float, Setting]]]
"""Series -> (place on the x axis, setting)."""


class PlotStyle(NamedTuple):
    """Presentation of a figure or table.

    Attributes:
        draw: ``(sweep, path of the image) -> image``, or ``None`` for a table.
        table: the numbers, in Markdown.
        read: the findings, one sentence each, computed from the numbers.
    """

    draw: Callable[[Sweep, Path], Path] | None
    table: Callable[[Sweep], str]
    read: Callable[[Sweep], list[str]]


def _lines(axis: Any, points: Points, sweep: Sweep, xlabel: str) -> None:
    """Plot accuracy with 95 % intervals against any quantity, and dense attention as a horizontal line."""
    for name, line in points.items():
        error_bars(axis, name, list(points), sorted(line, key=lambda point: point[0]))
    if sweep.dense is not None:
        axis.axhline(100 * sweep.dense.accuracy.mean, color="k", linestyle="--", linewidth=1.3, label="dense")
    axis.set(xlabel=xlabel, ylabel="accuracy (%)", ylim=(-2, 104))
    tidy(axis)


def _block_sizes(sweep: Sweep, path: Path) -> Path:
    """Figure 7: accuracy against block size, one line per method and budget."""
    points: Points = defaultdict(list)
    for s in sweep.settings:
        if s.budget is not None and s.block_size is not None:
            name = s.series.replace(f" b{s.block_size}", "", 1)
            points[f"{name} {s.budget} tokens"].append((s.block_size, s))
    figure = new_figure(figsize=(6.8, 4.4), layout=None)
    axis = figure.subplots()
    axis.set_title(f"Accuracy against block size\n{conditions(sweep)}; bars: 95 % intervals", fontsize=10)
    _lines(axis, points, sweep, "block size (tokens)")
    powers_of_two(axis, sorted({int(x) for line in points.values() for x, _ in line}))
    axis.legend(**LEGEND)
    return save(figure, path)


def _threshold_and_budget(sweep: Sweep, path: Path) -> Path:
    """Figure 9: (a) tokens read against the length of the context; (b) accuracy against density."""
    from matplotlib import colormaps

    figure = new_figure(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2)
    budgets = [s for s in sweep.settings if s.budget is not None and s.threshold is None]
    thresholds = [s for s in sweep.settings if s.threshold is not None]
    for group, line in ((budgets, "-"), (thresholds, "--")):
        for i, s in enumerate(group):
            curve = read_curve(s)
            colour = colormaps["viridis"](i / max(1, len(group)))
            left.plot(list(curve), list(curve.values()), line, marker=".", color=colour, label=s.label)
    left.set(xlabel="tokens of context", ylabel="tokens read per KV head and step")
    left.set_title("(a) activated tokens; full lines: budget, dashed: threshold", fontsize=10)
    left.legend(**{**LEGEND, "ncol": 3, "loc": "upper center", "bbox_to_anchor": (0.5, -0.14)})
    tidy(left)
    points: Points = defaultdict(list)
    for limit, group in (("budget", budgets), ("threshold", thresholds)):
        for s in group:
            if s.metrics["density"] is not None:
                points[f"{s.series}, {limit}"].append((100 * s.metrics["density"], s))
    _lines(right, points, sweep, "density: tokens read per token of context (%)")
    right.legend(**LEGEND)
    right.set_title("(b) accuracy against density", fontsize=10)
    return save(figure, path)


def read_curve(setting: Setting) -> dict[float, float]:
    """Context length -> tokens read per step, mean over the samples that reached it."""
    points = [point for s in setting.samples for point in s.get("read_curve") or []]
    if not points:
        return {}
    width = max(1, max(point[0] for point in points) // 40)
    groups: dict[int, list[float]] = defaultdict(list)
    for point in points:
        groups[int(point[0]) // width].append(float(point[1]))
    return {(key + 0.5) * width: sum(values) / len(values) for key, values in sorted(groups.items())}


def length_table(sweep: Sweep) -> str:
    """Table 1: accuracy and mean generation length, with the paper's numbers for settings that it also ran."""
    paper = {s.directory: table_1(s.config) if s.complete else None for s in sweep.settings}
    columns: Columns = {
        **SETTING,
        "accuracy %": figure_of("accuracy", 100),
        "mean length": figure_of("mean_tokens"),
        "published %": lambda _, s: f"{theirs[0]:.1f}" if (theirs := paper[s.directory]) else NONE,
        "published length": lambda _, s: f"{theirs[1]:.1f}k" if (theirs := paper[s.directory]) else NONE,
        "unlike the paper": lambda _, s: "; ".join(deviations(s.config) if paper[s.directory] else ()) or NONE,
    }
    return table(sweep, columns)


def _read_lengths(sweep: Sweep) -> list[str]:
    if sweep.dense is None:
        return ["there is no dense run, so lengths cannot be compared."]
    dense = sweep.dense.metrics["mean_tokens"]
    longest = max((s for s in sweep.settings if s is not sweep.dense), key=lambda s: s.metrics["mean_tokens"])
    ratio = longest.metrics["mean_tokens"] / dense
    lines = [
        f"dense answers take {dense:.0f} tokens on average; the longest, {longest.label}'s, take {ratio:.2f} times as "
        f"many, at {100 * longest.accuracy.mean:.1f} % right."
    ]
    if any(s.metrics["truncation_rate"] > 0 for s in sweep.settings):
        lines.append("answers that hit the length limit count with the limit, so long means are lower bounds.")
    return lines


def _read_spread(sweep: Sweep) -> list[str]:
    """The spread of a method's accuracy over block sizes or dense layers, at each budget."""
    lines = []
    for method in dict.fromkeys(s.method for s in sweep.settings if s.budget is not None):
        for budget in sweep.budgets:
            group = [s for s in sweep.settings if (s.method, s.budget) == (method, budget)]
            if len(group) < 2:
                continue
            best, worst = (pick(group, key=lambda s: s.accuracy.mean) for pick in (max, min))
            if best.accuracy.mean == worst.accuracy.mean:
                lines.append(f"{method} at {budget} tokens: {100 * best.accuracy.mean:.1f} % in all variants.")
                continue
            difference = sweep.difference(best, worst)
            if not difference.n:
                continue
            where = "beyond" if difference.positive else "within"
            lines.append(
                f"{method} at {budget} tokens: from {100 * worst.accuracy.mean:.1f} % ({worst.series}) to "
                f"{100 * best.accuracy.mean:.1f} % ({best.series}), {where} the 95 % interval of the difference."
            )
    return lines


def _read_thresholds(sweep: Sweep) -> list[str]:
    lines = []
    for s in sweep.settings:
        if s is sweep.dense or s.metrics["density"] is None:
            continue
        line = f"{s.label}: density {100 * s.metrics['density']:.0f} %, {100 * s.accuracy.mean:.1f} % right"
        curve = list(read_curve(s).items())
        if len(curve) > 1:
            (first, early), (last, late) = curve[0], curve[-1]
            line += f"; {early:.0f} tokens read near a context of {first:.0f}, {late:.0f} near {last:.0f}"
        lines.append(f"{line}.")
    return lines


STYLES = {
    "by_budget": PlotStyle(accuracy_plot, core_table, findings),
    "spread": PlotStyle(accuracy_plot, core_table, _read_spread),
    "by_block_size": PlotStyle(_block_sizes, core_table, _read_spread),
    "by_threshold": PlotStyle(_threshold_and_budget, core_table, _read_thresholds),
    "costs": PlotStyle(None, core_table, findings),
    "length_table": PlotStyle(None, length_table, _read_lengths),
}

COMPLETE = {**PROBLEMS, "gpqa_diamond": 198, "gsm8k": 1319}
"""Task -> number of its problems."""


def beside(sweep: Sweep, published: Mapping[tuple[str, str], Mapping[str, float]], paper: Mapping[str, Any]) -> str:
    """A Markdown table of our and a paper's accuracy, for finished runs of the paper's settings; empty without any.

    A run counts if it has the paper's model, all problems of its task in the task's own prompt, and the method with
    the options under which the paper's number is known. Other deviations from the paper are named in the row.

    Args:
        sweep: the runs.
        published: (model, task) -> directory of a run -> right answers in percent.
        paper: the paper's settings; only those in a run's record of its generation are compared.
    """
    task = sweep.config["task"]
    numbers = published.get((model_key(sweep.config), str(task["name"])), {})
    everything = task.get("problems") is None and task.get("n_problems") == COMPLETE.get(task["name"])
    if not everything or "shots" in task:
        return ""

    def unlike(s: Setting) -> list[str]:
        ours = s.config["generation"]
        different = [name for name in paper if name in ours and ours[name] != paper[name]]
        return [f"{name.replace('_', '-')} {ours[name]} instead of {paper[name]}" for name in different]

    return table_beside(sweep, lambda s: numbers.get(s.directory.name), unlike)
