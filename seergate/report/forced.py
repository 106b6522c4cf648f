"""Plot and tables of the measurements of `seergate.eval.forced`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seergate.eval.forced import minus
from seergate.methods import EvictingMethod, method_class
from seergate.report.findings import with_ends
from seergate.report.load import Setting, Sweep
from seergate.report.plots import LEGEND, WIDTH, pyplot, save
from seergate.report.styles import line_style, name_of, style
from seergate.report.tables import NONE, markdown

Rows = Sequence[dict[str, Any]]

FORCED_NOTE = (
    "The beginning of each text is read like a prompt; the tokens behind it are given one by one. KL is to dense "
    "attention's distribution of the next token, in nats per token: mean over texts, and 99th percentile of all "
    "tokens, with 95 % intervals clustered by text; beside it the paired difference from the first gate's at the same "
    "budget. "
    "*read* and *held* are bytes, in percent of the first row's."
)


def rows_of(sweep: Sweep) -> list[dict[str, Any]]:
    """A row for every setting of a sweep that scored texts, compared with the first of the gates at the same budget,
    if both have scored the same texts.
    """
    gates = {s.budget: s for s in sweep.settings[::-1] if s.method == "gate"}
    rows = []
    for s in sweep.settings:
        gate, row = gates.get(s.budget), {"method": s.marked, "budget": s.budget, **s.metrics}
        if gate is not None and gate is not s and _texts(gate).keys() == _texts(s).keys():
            ours, theirs = _texts(s), _texts(gate)
            row |= minus([ours[name] for name in ours], [theirs[name] for name in ours])
        rows.append(row)
    return rows


def _texts(s: Setting) -> dict[str, dict[str, Any]]:
    return {sample["problem_id"]: sample for sample in s.samples}


def forced_plot(rows: Rows, path: Path) -> Path:
    """KL from dense attention against bytes read, of methods that keep everything and of those that keep a part."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
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
    figure.suptitle("Next-token distributions on given texts: above, methods that keep everything; below, a part")
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
                with_ends(row, "kl"),
                with_ends(row, "kl_p99"),
                apart if math.isnan(low) else f"{apart} ({low:+.4f} to {high:+.4f})",
                f"{row['perplexity']:.1f}",
                f"{100 * row['agreement']:.1f}",
                *(f"{share:.0f}" for share in shares),
            ]
        )
    headings = [
        "method",
        "budget",
        "KL",
        "KL, 99th percentile",
        "minus the gate's",
        "perplexity",
        "same token %",
        "read %",
        "held %",
    ]
    return markdown(headings, cells)
