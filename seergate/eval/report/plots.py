"""The report's plots, and what all plots share.

A method or scorer has the same colour and marker (its ``plot_style``) in every plot. The colours come from the
palettes of Okabe and Ito and of Tol, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from seergate.config import SCORERS
from seergate.durable import naming
from seergate.errors import SeergateError, how_to_install
from seergate.escaping import visible
from seergate.eval.report.findings import TRUNCATED
from seergate.eval.report.load import Setting, Sweep, grouped
from seergate.eval.statistics.intervals import t95
from seergate.methods import METHODS, EvictingMethod

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
WIDTH = 9.0
"""Width of every figure in inches; it is the same, so that letters have one size on a page."""
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 9, "loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
SPARE = (("#6699CC", "H"), ("#EE3377", "4"), ("#F0E442", "3"))
"""Colours and markers for methods without a ``plot_style``, such as the user's own."""
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (8, 2, 1, 2, 1, 2)), (0, (1, 4)))
CONVENTIONS = "bars and band: 95 % intervals; hollow: over 5 % of answers hit the limit"

Interval = tuple[float, float, float]
"""A mean and the ends of its 95 % interval."""


def accuracy_plot(sweep: Sweep, path: Path) -> Path:
    """Accuracy against budget with 95 % intervals; dense as a horizontal line (Figure 5 of SeerAttention-R)."""
    return _against_budget(sweep, path, accuracy_of, "accuracy (%)", "Accuracy against token budget", zero_to=104)


def accuracy_of(s: Setting) -> Interval:
    """Accuracy and its 95 % interval, in percent."""
    low, high = s.interval
    return 100 * s.accuracy.mean, 100 * low, 100 * high


def length_plot(sweep: Sweep, path: Path) -> Path:
    """Mean generation length against budget with 95 % intervals."""

    def interval(s: Setting) -> Interval:
        mean, se = s.metrics["mean_tokens"], s.metrics["mean_tokens_se"]
        half = 0.0 if se is None else t95(s.accuracy.n - 1) * se
        return mean, max(0.0, mean - half), mean + half

    return _against_budget(sweep, path, interval, "tokens per answer", "Generation length against token budget")


def recall_plot(sweep: Sweep, path: Path) -> Path | None:
    """Recall of dense attention's mass against budget (mean over layers), and per layer; ``None`` if not measured."""
    measured = sweep.having("recall")
    lines_of = grouped((s for s in measured if s.budget is not None), lambda s: s.series)
    if not lines_of:
        return None
    layers = len(next(iter(lines_of.values()))[0].metrics["recall_per_layer"])
    columns, rows = _grid(len(lines_of))
    height = 3.4 + rows * max(2.0, 0.16 * layers + 1.0)
    figure = new_figure(figsize=(WIDTH, height))
    upper, lower = cast(Any, figure.subfigures(2, 1, height_ratios=[3.4, height - 3.4]))
    lines: Axes = upper.subplots()
    maps = lower.subplots(rows, columns, squeeze=False).ravel()
    low = math.floor(20 * min(min(s.metrics["recall_per_layer"]) for s in measured)) * 5.0
    for i, (method, points) in enumerate(lines_of.items()):
        recall = [100 * s.metrics["recall"] for s in points]
        lines.plot([s.budget or 0 for s in points], recall, label=method, **style(method, sweep.methods))
        by_layer = [[100 * s.metrics["recall_per_layer"][layer] for s in points] for layer in range(layers)]
        image = _heat_map(maps[i], by_layer, low, numbers=layers <= 12)
        if layers <= 12:
            maps[i].set_yticks(range(layers), [str(n) for n in points[0].proxies["layers"]])
        maps[i].set_xticks(range(len(points)), [str(s.budget) for s in points])
        maps[i].set_title(method, fontsize=10)
        maps[i].set_xlabel("budget (tokens)")
        if i % columns == 0:
            maps[i].set_ylabel("layer")
    budget_axis(lines, sweep.budgets)
    for unused in maps[len(lines_of) :]:
        unused.set_visible(False)
    lines.set(ylabel="attention mass recalled (%)")
    lines.set_title("Recall: mean over layers, and by layer", fontsize=10)
    lines.legend(**LEGEND)
    lower.colorbar(image, ax=list(maps), label="recall (%)", fraction=0.04, pad=0.02)
    return save(figure, path)


MOST_MAPS = 16


