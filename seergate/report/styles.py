"""Colour and marker of each method, the same in every plot."""

from __future__ import annotations

from typing import Any

STYLES: dict[str, tuple[str, str]] = {
    "dense": ("#000000", "o"),
    "kv4bit": ("#661100", "X"),
    "oracle": ("#0072B2", "s"),
    "gate": ("#D55E00", "o"),
    "quest": ("#009E73", "^"),
    "resa": ("#225555", "p"),
    "random": ("#7F7F7F", "x"),
    "streaming_llm": ("#CC79A7", "v"),
    "h2o": ("#E69F00", "D"),
    "tova": ("#56B4E9", "P"),
    "snapkv": ("#117733", "<"),
    "r_kv": ("#332288", ">"),
    "raas": ("#882255", "h"),
    "rpc": ("#999933", "p"),
    "lazy_eviction": ("#44AA99", "d"),
    "tri_attention": ("#AA4499", "*"),
    "fast_kvzip": ("#228833", "<"),
    "trim_kv": ("#EE6677", ">"),
    "reason_cache": ("#DDCC77", "8"),
    "random_sharing": ("#BBBBBB", "2"),
    "random_evict": ("#A6A6A6", "1"),
}
"""In this order methods are listed: those that keep everything, those that evict, the control of each last. Others
follow by name. Colours are of Okabe and Ito's and of Tol's palettes, which colour-blind readers can tell apart;
markers help."""

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
    colour, marker = GATES.get(gates) or STYLES.get(name) or SPARE[sum(map(ord, name)) % len(SPARE)]
    how = {"color": colour, "marker": marker, "markersize": 6, "linewidth": 2.4 if name == "gate" else 1.6}
    return {**how, "fillstyle": "bottom"} if "+" in series.split(",")[0] else how


def line_style(series: str, all_series: list[str]) -> Any:
    """Line style of a series, which differs between series of the same colour."""
    same = [s for s in all_series if style(s)["color"] == style(series)["color"]]
    return LINES[same.index(series) % len(LINES)]
