"""Figures drawn from `benchmarks/results`: the accuracy lost and the time saved by sparse attention.

    python benchmarks/trade_off.py [NAME ...]

The figure of the README has, on the left, the KL from dense attention on texts against bytes read per step, of
Qwen2.5-Coder-0.5B (`board.py`) and, on the right, the time of a step against the number of rows, in vLLM and in
transformers, of SmolLM2-135M (`serving.py --model`). A second figure shows the KL against the number of anchor layers
of SmolLM2-135M (`anchors.py`). A third shows the whole board.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from board import MODELS, PARTS
from common import RESULTS

from seergate.eval.report.plots import DPI, new_figure, powers_of_two, style

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "images"
TEXTS_OF = "qwen2.5-coder-0.5b"
"""The model whose KL on texts is drawn in the README's figure."""
DRAWN = ("oracle", "gate", "quest", "resa", "h2o")
STEPS = {
    "vLLM, dense": ("vllm_dense", "dense", "-"),
    "vLLM, gates": ("vllm_gate", "gate", "-"),
    "transformers, dense": ("hf_static", "dense", "--"),
    "transformers, gates": ("hf_gate", "gate", "--"),
}
"""Label of a line -> its name in the results, the method that gives its colour, and its line style."""
PANELS_PER_LINE = 4


def steps(results: Path) -> tuple[dict[str, dict[int, float]], dict[str, Any]]:
    """Line -> rows -> milliseconds per step at the longest context; and the options of the measurement."""
    times: dict[str, dict[int, float]] = {}
    for name in ("serving_model", "serving_model_transformers"):
        (path,) = results.glob(f"{name}-*.json")
        record = json.loads(path.read_text(encoding="utf-8"))
        longest = [row for row in record["rows"] if row["length"] == max(record["options"]["lengths"])]
        for label, (way, *_) in STEPS.items():
            if way in record["options"]["ways"]:
                times[label] = {row["batch"]: row["step_median_ms"][way] for row in longest}
    return times, record["options"]