def depth_plot(sweep: Sweep, path: Path) -> Path | None:
    """Accuracy by length and depth, one heat map per setting; ``None`` if the task has one of each, or none."""
    task = sweep.config["task"]
    depths, lengths = task.get("depths") or [], task.get("length") or []
    if max(len(depths), len(lengths)) < 2:
        return None
    settings = sweep.settings[:MOST_MAPS]
    columns, rows = _grid(len(settings))
    figure = new_figure(figsize=(WIDTH, rows * (1.2 + 0.3 * len(depths))))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.ravel()[len(settings) :]:
        axis.set_visible(False)
    for axis, s in zip(axes.ravel(), settings, strict=False):
        cells: dict[tuple[int, int], list[float]] = {}
        for sample in s.samples:
            length, depth, _ = map(int, sample["problem_id"].split("-"))
            cells.setdefault((depth, length), []).append(sample["correct"])
        means = {cell: 100 * sum(values) / len(values) for cell, values in cells.items()}
        image = _heat_map(axis, [[means.get((depth, length), math.nan) for length in lengths] for depth in depths])
        axis.set_xticks(range(len(lengths)), list(map(str, lengths)))
        axis.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths] if len(depths) > 1 else [""])
        axis.set_title(s.label, fontsize=10)
    figure.supxlabel("length (tokens)", fontsize=10)
    figure.supylabel("depth" if len(depths) > 1 else "", fontsize=10)  # variable_tracking has only one, of no meaning
    figure.colorbar(image, ax=list(axes.ravel()), label="accuracy (%)", fraction=0.04, pad=0.02)
    return save(figure, path)


def _stacked(count: int, sharex: bool = False) -> Any:
    """A figure, and its panels, one below the other."""
    figure = new_figure(figsize=(WIDTH, 4.2 * count))
    return figure, figure.subplots(count, squeeze=False, sharex=sharex, sharey=True)[:, 0]


def _grid(count: int) -> tuple[int, int]:
    """Numbers of columns and rows of a grid of ``count`` small maps."""
    columns = min(4, count)
    return columns, -(-count // columns)


def _heat_map(axis: Axes, grid: list[list[float]], low: float = 0.0, numbers: bool = True) -> Any:
    """Draw percentages as colours from ``low`` to 100; ``numbers`` also writes them into the cells."""
    image = axis.imshow(grid, vmin=low, vmax=100, cmap="viridis", aspect="auto")
    for y, row in enumerate(grid if numbers else []):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "w" if value <= (low + 200) / 3 else "k"
                axis.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=9, color=colour)
    return image


PER_BYTE = {"own_bytes_mean": "kB held per sequence, mean", "bytes_read_per_step": "kB read per step"}
"""Metric in bytes -> axis label. Bytes make methods comparable: a token budget means something different for each
method, and some methods have none."""


def bytes_plot(sweep: Sweep, path: Path) -> Path | None:
    """Accuracy against mean bytes held, and against bytes read per step; ``None`` with fewer than two points.

    A grey line shows the Pareto front: the settings above chance that no other setting beats in both bytes and
    accuracy.
    """
    measured = [s for s in sweep.settings if all(s.metrics[figure] for figure in PER_BYTE)]
    if len(measured) < 2:
        return None
    lines = grouped(measured, _line_of)
    chance = sweep.config["task"].get("chance") or 0.0
    figure, axes = _stacked(len(PER_BYTE))
    for axis, (metric, label) in zip(axes, PER_BYTE.items(), strict=True):
        for name, settings in lines.items():
            points = sorted(((s.metrics[metric] / 1e3, s) for s in settings), key=lambda point: point[0])
            error_bars(axis, name, list(lines), points)
        if front := [(s.metrics[metric] / 1e3, 100 * s.accuracy.mean) for s in pareto(measured, metric, chance)]:
            (first, _), (_, best), last = front[0], front[-1], max(s.metrics[metric] / 1e3 for s in measured)
            x, y = zip((first, 100 * chance), *front, (last, best), strict=True)
            axis.step(x, y, where="post", color="0.8", linewidth=5, zorder=0, label="Pareto front")
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set(xlabel=f"{label} (fewer is better: left)", ylabel="accuracy (%)", ylim=(-2, 104))
        tidy(axis)
        axis.legend(**LEGEND)
    figure.suptitle(f"Accuracy against bytes\n{conditions(sweep)}; {CONVENTIONS}", fontsize=10)
    return save(figure, path)


def pareto(settings: list[Setting], metric: str, chance: float) -> list[Setting]:
    """The settings above ``chance`` on the Pareto front of accuracy and bytes (``metric``), sorted by bytes."""
    front: list[Setting] = []
    for s in sorted(settings, key=lambda s: (float(s.metrics[metric]), -s.accuracy.mean)):
        if s.accuracy.mean > (front[-1].accuracy.mean if front else chance):
            front.append(s)
    return front


