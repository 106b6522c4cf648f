"""Figures drawn from `benchmarks/results`: the accuracy lost and the time saved by sparse attention.

    python benchmarks/trade_off.py

The figure of the README has, on the left, the KL from dense attention on held-out texts against bytes read per step
(`seergate eval --task perplexity`, `collect.py`) and, on the right, the time of a step against the number of rows, in
vLLM and in transformers (`serving.py --model`). A second figure shows the KL against the number of anchor layers
(`anchors.py`). All results are of a real model, SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS

from seergate.eval.report.plots import DPI, pyplot, style

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "images"
SPARSE = "gate, all sparse"
DRAWN = {
    "oracle": "oracle",
    "gate, layers 7,18 dense": "gate",
    SPARSE: "gate, all layers sparse",
    "quest, all sparse": "quest",
    "snapkv": "snapkv",
    "streaming_llm": "streaming_llm",
}
"""Name in the results -> label."""
STEPS = {
    "vLLM, dense": ("vllm_dense", "dense", "-"),
    "vLLM, gates": ("vllm_gate", "gate", "-"),
    "transformers, dense": ("hf_static", "dense", "--"),
    "transformers, gates": ("hf_gate", "gate", "--"),
}
"""Label of a line -> its name in the results, the method that gives its colour, and its line style."""


def distances(results: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Method -> per budget, bytes read in percent of dense attention's, mean KL from it, standard error."""
    rows = json.loads((results / "smollm2_texts.json").read_text(encoding="utf-8"))["rows"]
    (dense,) = (row["bytes_read_per_step"] for row in rows if row["method"] == "dense")
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in sorted((row for row in rows if row["method"] in DRAWN), key=lambda row: row["budget"]):
        point = 100 * row["bytes_read_per_step"] / dense, row["kl"], row["kl_se"]
        points.setdefault(row["method"], []).append(point)
    return {method: points[method] for method in DRAWN}


def steps(results: Path) -> tuple[dict[str, dict[int, float]], dict[str, Any]]:
    """Line -> rows -> milliseconds per step at the longest context; and the options of the measurement."""
    (path,) = results.glob("serving_model-*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    longest = [row for row in record["rows"] if row["length"] == max(record["options"]["lengths"])]
    times = {
        label: {row["batch"]: row["step_median_ms"][name] for row in longest} for label, (name, *_) in STEPS.items()
    }
    return times, record["options"]


def draw(results: Path) -> Any:
    """Both panels as a figure of matplotlib."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    for method, points in distances(results).items():
        shares, means, errors = zip(*points, strict=True)
        drawn = style(method.partition(",")[0]) | ({"linestyle": ":"} if method == SPARSE else {})
        left.errorbar(shares, means, errors, label=DRAWN[method], capsize=3, **drawn)
    left.set_yscale("log")
    left.set_xlim(0, 100)
    left.set(xlabel="bytes read per step (% of dense attention's)", ylabel="KL from dense attention (nats per token)")
    left.set_title("SmolLM2-135M: 8 texts of 2,560 tokens", fontsize=11)
    left.legend(loc="upper right")

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
        f"SmolLM2-135M: {max(options['lengths']):,} tokens per row, {options['threads']} CPU cores", fontsize=11
    )
    right.legend(title=f"gates read {options['budget']:,} tokens")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_anchors(results: Path) -> Any:
    """KL from dense attention against the number of layers that choose."""
    rows = json.loads((results / "anchors_smollm2.json").read_text(encoding="utf-8"))["rows"]
    figure, axes = pyplot().subplots(figsize=(5.5, 3.6), layout="constrained")
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
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set(xlabel="layers that choose, of 28", ylabel="KL from dense attention (nats per token)", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Draw and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=PICTURES, help="directory")
    options = parser.parse_args()
    for name, figure in (("trade-off", draw(options.results)), ("anchors", draw_anchors(options.results))):
        figure.savefig(options.output / f"{name}.png", dpi=DPI, facecolor="white")
        print("saved", options.output / f"{name}.png")


if __name__ == "__main__":
    main()
