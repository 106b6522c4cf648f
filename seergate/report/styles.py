"""Colour and marker of each method (`Method.plot_style`), the same in every plot.

Colours are of Okabe and Ito's and of Tol's palettes, which colour-blind readers can tell apart; markers help.
"""

from __future__ import annotations

from typing import Any

from seergate.methods import METHODS

GATES = {"msa": ("#AA3377", "^"), "indexer": ("#4477AA", "D")}
"""Of gates by their scorer's name; those of SeerAttention-R look as the method ``gate``."""

SPARE = (("#6699CC", "H"), ("#EE3377", "4"), ("#F0E442", "3"))
"""Of methods of the user's own."""
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (8, 2, 1, 2, 1, 2)), (0, (1, 4)))


def name_of(series: str) -> str:
    """The method of a series such as ``quest b16`` or ``h2o+gate, interval=8``: ``quest``, ``h2o``."""
    return series.replace(",", " ").replace("+", " ").split()[0]


def style(series: str) -> dict[str, Any]:
    """Matplotlib's options for a series: colour and marker of its method, or of its gates by their name. The marker of
    an evictor with a gate is half filled.
    """
    name, gates = name_of(series), series.partition("[")[2].partition("]")[0]
    own = METHODS[name].plot_style if name in METHODS else None
    colour, marker = GATES.get(gates) or own or SPARE[sum(map(ord, name)) % len(SPARE)]
    how = {"color": colour, "marker": marker, "markersize": 6, "linewidth": 2.4 if name == "gate" else 1.6}
    return {**how, "fillstyle": "bottom"} if "+" in series.split(",")[0] else how


def line_style(series: str, all_series: list[str]) -> Any:
    """Line style of a series, which differs between series of the same colour."""
    same = [s for s in all_series if style(s)["color"] == style(series)["color"]]
    return LINES[same.index(series) % len(LINES)]
