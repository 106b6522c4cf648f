"""The papers' figures and tables on our own runs: the plot, the table and the findings of each.

Figure numbers without a paper refer to SeerAttention-R (arXiv 2506.08889). Only run directories are read, so a figure
can be made from results that were computed elsewhere.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seergate.errors import SeergateError
from seergate.eval.report.findings import findings
from seergate.eval.report.load import Setting, Sweep
from seergate.eval.report.plots import (
    LEGEND,
    accuracy_plot,
    conditions,
    draw_published,
    error_bars,
    length_plot,
    powers_of_two,
    pyplot,
    save,
    style,
    tidy,
)
from seergate.eval.report.published import PROBLEMS, deviations, model_key, table_1
from seergate.eval.report.tables import (
    NONE,
    SETTING,
    Columns,
    accuracy_table,
    cost_table,
    figure_of,
    markdown,
    table,
    table_beside,
)
from seergate.methods.reason_cache.steps import BLANK_LINE

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
            points[f"{s.method} {s.budget} tokens"].append((s.block_size, s))
    figure, axis = _panel(f"Accuracy against block size\n{conditions(sweep)}; bars: 95 % intervals")
    _lines(axis, points, sweep, "block size (tokens)")
    places = [place for line in points.values() for place in line]
    powers_of_two(axis, sorted({int(x) for x, _ in places}))
    draw_published(axis, sweep, places)
    axis.legend(**LEGEND)
    return save(figure, path)


def _panel(title: str) -> tuple[Any, Any]:
    """A figure with one panel."""
    figure, axis = pyplot().subplots(figsize=(6.8, 4.4))
    axis.set_title(title, fontsize=10)
    return figure, axis


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
    left.legend(**{**LEGEND, "ncol": 3, "loc": "upper center", "bbox_to_anchor": (0.5, -0.14)})
    tidy(left)
    points: Points = {
        name: [(100 * s.metrics["density"], s) for s in group if s.metrics["density"] is not None]
        for name, group in (("gate, budget", budgets), ("gate, threshold", thresholds))
        if group
    }
    _lines(right, points, sweep, "density: tokens read per token of context (%)")
    draw_published(right, sweep, [])  # the paper has no densities
    right.legend(**LEGEND)
    right.set_title("(b) accuracy against density", fontsize=10)
    return save(figure, path)


def read_curve(setting: Setting, column: int = 1) -> dict[float, float]:
    """Context length -> tokens read per step (with column 2, bytes held), mean over the samples that reached it."""
    points = [point for s in setting.samples for point in s.get("read_curve") or [] if len(point) > column]
    if not points:
        return {}
    width = max(1, max(point[0] for point in points) // 40)
    groups: dict[int, list[float]] = defaultdict(list)
    for point in points:
        groups[int(point[0]) // width].append(float(point[column]))
    return {(key + 0.5) * width: sum(values) / len(values) for key, values in sorted(groups.items())}


def _plot_own_bytes(sweep: Sweep, path: Path) -> Path:
    """Plot the bytes held by a growing sequence, one line per setting."""
    figure, axis = _panel(f"Memory while an answer grows\n{conditions(sweep)}")
    names = [s.series for s in sweep.settings]
    for s in sweep.settings:
        curve = read_curve(s, column=2)
        megabytes = [own_bytes / 1e6 for own_bytes in curve.values()]
        axis.plot(list(curve), megabytes, label=s.label, alpha=0.8, **style(s.series, names))
    axis.set(xlabel="tokens of context", ylabel="held by a sequence (MB)", ylim=(0, None))
    axis.legend(**LEGEND)
    tidy(axis)
    return save(figure, path)


def _read_own_bytes(sweep: Sweep) -> list[str]:
    lines = []
    for s in sweep.settings:
        curve = list(read_curve(s, column=2).items())
        if curve:
            length, own_bytes = curve[-1]
            speed = s.metrics["tokens_per_second"]
            lines.append(
                f"{s.label}: {own_bytes / 1e6:.2f} MB near a context of {length:.0f}; {speed:.0f} tokens per second."
            )
    return lines or ["no answer is long enough: bytes are recorded every 32 steps."]


def _texts(sweep: Sweep) -> list[str]:
    """The answers of the dense run, or of the first setting if there is no dense run."""
    return [str(sample["completion"]) for sample in (sweep.dense or sweep.settings[0]).samples]


def ngram_entropy(words: Sequence[str], n: int = 3) -> float:
    """Shannon entropy of the n-grams of a text, in bits (RPC, equation 1)."""
    counts = Counter(zip(*(words[i:] for i in range(n)), strict=False))
    total = counts.total()
    return -sum(count / total * math.log2(count / total) for count in counts.values())


def entropies(sweep: Sweep) -> dict[int, tuple[int, float]]:
    """Prefix length in words -> number of answers at least as long, and the mean 3-gram entropy of their prefixes."""
    texts, by_length = [text.split() for text in _texts(sweep)], {}
    for length in (2**k for k in range(5, 16)):
        long = [ngram_entropy(words[:length]) for words in texts if len(words) >= length]
        if long:
            by_length[length] = len(long), sum(long) / len(long)
    if not by_length:
        raise SeergateError("no answer has 32 words, so there is no entropy to compare; let answers be longer")
    return by_length


def _entropy(sweep: Sweep, path: Path) -> Path:
    figure, axis = _panel(f"Repetition in answers\n{conditions(sweep)}")
    by_length = entropies(sweep)
    axis.plot(list(by_length), [entropy for _, entropy in by_length.values()], marker="o", label="answers")
    most = [math.log2(length - 2) for length in by_length]
    axis.plot(list(by_length), most, color="#7F7F7F", linestyle=":", label="no 3-gram twice")
    powers_of_two(axis, list(by_length))
    axis.set(xlabel="first words of an answer", ylabel="3-gram entropy (bits)")
    axis.legend(frameon=False, fontsize=9)
    tidy(axis)
    return save(figure, path)


def _entropy_table(sweep: Sweep) -> str:
    rows = [
        [str(length), str(count), f"{entropy:.2f}", f"{math.log2(length - 2):.2f}"]
        for length, (count, entropy) in entropies(sweep).items()
    ]
    return markdown(["words", "answers", "3-gram entropy", "no 3-gram twice"], rows)


def _read_entropy(sweep: Sweep) -> list[str]:
    *_, (length, (count, entropy)) = entropies(sweep).items()
    most = math.log2(length - 2)
    return [
        f"in {length} words, which {count} answers have, the 3-gram entropy is {entropy:.2f} bits on average, of "
        f"{most:.2f} without repeated 3-grams; words are separated by white space."
    ]


ALIKE = 0.8
"""A step repeats an earlier one if the cosine of their word counts exceeds this (ReasonCache, Figure 2)."""


def repeated_steps(text: str) -> tuple[int, int]:
    """The number of steps of a text whose word counts are similar to an earlier step's (cosine above `ALIKE`), and the
    number of all steps. Steps are separated by blank lines or, in a text without blank lines, by full stops.
    """
    parts = re.split(BLANK_LINE, text) if re.search(BLANK_LINE, text) else re.split(r"\.(?:\s|$)", text)
    counts = [Counter(part.split()) for part in parts if part.strip()]
    alike = [any(_cosine(new, old) > ALIKE for old in counts[:i]) for i, new in enumerate(counts)]
    return sum(alike), len(alike)


def _cosine(a: Counter[str], b: Counter[str]) -> float:
    norms = math.prod(math.sqrt(sum(n * n for n in counts.values())) for counts in (a, b))
    return sum(n * b[word] for word, n in a.items()) / norms


def _repeats_table(sweep: Sweep) -> str:
    repeated, steps = map(sum, zip(*map(repeated_steps, _texts(sweep)), strict=True))
    header = ["model", "task", "answers", "steps", "similar to an earlier one %"]
    share = f"{100 * repeated / steps:.1f}" if steps else NONE
    return markdown(header, [[sweep.model, sweep.task, str(len(_texts(sweep))), str(steps), share]])


def _read_limit(sweep: Sweep) -> list[str]:
    return [
        f"{s.label}: {100 * s.metrics['truncation_rate']:.1f} % of the answers hit the length limit and count with it."
        for s in sweep.settings
    ]


def _lengths_table(sweep: Sweep) -> str:
    rows = []
    for s in sweep.settings:
        lengths = [sample["n_tokens"] for sample in s.samples]
        mean = sum(lengths) / len(lengths)
        spread = math.sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths))
        rows.append([s.marked, f"{mean:.1f}", str(min(lengths)), str(max(lengths)), f"{spread:.1f}"])
    return markdown(["method", "mean length", "shortest", "longest", "standard deviation"], rows)


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
    "by_budget": PlotStyle(accuracy_plot, accuracy_table, findings),
    "spread": PlotStyle(accuracy_plot, accuracy_table, _read_spread),
    "by_block_size": PlotStyle(_block_sizes, accuracy_table, _read_spread),
    "by_threshold": PlotStyle(_threshold_and_budget, accuracy_table, _read_thresholds),
    "costs": PlotStyle(None, lambda sweep: f"{accuracy_table(sweep)}\n\n{cost_table(sweep)}", findings),
    "lengths": PlotStyle(length_plot, length_table, _read_lengths),
    "length_table": PlotStyle(None, length_table, _read_lengths),
    "length_statistics": PlotStyle(None, _lengths_table, _read_limit),
    "held": PlotStyle(_plot_own_bytes, cost_table, _read_own_bytes),
    "entropy": PlotStyle(_entropy, _entropy_table, _read_entropy),
    "repeats": PlotStyle(
        None,
        _repeats_table,
        lambda _: [f"a step is similar to an earlier one if the cosine of their word counts is over {ALIKE}."],
    ),
}

COMPLETE = {**PROBLEMS, "gpqa_diamond": 198, "gsm8k": 1319}
"""Task -> number of its problems."""


def beside(sweep: Sweep, published: Mapping[tuple[str, str], Mapping[str, float]], paper: Mapping[str, Any]) -> str:
    """A Markdown table of our and a paper's accuracy, for finished runs of the paper's settings; empty without any.

    A run counts if it has the paper's model, all problems of its task, and the method with the options under which the
    paper's number is known. Other deviations from the paper are named in the row.

    Args:
        sweep: the runs.
        published: (model, task) -> directory of a run -> right answers in percent.
        paper: the paper's settings; only those in a run's record of its generation are compared.
    """
    task = sweep.config["task"]
    numbers = published.get((model_key(sweep.config), str(task["name"])), {})
    if task.get("problems") is not None or task.get("n_problems") != COMPLETE.get(task["name"]):
        return ""

    def unlike(s: Setting) -> list[str]:
        options = {name: s.config["generation"].get(name) for name in paper if name in s.config["generation"]}
        return [
            f"{name.replace('_', '-')} {value} instead of {paper[name]}"
            for name, value in options.items()
            if value != paper[name]
        ]

    return table_beside(sweep, lambda s: numbers.get(s.directory.name), unlike)
