"""The figures of docs/methods.md: `methods.json` of `benchmarks/results`, drawn as a report draws its runs, and
`python_text.json`.

python benchmarks/draw_methods.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS

from seergate.methods import EvictingMethod, method_class
from seergate.report.byte_plots import bytes_plot
from seergate.report.load import Setting, Sweep
from seergate.report.plots import LEGEND, WIDTH, accuracy_plot, pyplot, save
from seergate.report.styles import line_style, style

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "images"


def setting_of(row: dict[str, Any], options: dict[str, Any]) -> Setting:
    """A row of the results. There is one answer to each problem, so how many are right is all there is to know."""
    problems, name = row["n_problems"], row["method"].split(",")[0]
    method = {"name": name, "token_budget": row["budget"], "nominal": row["nominal"]}
    right = round(row["accuracy"] * problems)
    return Setting(
        directory=Path(f"{row['method']} at {row['nominal']}"),
        config=options | {"model": {"path": "tiny-reasoner"}, "method": method},
        metrics=row | {"n_samples": problems},
        correct={str(i): [float(i < right)] for i in range(problems)},
        series=row["method"],
    )


def text_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """KL from dense attention against bytes read, of methods that keep everything and of those that keep a part."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["part"] == "budget":
            lines.setdefault(row["method"], []).append((row["bytes_read_per_step"], row["kl"]))
    ((dense, _),) = lines.pop("dense")
    figure, axes = pyplot().subplots(2, 1, figsize=(WIDTH, 8.4), sharex=True, sharey=True, layout="constrained")
    evicting = {name for name in lines if issubclass(method_class(name), EvictingMethod)}
    for axis, names in zip(axes, (lines.keys() - evicting, evicting | {"gate"}), strict=True):
        drawn = [name for name in lines if name in names]
        for name in drawn:
            read, kl = zip(*lines[name], strict=True)
            shares = [100 * each / dense for each in read]
            axis.plot(shares, kl, label=name, linestyle=line_style(name, drawn), **style(name))
        axis.set(xscale="log", yscale="log", ylabel="KL from dense attention (nats per token)")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.grid(color="#DDDDDD", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(**LEGEND)
    axes[1].set_xlabel("bytes read per step, % of dense attention's (log scale)")
    figure.suptitle("Next-token distributions on held-out modules: above, methods that keep everything; below, a part")
    save(figure, path)


def main() -> None:
    """Read, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURES, help="folder of the pictures")
    folder = parser.parse_args().output
    record = json.loads((RESULTS / "methods.json").read_text())
    found = Sweep([setting_of(row, record["options"]) for row in record["rows"]])
    text = json.loads((RESULTS / "python_text.json").read_text())["rows"]
    for draw, of, name in (
        (accuracy_plot, found, "methods-accuracy"),
        (bytes_plot, found, "methods-bytes"),
        (text_plot, text, "methods-text"),
    ):
        path = folder / f"{name}.png"
        draw(of, path)
        path.with_suffix(".svg").unlink()
        print(path)


if __name__ == "__main__":
    main()
