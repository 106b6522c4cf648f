"""The papers' figures and tables on our own runs: how each one is drawn, and what ours shows.

Plain numbers are those of SeerAttention-R (arXiv 2506.08889). They are drawn from run directories alone, so a figure
can be made again from results that somebody else has computed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seergate.errors import SeergateError
from seergate.eval.stats import correlation
from seergate.report.findings import findings
from seergate.report.load import Setting, Sweep
from seergate.report.plots import accuracy_plot, conditions, draw_published, length_plot, pyplot, save
from seergate.report.published import deviations, table_1
from seergate.report.styles import line_style, style
from seergate.report.tables import NONE, accuracy_table, cost_table, limit_of, markdown, proxy_table

Points = dict[str, list[tuple[float, Setting]]]
"""Series -> (place on the x axis, setting)."""

_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "loc": "center left", "bbox_to_anchor": (1.0, 0.5)}


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper.

    Attributes:
        title: what it compares.
        draw: ``(sweep, path of the image) -> image``, or ``None`` for a table.
        table: the numbers, in Markdown.
        read: what they show, one sentence each, computed from them.
        source: the figure and its paper, such as ``"Figure 5 of RaaS"``; empty for one of our own.
    """

    title: str
    draw: Callable[[Sweep, Path], Path] | None
    table: Callable[[Sweep], str]
    read: Callable[[Sweep], list[str]]
    source: str = ""