def draw(results: Path) -> Any:
    """Both panels as a figure of matplotlib."""
    figure = new_figure(figsize=(10, 3.9))
    left, right = figure.subplots(1, 2)
    rows = _board(results)[TEXTS_OF, "texts"]
    _panel_of_methods(left, [row for row in rows if row["method"] in ("dense", *DRAWN)])
    left.set(xlabel="bytes read per step (% of dense attention's)", ylabel="KL from dense attention (nats per token)")
    left.set_title(f"Qwen2.5-Coder-0.5B: {rows[0]['n_problems']} texts of 2,560 tokens", fontsize=11)
    left.legend()

    lines, options = steps(results)
    for label, points in lines.items():
        _, method, dashes = STEPS[label]
        right.plot(
            list(points), list(points.values()), label=label, **(style(method) | {"marker": "o", "linestyle": dashes})
        )
    batches = list(next(iter(lines.values())))
    right.set_xscale("log", base=2)
    right.set_xticks(batches, [str(batch) for batch in batches])
    right.set(xlabel="rows decoded at once", ylabel="milliseconds per step")
    right.set_ylim(0)
    right.set_title(
        f"SmolLM2-135M: up to {max(options['lengths']):,} tokens per row, {options['threads']} CPU cores", fontsize=11
    )
    right.legend(title=f"gates read {options['budget']:,} tokens", handlelength=3)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_anchors(results: Path) -> Any:
    """KL from dense attention against the number of layers that choose."""
    rows = json.loads((results / "anchors_smollm2.json").read_text(encoding="utf-8"))["rows"]
    figure = new_figure(figsize=(5.5, 3.6))
    axes = figure.subplots()
    for label, method, part in (
        ("oracle", "oracle", "anchors"),
        ("gate, trained as anchors", "gate", "trained"),
        ("gate", "gate", "anchors"),
        ("quest", "quest", "anchors"),
    ):
        points = [row for row in rows if row["part"] == part and row.get("method", method) == method]
        drawn = style(method) | ({"linestyle": ":"} if label == "gate" else {})
        axes.plot([row["anchors"] for row in points], [row["kl"] for row in points], label=label, **drawn)
    counts = [row["anchors"] for row in rows if row["part"] == "plan"]
    powers_of_two(axes, counts)
    axes.set(xlabel="layers that choose, of 28", ylabel="KL from dense attention (nats per token)", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_board(results: Path) -> Any:
    """The board: a panel per part of a model that was measured, in lines of at most four."""
    board, panels = _board(results), dict[tuple[str, str], list[dict[str, Any]]]()
    for part, model in product(PARTS, MODELS):
        own = board.get((model, part), [])
        if any(row["method"] == "dense" for row in own):
            panels[f"{model}: {PARTS[part].title}", part] = own
    lines = -(-len(panels) // PANELS_PER_LINE)
    figure = new_figure(figsize=(15.2, 0.8 + 2.8 * lines))
    grid = figure.subplots(lines, PANELS_PER_LINE, squeeze=False)
    for ((title, part), own), axes in zip(panels.items(), grid.flat, strict=False):
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        (_panel_of_times if part == "times" else _panel_of_methods)(axes, own)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    labels = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labels.values(), labels.keys(), loc="outside right center", frameon=False)
    return figure


def _board(results: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Model and part -> their rows of the board."""
    board: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in json.loads((results / "board.json").read_text(encoding="utf-8"))["rows"]:
        board.setdefault((row["model"], row["part"]), []).append(row)
    return board


def _panel_of_methods(axes: Any, rows: list[dict[str, Any]]) -> None:
    """KL or right answers of each method against bytes read, with 95 % intervals."""
    key, factor = ("kl", 1) if "kl" in rows[0] else ("accuracy", 100)
    dense = next(row["bytes_read_per_step"] for row in rows if row["method"] == "dense")
    for method in dict.fromkeys(row["method"] for row in rows if (key, row["method"]) != ("kl", "dense")):
        own = [row for row in rows if row["method"] == method]
        points = sorted((100 * row["bytes_read_per_step"] / dense, *_interval(row, key, factor)) for row in own)
        x, y, low, high = zip(*points, strict=True)
        fill = "none" if "," in method else "full"  # hollow: a method with options
        drawn = style(method) | {"linewidth": 1, "fillstyle": fill}
        axes.errorbar(x, y, [low, high], label=method, capsize=2, elinewidth=0.8, **drawn)
    axes.set_xlabel("bytes read per step, % of dense")
    axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
    if key == "kl":
        axes.set(ylabel="nats per token", yscale="log")
        axes.set_ylim(bottom=max(1e-4, axes.get_ylim()[0]))  # a method that lost nothing would squeeze the others
    else:
        axes.set(ylabel="right answers (%)", ylim=(0, None))


def _interval(row: dict[str, Any], key: str, factor: float) -> tuple[float, float, float]:
    """A figure and its distances to the ends of its 95 % interval, which is left out if there is none."""
    value, ends = row[key], (row.get(f"{key}_low"), row.get(f"{key}_high"))
    low, high = (value if end is None else end for end in ends)
    low = max(low, value / 100) if key == "kl" else low  # of a logarithmic axis
    return factor * value, factor * max(0.0, value - low), factor * max(0.0, high - value)


def _panel_of_times(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Milliseconds per step against the number of rows, with 95 % intervals."""
    for row in rows:
        for engine, dashes in (("vllm", "-"), ("transformers", "--")):
            if engine in row:
                batches, figures = map(int, row[engine]), row[engine].values()
                errors = list(zip(*((ms - low, high - ms) for ms, low, high in figures), strict=True))
                drawn = style(row["method"]) | {"linestyle": dashes, "marker": "o"}
                label = f"{row['method']}, {engine}"
                axes.errorbar(list(batches), [ms for ms, *_ in figures], errors, label=label, capsize=2, **drawn)
    axes.set(xlabel="rows decoded at once", ylabel="milliseconds per step", ylim=(0, None))


FIGURES: dict[str, Callable[[Path], Any]] = {"trade-off": draw, "anchors": draw_anchors, "board": draw_board}


def main() -> None:
    """Draw and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)} [all]")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=PICTURES, help="directory")
    options = parser.parse_args()
    for name in options.names or FIGURES:
        figure = FIGURES[name](options.results)
        figure.savefig(options.output / f"{name}.png", dpi=DPI, facecolor="white")
        print("saved", options.output / f"{name}.png")


if __name__ == "__main__":
    main()