def _line_of(s: Setting) -> str:
    """Name of a setting's line, which joins a series' budgets, shares or thresholds, or all variants of a method."""
    if s.budget is not None:
        return s.series
    rule = "shares" if s.share is not None else "thresholds" if s.threshold is not None else ""
    return f"{s.series}, {rule}" if rule else s.method


def text_plot(sweep: Sweep, path: Path) -> Path | None:
    """KL to dense attention against bytes read; ``None`` without a dense run. If methods other than gates keep all
    tokens and others evict, each kind has a panel, the second with the gates.
    """
    if sweep.dense is None:
        return None
    lines = grouped((s for s in sweep.settings if s is not sweep.dense), _line_of)
    evicting = {name for name, own in lines.items() if issubclass(own[0].kind, EvictingMethod)}
    gates = {name for name in lines if name_of(name) == "gate"}
    groups = {"": set(lines)}
    if evicting and lines.keys() - evicting - gates:
        groups = {"keep everything": lines.keys() - evicting, "gates, and methods that keep a part": evicting | gates}
    figure, axes = _stacked(len(groups), sharex=True)
    for axis, (title, names) in zip(axes, groups.items(), strict=True):
        drawn = [name for name in lines if name in names]
        for name in drawn:
            points = sorted((sweep.share(s, "bytes_read_per_step"), s.metrics["kl"]) for s in lines[name])
            axis.plot(*zip(*points, strict=True), label=name, **style(name, drawn))
        axis.set_title(title, fontsize=10)
        axis.set(xscale="log", yscale="log", ylabel="KL from dense attention (nats per token)")
        for ticks in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
            ticks(lambda value, _: f"{value:g}")
        tidy(axis, grid="both")
        axis.legend(**LEGEND)
    axes[-1].set_xlabel("bytes read per step, % of dense attention's (log scale)")
    figure.suptitle(f"Next-token distributions on given texts\n{sweep.model} on {sweep.task}", fontsize=10)
    return save(figure, path)


def _against_budget(
    sweep: Sweep,
    path: Path,
    interval: Callable[[Setting], Interval],
    ylabel: str,
    title: str,
    zero_to: float | None = None,
) -> Path:
    groups = panels(sweep)
    figure, axes = _stacked(len(groups))
    for axis, (name, methods) in zip(axes, groups.items(), strict=True):
        for i, method in enumerate(methods):
            shift = 2 ** (0.035 * (i - (len(methods) - 1) / 2))  # side by side, so that no error bar hides another
            places = [(s.budget or 0) * shift for s in sweep.of(method)]
            error_bars(axis, method, methods, list(zip(places, sweep.of(method), strict=True)), interval)
        if sweep.dense is not None:
            mean, low, high = interval(sweep.dense)
            axis.axhline(mean, color=style("dense")["color"], linestyle="--", linewidth=1.4, label="dense", zorder=1)
            axis.axhspan(low, high, color="#000000", alpha=0.07, linewidth=0, zorder=0)
        chance = sweep.config["task"].get("chance")
        if zero_to is not None and chance:
            axis.axhline(100 * chance, color="#7F7F7F", linestyle=":", linewidth=1.2, label="guessing", zorder=1)
        budget_axis(axis, sweep.budgets)
        axis.set_title(name, fontsize=10)
        axis.set_ylabel(ylabel)
        axis.legend(**LEGEND)
    top = zero_to if zero_to is not None else axes[0].get_ylim()[1] * 1.05
    axes[0].set_ylim(-0.02 * top, top)  # a marker at zero is drawn whole
    figure.suptitle(f"{title}\n{conditions(sweep)}; {CONVENTIONS}", fontsize=10)
    return save(figure, path)


CROWD = 7
"""Maximum number of lines in one panel."""


def panels(sweep: Sweep) -> dict[str, list[str]]:
    """Title of each panel -> its series."""
    if len(sweep.methods) <= CROWD:
        return {"": sweep.methods}
    evicting = {s.series for s in sweep.settings if s.evicts}
    parts = {
        "keep everything, read a part": [m for m in sweep.methods if m not in evicting],
        "keep a part": [m for m in sweep.methods if m in evicting],
    }
    return {
        title + (", continued" if first else ""): methods[first : first + CROWD]
        for title, methods in parts.items()
        for first in range(0, len(methods), CROWD)
    }


