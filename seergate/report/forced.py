"""What `seergate.eval.forced` has measured, as a plot and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seergate.methods import EvictingMethod, method_class
from seergate.report.plots import LEGEND, WIDTH, pyplot, save
from seergate.report.styles import line_style, name_of, style
from seergate.report.tables import NONE, markdown

Rows = Sequence[dict[str, Any]]


def forced_plot(rows: Rows, path: Path) -> Path:
    """KL from dense attention against bytes read, of methods that keep everything and of those that keep a part."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["part"] == "budget":
            lines.setdefault(row["method"], []).append((row["bytes_read_per_step"], row["kl"]))
    ((dense, _),) = lines.pop("dense")
    figure, axes = pyplot().subplots(2, 1, figsize=(WIDTH, 8.4), sharex=True, sharey=True, layout="constrained")
    evicting = {name for name in lines if issubclass(method_class(name_of(name)), EvictingMethod)}
    gates = {name for name in lines if name_of(name) == "gate"}
    for axis, names in zip(axes, (lines.keys() - evicting, evicting | gates), strict=True):
        drawn = [name for name in lines if name in names]
        for name in drawn:
            read, kl = zip(*lines[name], strict=True)
            shares = [100 * each / dense for each in read]
            axis.plot(shares, kl, label=name, linestyle=line_style(name, drawn), **style(name))
        axis.set(xscale="log", yscale="log", ylabel="KL from dense attention (nats per token)")
        for ticks in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
            ticks(lambda value, _: f"{value:g}")
        axis.grid(color="#DDDDDD", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(**LEGEND)
    axes[1].set_xlabel("bytes read per step, % of dense attention's (log scale)")
    figure.suptitle("Next-token distributions on held-out modules: above, methods that keep everything; below, a part")
    return save(figure, path)


def forced_table(rows: Rows) -> str:
    """A row for each setting. Bytes are in percent of the first row's, which is dense attention's."""
    dense = rows[0]
    cells = []
    for row in rows:
        low, high = row.get("kl_minus_gate_95", (math.nan, math.nan))
        apart = NONE if "kl_minus_gate" not in row else f"{row['kl_minus_gate']:+.4f}"
        shares = (100 * row[name] / dense[name] for name in ("bytes_read_per_step", "own_bytes_mean"))
        cells.append(
            [
                row["method"],
                NONE if row["budget"] is None else str(row["budget"]),
                f"{row['kl']:.4f}",
                apart if math.isnan(low) else f"{apart} ({low:+.4f} to {high:+.4f})",
                f"{row['perplexity']:.1f}",
                f"{100 * row['agreement']:.1f}",
                *(f"{share:.0f}" for share in shares),
            ]
        )
    headings = ["method", "budget", "KL", "minus the gate's", "perplexity", "same token %", "read %", "held %"]
    return markdown(headings, cells)
