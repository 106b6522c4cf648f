"""The figure of the README, drawn from `benchmarks/results`: what reading less costs, and what it saves.

    python benchmarks/trade_off.py

On the left accuracy against tokens read per step (`tiny_reasoner.py`), on the right speed against the length of the
context: inside vLLM where `serving.py` has been run, else inside transformers (`end_to_end.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS

from seergate.eval.stats import Estimate, wilson
from seergate.report.plots import DPI, pyplot
from seergate.report.styles import style

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "trade-off.png"
VLLM = {"vLLM, dense": "vllm_dense", "vLLM with gates": "vllm_gate"}
TRANSFORMERS = {"transformers, dense": "hf_static", "with gates": "gate"}
"""Label of a line -> its name in the results."""


def accuracies(results: Path) -> dict[str, dict[int, Estimate]]:
    """Method -> tokens read per step -> accuracy; dense attention, which has no budget, is at 0."""
    rows = json.loads((results / "tiny_reasoner.json").read_text())["rows"]
    found: dict[str, dict[int, Estimate]] = {}
    for row in rows:
        if row["part"] == "medium":
            estimate = Estimate(row["accuracy"], row["accuracy_se"], row["n_problems"])
            found.setdefault(row["method"], {})[row["budget"] or 0] = estimate
    return found


def speeds(results: Path) -> tuple[dict[str, dict[int, float]], dict[str, Any]]:
    """Line -> tokens in the context -> tokens per second of one row; and the options of the measurement."""
    serving = sorted(results.glob("serving-*.json"))
    record = json.loads((serving[-1] if serving else results / "end_to_end-cpu-float32-2t.json").read_text())
    found: dict[str, dict[int, float]] = {}
    for row in record["rows"]:
        for label, name in (VLLM if serving else TRANSFORMERS).items():
            length = row["length"] if serving else row["lengths"][0]
            speed = row["tokens_per_second"][name] if serving else row["ways"][name]["tokens_per_second"]
            if row["batch"] == 1:
                found.setdefault(label, {})[length] = speed
    return found, record["options"]


def draw(results: Path) -> Any:
    """Both panels as a figure of matplotlib."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    for method, points in accuracies(results).items():
        if 0 in points:
            left.axhline(100 * points[0].mean, **(style(method) | {"linewidth": 1, "linestyle": "--", "marker": ""}))
            left.annotate(f"{method} reads all", (16, 100 * points[0].mean), (0, 4), textcoords="offset points")
            continue
        means = [100 * point.mean for point in points.values()]
        ends = [[100 * end for end in wilson(point)] for point in points.values()]
        errors = [[abs(mean - end[side]) for mean, end in zip(means, ends, strict=True)] for side in (0, 1)]
        left.errorbar(list(points), means, errors, label=method, capsize=3, **style(method))
    budgets = sorted({budget for points in accuracies(results).values() for budget in points if budget})
    left.set_xscale("log", base=2)
    left.set_xticks(budgets, [str(budget) for budget in budgets])
    left.set(xlabel="tokens read per step, of 534", ylabel="right answers (%)", ylim=(-3, 111))
    left.set_title("Accuracy: tiny reasoner, 256 problems", fontsize=11)
    left.legend(loc="center right")

    lines, options = speeds(results)
    for (label, points), method in zip(lines.items(), ("dense", "gate"), strict=True):
        right.plot(list(points), list(points.values()), label=label, **(style(method) | {"marker": "o"}))
    lengths = list(next(iter(lines.values())))
    right.set_xscale("log", base=2)
    right.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    right.set(xlabel="tokens in the context", ylabel="tokens per second")
    right.set_ylim(0)
    title = f"Speed: {options['layers']} layers, attention of Qwen3-8B, {options['threads']} CPU cores"
    right.set_title(title, fontsize=11)
    right.legend(title=f"gates read {options['budget']:,} tokens", loc="lower left")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Draw, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    draw(options.results).savefig(options.output, dpi=DPI, facecolor="white")
    print("saved to", options.output)


if __name__ == "__main__":
    main()