def conditions(sweep: Sweep) -> str:
    """Model, task, number of problems and a note if runs are unfinished, for titles."""
    unfinished = "" if all(s.complete for s in sweep.settings) else ", some runs unfinished"
    return f"{sweep.model} on {sweep.task}, {sweep.problems}{unfinished}"


def error_bars(
    axis: Axes,
    name: str,
    names: list[str],
    points: Sequence[tuple[float, Setting]],
    interval: Callable[[Setting], Interval] = accuracy_of,
) -> None:
    """Draw the series ``name`` of ``names`` with its 95 % intervals; ``points`` are pairs of x value and setting. A
    marker is hollow if more than `TRUNCATED` of the setting's answers hit the length limit.
    """
    x, values = [place for place, _ in points], [interval(s) for _, s in points]
    errors = [[max(0.0, m - low) for m, low, _ in values], [max(0.0, high - m) for m, _, high in values]]
    how = style(name, names)
    zorder = 3 if name.startswith("gate") else 2
    axis.errorbar(x, [m for m, _, _ in values], errors, capsize=3, elinewidth=1, label=name, zorder=zorder, **how)
    for (place, s), (mean, _, _) in zip(points, values, strict=True):
        if s.metrics["truncation_rate"] > TRUNCATED:
            axis.plot(place, mean, **{**how, "linestyle": "", "markerfacecolor": "white", "zorder": 4})


def budget_axis(axis: Axes, budgets: list[int]) -> None:
    """Label the x axis as token budget and make it logarithmic to base 2, with a tick at each budget."""
    axis.set_xlabel("token budget per KV head (tokens)")
    if budgets:
        powers_of_two(axis, budgets)
        axis.set_xlim(budgets[0] / 1.25, budgets[-1] * 1.25)
    tidy(axis)


def powers_of_two(axis: Axes, places: Sequence[int]) -> None:
    """Make the x axis logarithmic to base 2, with ticks at ``places``."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, list(map(str, places)))
    axis.minorticks_off()


def tidy(axis: Axes, grid: Literal["both", "x", "y"] = "y") -> None:
    """Draw faint lines at the ticks of the axes ``grid``, and no frame above and on the right."""
    axis.grid(axis=grid, color="#DDDDDD", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def new_figure(**options: Any) -> Figure:
    """A figure outside of pyplot, whose backend and figures are the user's; a `SeergateError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SeergateError(f"plots need matplotlib; {how_to_install('eval')}") from error
    return Figure(**{"layout": "constrained", **options})


def check_libraries() -> None:
    """Raise `SeergateError` if matplotlib or scipy is not installed, which reports need."""
    new_figure()
    t95(1)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG and, beside it, as SVG. Texts are plain, without formulas: they name what was run."""
    from matplotlib.text import Text

    sides = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    numbers = [label for axis in sides for label in axis.get_ticklabels(which="both")]  # which may be formulas
    for text in figure.findobj(Text):
        if text not in numbers:
            text.set(text=visible(text.get_text(), "\n"), parse_math=False)
    box: dict[str, Any] = {} if figure.get_layout_engine() else {"bbox_inches": "tight"}
    for name in (path, path.with_suffix(".svg")):
        with naming(name):
            figure.savefig(name, dpi=DPI, facecolor="white", **box)
    return path


def name_of(series: str) -> str:
    """The method of a series such as ``quest b16`` or ``h2o+gate, interval=8``: ``quest``, ``h2o``."""
    return series.replace(",", " ").replace("+", " ").split()[0]


def style(series: str, among: Sequence[str] = ()) -> dict[str, Any]:
    """Matplotlib's options for a series: colour and marker of its scorer if that has its own, else of its method. The
    marker of an evictor with a gate is half filled. ``among`` are all series of the plot, for the `line_style`.
    """
    name, gates = name_of(series), series.partition("[")[2].partition("]")[0]
    of_scorer = SCORERS[gates].plot_style if gates in SCORERS else None
    of_method = METHODS[name].plot_style if name in METHODS else None
    colour, marker = of_scorer or of_method or SPARE[sum(map(ord, name)) % len(SPARE)]
    how = {"color": colour, "marker": marker, "markersize": 6, "linewidth": 2.4 if name == "gate" else 1.6}
    how |= {"fillstyle": "bottom"} if "+" in series.split(",")[0] else {}
    return how | ({"linestyle": line_style(series, among)} if among else {})


def line_style(series: str, all_series: Sequence[str]) -> Any:
    """Line style of a series, which differs between series of the same colour."""
    same = [s for s in all_series if style(s)["color"] == style(series)["color"]]
    return LINES[same.index(series) % len(LINES)]
