"""Colour and marker of each method and scorer (their ``plot_style``), the same in every plot.

Colours are of Okabe and Ito's and of Tol's palettes, which colour-blind readers can tell apart; markers help.
"""

from __future__ import annotations

from typing import Any

from seergate.config import SCORERS
from seergate.methods import METHODS

SPARE = (("#6699CC", "H"), ("#EE3377", "4"), ("#F0E442", "3"))
"""Colours and markers of the user's own methods."""
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (8, 2, 1, 2, 1, 2)), (0, (1, 4)))


def name_of(series: str) -> str:
    """The method of a series such as ``quest b16`` or ``h2o+gate, interval=8``: ``quest``, ``h2o``."""
    return series.replace(",", " ").replace("+", " ").split()[0]


def style(series: str) -> dict[str, Any]:
    """Matplotlib's options for a series: colour and marker of its scorer if that has its own, else of its method. The
    marker of an evictor with a gate is half filled.
    """
    name, gates = name_of(series), series.partition("[")[2].partition("]")[0]
    of_scorer = SCORERS[gates].plot_style if gates in SCORERS else None
    of_method = METHODS[name].plot_style if name in METHODS else None
    colour, marker = of_scorer or of_method or SPARE[sum(map(ord, name)) % len(SPARE)]
    how = {"color": colour, "marker": marker, "markersize": 6, "linewidth": 2.4 if name == "gate" else 1.6}
    return {**how, "fillstyle": "bottom"} if "+" in series.split(",")[0] else how


def line_style(series: str, all_series: list[str]) -> Any:
    """Line style of a series, which differs between series of the same colour."""
    same = [s for s in all_series if style(s)["color"] == style(series)["color"]]
    return LINES[same.index(series) % len(LINES)]