def _draw_lines(points: Points, sweep: Sweep, path: Path, xlabel: str, title: str, log: bool = True) -> Path:
    """Accuracy with 95 % intervals against something; dense as a horizontal line."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.8, 4.4))
    _lines(axis, points, sweep, xlabel, log)
    draw_published(axis, sweep, [point for line in points.values() for point in line])
    axis.legend(**_LEGEND)
    axis.set_title(f"{title}\n{conditions(sweep)}; bars: 95 % intervals", fontsize=10)
    return save(figure, path)


def _lines(axis: Any, points: Points, sweep: Sweep, xlabel: str, log: bool) -> None:
    names = list(points)
    for name, line in points.items():
        line = sorted(line, key=lambda p: p[0])
        means = [100 * s.accuracy.mean for _, s in line]
        bars = [
            [max(0.0, m - 100 * s.interval[0]) for m, (_, s) in zip(means, line, strict=True)],
            [max(0.0, 100 * s.interval[1] - m) for m, (_, s) in zip(means, line, strict=True)],
        ]
        how = {"capsize": 3, "elinewidth": 1, "label": name, "linestyle": line_style(name, names), **style(name)}
        axis.errorbar([x for x, _ in line], means, yerr=bars, **how)
    if sweep.dense is not None:
        axis.axhline(100 * sweep.dense.accuracy.mean, color="k", linestyle="--", linewidth=1.3, label="dense")
    places = sorted({x for line in points.values() for x, _ in line})
    if log:
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [f"{x:g}" for x in places])
        axis.minorticks_off()
    axis.set(xlabel=xlabel, ylabel="accuracy (%)", ylim=(-2, 104))
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)


def _block_sizes(sweep: Sweep, path: Path) -> Path:
    """Figure 7: accuracy against block size, one line per method and budget."""
    points: Points = defaultdict(list)
    for s in sweep.settings:
        if s.budget is not None and s.block_size is not None:
            points[f"{s.method} {s.budget} tokens"].append((s.block_size, s))
    return _draw_lines(points, sweep, path, "block size (tokens)", "Accuracy against block size")


def _threshold_and_budget(sweep: Sweep, path: Path) -> Path:
    """Figure 9: (a) tokens read against the length of the context; (b) accuracy against density."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    budgets = [s for s in sweep.settings if s.budget is not None and s.threshold is None]
    thresholds = [s for s in sweep.settings if s.threshold is not None]
    for group, line in ((budgets, "-"), (thresholds, "--")):
        for i, s in enumerate(group):
            curve = read_curve(s)
            colour = plt.get_cmap("viridis")(i / max(1, len(group)))
            left.plot(list(curve), list(curve.values()), line, marker=".", color=colour, label=s.label)
    left.set(xlabel="tokens of context", ylabel="tokens read per KV head and step")
    left.set_title("(a) activated tokens; full lines: budget, dashed: threshold", fontsize=10)
    left.legend(frameon=False, fontsize=8, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    left.spines[["top", "right"]].set_visible(False)
    points: Points = {
        name: [(100 * s.metrics["density"], s) for s in group if s.metrics["density"] is not None]
        for name, group in (("gate, budget", budgets), ("gate, threshold", thresholds))
        if group
    }
    _lines(right, points, sweep, "density: tokens read per token of context (%)", log=False)
    draw_published(right, sweep, [])  # of what its gates read, the paper has no numbers
    right.legend(**_LEGEND)
    right.set_title("(b) accuracy against density", fontsize=10)
    return save(figure, path)


def read_curve(setting: Setting, bins: int = 40) -> dict[float, float]:
    """Length of the context -> tokens read per step, mean over the samples that got there."""
    points = [(length, read) for s in setting.samples for length, read in s.get("read_curve") or []]
    if not points:
        return {}
    width = max(1, max(length for length, _ in points) // bins)
    groups: dict[int, list[float]] = defaultdict(list)
    for length, read in points:
        groups[int(length) // width].append(float(read))
    return {(key + 0.5) * width: sum(reads) / len(reads) for key, reads in sorted(groups.items())}


def length_table(sweep: Sweep) -> str:
    """Table 1: accuracy and mean generation length; beside the paper's where it ran the same."""
    rows = []
    for s in sweep.settings:
        published = table_1(s.config) if s.complete else None
        rows.append(
            [
                s.marked,
                limit_of(s),
                f"{100 * s.accuracy.mean:.1f}",
                f"{s.metrics['mean_tokens']:.1f}",
                NONE if published is None else f"{published[0]:.1f}",
                NONE if published is None else f"{published[1]:.1f}k",
                NONE if published is None else "; ".join(deviations(s.config)) or NONE,
            ]
        )
    header = ["method", "budget", "accuracy %", "mean length", "published %", "published length", "unlike the paper"]
    return markdown(header, rows)


def _read_lengths(sweep: Sweep) -> list[str]:
    if sweep.dense is None:
        return ["without a dense run there is no length to compare with."]
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
    """How much the block size, or which layers stay dense, matters to a method at a budget."""
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


def _proxies_table(sweep: Sweep) -> str:
    return proxy_table(sweep) or accuracy_table(sweep)


PREDICTORS = {
    "next_token_kl": ("next-token KL to dense (nats)", -1),
    "recall": ("recall of attention mass (%)", 1),
    "perplexity": ("perplexity of dense's answers", -1),
}
"""Proxy -> label of its axis, and whether more of it should mean more (1) or less (-1) accuracy."""


def _measured(sweep: Sweep, proxy: str) -> list[Setting]:
    return [s for s in sweep.settings if s is not sweep.dense and s.metrics[proxy] is not None]


def _proxies(sweep: Sweep, path: Path) -> Path:
    """Accuracy against each cheap proxy, a point per setting."""
    plt = pyplot()
    shown = [proxy for proxy in PREDICTORS if len(_measured(sweep, proxy)) > 1]
    if not shown:
        raise SeergateError(
            "the proxies were not measured; they need measure_recall: true, and answers of some forty tokens or more"
        )
    figure, axes = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 4.2), sharey=True, squeeze=False)
    for axis, proxy in zip(axes[0], shown, strict=True):
        scale = 100 if proxy == "recall" else 1
        for name in dict.fromkeys(s.series for s in _measured(sweep, proxy)):
            points = [s for s in _measured(sweep, proxy) if s.series == name]
            how = {**style(name), "linestyle": ""}
            axis.plot(
                [scale * s.metrics[proxy] for s in points], [100 * s.accuracy.mean for s in points], label=name, **how
            )
        if proxy == "next_token_kl":
            axis.set_xscale("symlog", linthresh=1e-3)
        elif proxy == "perplexity":
            axis.set_xscale("log")
        axis.set(xlabel=PREDICTORS[proxy][0], ylim=(-2, 104))
        if sweep.proxies_on is not None and not math.isnan(rank := _rank_correlation(sweep, proxy)):
            axis.set_title(f"rank correlation {rank:.2f}", fontsize=10)
        axis.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("accuracy (%)")
    axes[0, -1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"Do cheap figures predict accuracy?\n{conditions(sweep)}", fontsize=10, y=1.04)
    return save(figure, path)


def _rank_correlation(sweep: Sweep, proxy: str) -> float:
    points = _measured(sweep, proxy)
    sign = PREDICTORS[proxy][1]
    return correlation([sign * s.metrics[proxy] for s in points], [s.accuracy.mean for s in points])


def _read_proxies(sweep: Sweep) -> list[str]:
    if sweep.proxies_on is None:
        return ["the settings are not known to have been measured on the same contexts, so nothing is said of them."]
    lines = []
    for proxy, (label, sign) in PREDICTORS.items():
        points = _measured(sweep, proxy)
        if len(points) < 3:
            continue
        rank = _rank_correlation(sweep, proxy)
        over = f"{len(points)} settings ({', '.join(dict.fromkeys(s.series for s in points))})"
        wanted = "high" if sign > 0 else "low"
        if math.isnan(rank):
            lines.append(f"{wanted} {label}: it or the accuracy is the same in all {over}, so there is no order.")
        else:
            lines.append(f"{wanted} {label}: rank correlation {rank:.2f} with accuracy over {over}.")
    lines.append(
        "1 would be perfect prediction of the order, 0 none. Settings are not independent samples of anything."
    )
    return lines


def _cost_and_accuracy(sweep: Sweep) -> str:
    return f"{accuracy_table(sweep)}\n\n{cost_table(sweep)}"


SEER = "SeerAttention-R"
FIGURES: dict[str, Figure] = {
    "4": Figure(
        "Oracle selection by block size and budget", accuracy_plot, accuracy_table, _read_spread, f"Figure 4 of {SEER}"
    ),
    "5": Figure("Accuracy against token budget", accuracy_plot, accuracy_table, findings, f"Figure 5 of {SEER}"),
    "7": Figure("Accuracy against block size", _block_sizes, accuracy_table, _read_spread, f"Figure 7 of {SEER}"),
    "8": Figure(
        "First layers dense, or all sparse", accuracy_plot, accuracy_table, _read_spread, f"Figure 8 of {SEER}"
    ),
    "9": Figure(
        "Threshold against token budget",
        _threshold_and_budget,
        accuracy_table,
        _read_thresholds,
        f"Figure 9 of {SEER}",
    ),
    "proxies": Figure("Cheap proxies against accuracy", _proxies, _proxies_table, _read_proxies),
    "table1": Figure("Accuracy and length of the reasoning", None, length_table, _read_lengths, f"Table 1 of {SEER}"),
    "raas5": Figure("Accuracy against cache budget", accuracy_plot, accuracy_table, findings, "Figure 5 of RaaS"),
    "raas7": Figure("Lengths of answers by method", length_plot, length_table, _read_lengths, "Figure 7 of RaaS"),
    "raas8": Figure("Share of pages that are used, r", accuracy_plot, accuracy_table, findings, "Figure 8 of RaaS"),
    "rpc8": Figure("Compression interval", None, _cost_and_accuracy, findings, "Figure 8 of RPC"),
    "rpc-table2": Figure("Size of the selector window", None, _cost_and_accuracy, findings, "Table 2 of RPC"),
    "lazy5": Figure("Accuracy against budget", accuracy_plot, accuracy_table, findings, "Figure 5 of LazyEviction"),
    "lazy-table4": Figure("With and without H2", accuracy_plot, accuracy_table, findings, "Table 4 of LazyEviction"),
    "reasoncache-table1": Figure(
        "Accuracy and throughput", None, _cost_and_accuracy, findings, "Table I of ReasonCache"
    ),
    "reasoncache-table4": Figure(
        "Percentile of the threshold, p", None, _cost_and_accuracy, findings, "Table IV of ReasonCache"
    ),
}
