"""Activated tokens against position, from traces of decoding (Figure 9a of SeerAttention-R)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seergate.decode.trace import METADATA_KEY
from seergate.errors import SeergateError
from seergate.report.plots import pyplot, save, tidy

LOW, HIGH = 10, 90
"""Percentiles over layers, heads and steps that the band spans."""

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass(frozen=True)
class Activation:
    """How much was read at each length of the context.

    Attributes:
        context: tokens of context, the decoded one included, ascending: the middle of each bin.
        mean, low, high: tokens read by a KV head at one step: mean and percentiles over layers, heads, rows and steps.
    """

    context: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_trace(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The numbers of a trace, by column (all but ``blocks``), and what its metadata says.

    Raises:
        SeergateError: if the file is missing or no trace.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        described = pq.read_schema(os.fspath(path)).metadata or {}
        if METADATA_KEY not in described:
            raise SeergateError(f"{Path(path)} is a Parquet file, and not a trace of decoding")
        table = pq.read_table(os.fspath(path), columns=["step", "layer", "row", "head", "position", "tokens"])
    except (OSError, pa.ArrowInvalid) as error:
        raise SeergateError(f"the trace {Path(path)} cannot be read: {error}") from error
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return columns, json.loads(described[METADATA_KEY])


def activation(path: str | os.PathLike[str], bins: int = 200) -> Activation:
    """Tokens read against the length of the context.

    Args:
        path: of a trace.
        bins: at most this many points; fewer if the trace has fewer lengths.

    Raises:
        SeergateError: if nothing was decoded.
    """
    columns, _ = read_trace(path)
    context, tokens = columns["position"] + 1, columns["tokens"]
    if not len(context):
        raise SeergateError(f"nothing was decoded while the trace {Path(path)} was written")
    width = -(-(int(context.max()) - int(context.min()) + 1) // bins)
    group = (context - context.min()) // width
    order = np.argsort(group, kind="stable")
    groups, first = np.unique(group[order], return_index=True)
    parts = np.split(tokens[order], first[1:])
    return Activation(
        context=context.min() + groups * width + (width - 1) / 2,
        mean=np.array([part.mean() for part in parts]),
        low=np.array([np.percentile(part, LOW) for part in parts]),
        high=np.array([np.percentile(part, HIGH) for part in parts]),
    )


def activation_plot(traces: Mapping[str, str | os.PathLike[str]], path: Path, bins: int = 200) -> Path:
    """Draw tokens read against the length of the context, one line per trace and dense reading beside.

    Args:
        traces: by what they are called, such as ``"threshold 0.004"``.
        path: of the picture; an SVG is written beside it.
        bins: points per line, at most.

    Raises:
        SeergateError: if there is no trace, or one cannot be read.
    """
    if not traces:
        raise SeergateError("there is no trace to draw")
    lines = {name: activation(trace, bins) for name, trace in traces.items()}
    figure, axis = pyplot().subplots(figsize=(6.8, 4.4))
    for i, (name, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        axis.fill_between(line.context, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        axis.plot(line.context, line.mean, color=colour, label=name)
    ends = [min(line.context[0] for line in lines.values()), max(line.context[-1] for line in lines.values())]
    axis.plot(ends, ends, "--", color="black", linewidth=1, label="dense")
    axis.set(xlabel="tokens of context", ylabel="tokens read per KV head and step")
    axis.set_ylim(0, 1.3 * max(line.high.max() for line in lines.values()))
    axis.set_title(f"Activated tokens; bands: {LOW} % to {HIGH} % of layers, heads and steps", fontsize=10)
    tidy(axis)
    axis.legend(frameon=False, fontsize=8)
    return save(figure, path)
