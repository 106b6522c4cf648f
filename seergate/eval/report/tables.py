"""The report's tables, in Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seergate.escaping import markdown_text
from seergate.eval.calibration.matching import MEASURES, record_path
from seergate.eval.report.findings import in_points, with_interval
from seergate.eval.report.load import Setting, Sweep
from seergate.eval.statistics.intervals import Difference, mean_and_interval
from seergate.eval.statistics.metrics import REPLY
from seergate.eval.store import flatten, read_json

NONE = "–"

Columns = dict[str, Callable[[Sweep, Setting], str]]
"""Heading -> function that makes a setting's cell."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table of plain texts; the first ``left`` columns are aligned left, the others right."""
    cells = [[markdown_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w if i < left else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


def table(sweep: Sweep, columns: Columns, settings: Sequence[Setting] | None = None) -> str:
    """A Markdown table with one row per setting (all settings of the sweep if ``None``); empty without settings."""
    rows = [[cell(sweep, s) for cell in columns.values()] for s in (sweep.settings if settings is None else settings)]
    return markdown(list(columns), rows) if rows else ""


def figure_of(name: str, factor: float = 1, digits: int = 1, key: Any = None) -> Callable[[Sweep, Setting], str]:
    """The column of a metric, or of its entry ``key`` if it has several, multiplied by ``factor``."""
    return lambda _, s: scaled(s.metrics[name] if key is None else s.metrics[name][key], factor, digits)


def scaled(value: float | None, factor: float, digits: int) -> str:
    """A number multiplied by ``factor``, with ``digits`` decimals; a dash for ``None``."""
    return NONE if value is None else f"{factor * value:.{digits}f}"


def interval_of(s: Setting, digits: int = 1) -> str:
    """The 95 % interval of the accuracy, in percent."""
    low, high = s.interval
    return f"{100 * low:.{digits}f} to {100 * high:.{digits}f}"


def minus_dense(sweep: Sweep, s: Setting) -> str:
    """The difference to dense in points, with its 95 % interval if there is one."""
    if sweep.dense is None or s is sweep.dense:
        return NONE
    d = sweep.difference(s, sweep.dense)
    return in_points(d) if d.n else NONE


def minus_gate(sweep: Sweep, s: Setting) -> Difference | None:
    """The KL of a setting minus the KL of the first gate with the same budget, share or threshold, paired by text;
    ``None`` for that gate itself, if there is none, or if the two scored different texts.
    """
    limits = s.budget, s.share, s.threshold
    same = (
        each for each in sweep.settings if (each.budget, each.share, each.threshold) == limits != (None, None, None)
    )
    gate = next((each for each in same if each.method == "gate"), s)
    ours, theirs = ({text["problem_id"]: np.mean(text["kl"]) for text in each.samples} for each in (s, gate))
    if gate is s or ours.keys() != theirs.keys():
        return None
    return mean_and_interval([float(ours[text] - theirs[text]) for text in ours])


def _minus_gate(sweep: Sweep, s: Setting) -> str:
    d = minus_gate(sweep, s)
    if d is None:
        return NONE
    return f"{d.mean:+.4f}" + ("" if math.isnan(d.low) else f" ({d.low:+.4f} to {d.high:+.4f})")


SETTING: Columns = {"method": lambda _, s: s.marked, "budget": lambda _, s: NONE if s.method == "dense" else s.nominal}

CORE: Columns = {
    **SETTING,
    "accuracy %": lambda _, s: f"{100 * s.accuracy.mean:.1f} ({interval_of(s, 0)})",
    "minus dense": minus_dense,
    "tokens per answer": figure_of("mean_tokens"),
    "truncated %": figure_of("truncation_rate", 100),
    "no answer %": figure_of("unanswered_rate", 100),
    "density %": figure_of("density", 100),
    "kB read per step": figure_of("bytes_read_per_step", 1e-3),
    "kB held": figure_of("own_bytes_mean", 1e-3),
    "tokens/s": figure_of("tokens_per_second"),
}
"""The main columns: accuracy and its cost."""

PROXIES: Columns = {
    **SETTING,
    "accuracy %": figure_of("accuracy", 100),
    "recall %": figure_of("recall", 100),
    "KL to dense, nats": figure_of("next_token_kl", digits=4),
    "its 99th percentile": figure_of("next_token_kl_p99", digits=4),
    "same next token %": figure_of("agreement", 100),
    "perplexity": figure_of("perplexity", digits=3),
    "dense": figure_of("dense_perplexity", digits=3),
}
"""The cheap proxies beside the accuracy."""

TEXTS: Columns = {
    **SETTING,
    "KL": lambda _, s: with_interval(s.metrics, "kl"),
    "KL, 99th percentile": lambda _, s: with_interval(s.metrics, "kl_p99"),
    "minus the gate's": _minus_gate,
    "perplexity": figure_of("perplexity"),
    "same token %": figure_of("agreement", 100),
    "read %": lambda sweep, s: f"{sweep.share(s, 'bytes_read_per_step'):.0f}",
    "held %": lambda sweep, s: f"{sweep.share(s, 'own_bytes_mean'):.0f}",
}
"""Columns of scored texts: how far a method is from dense attention, and its bytes."""


def core_table(sweep: Sweep) -> str:
    """Accuracy and its cost, and, if they were measured, the memory saved by methods that share blocks and the
    log-probability of the right answer.
    """
    saved = {"memory saved by sharing %": figure_of("amsr", 100)} if sweep.having("amsr") else {}
    reply_columns = {"log p of the answer": figure_of(REPLY, digits=2)} if sweep.having(REPLY) else {}
    return table(sweep, CORE | saved | reply_columns)


def proxy_table(sweep: Sweep) -> str:
    """The cheap proxies; empty if they were not measured."""
    return table(sweep, PROXIES, sweep.having("next_token_kl"))


def recall_table(sweep: Sweep) -> str:
    """Recall by layer; empty if it was not measured."""
    measured = sweep.having("recall")
    layers = measured[0].proxies["layers"] if measured else []
    by_layer = {f"layer {layer}": figure_of("recall_per_layer", 100, key=i) for i, layer in enumerate(layers)}
    return table(sweep, {**SETTING, "mean %": figure_of("recall", 100), **by_layer}, measured)


def pass_table(sweep: Sweep) -> str:
    """pass@k for every k that all settings have; empty with one sample per problem."""
    first, *others = (s.metrics["pass_at_k"] for s in sweep.settings)
    by_k = {f"pass@{k} %": figure_of("pass_at_k", 100, key=k) for k in first if all(k in other for other in others)}
    return table(sweep, SETTING | by_k) if len(by_k) > 1 else ""


def table_beside(
    sweep: Sweep, theirs: Callable[[Setting], float | None], unlike: Callable[[Setting], Sequence[str]]
) -> str:
    """Our accuracy beside the published one, for finished runs that have a published one; empty if none has.

    Args:
        theirs: a setting's published accuracy in percent, if it has one.
        unlike: a setting's differences from the paper, in words.
    """
    numbers = {s.directory: number for s in sweep.settings if s.complete and (number := theirs(s)) is not None}
    columns: Columns = {
        **SETTING,
        "ours %": lambda _, s: f"{100 * s.accuracy.mean:.1f} ({interval_of(s)})",
        "published %": lambda _, s: f"{numbers[s.directory]:.1f}",
        "difference": lambda _, s: f"{100 * s.accuracy.mean - numbers[s.directory]:+.1f}",
        "unlike the paper": lambda _, s: "; ".join(unlike(s)) or NONE,
    }
    return table(sweep, columns, [s for s in sweep.settings if s.directory in numbers])


BYTES_WORDS = {"resident": "resident bytes", "read": "bytes read per step"}
EQUAL_BYTES_NOTE = (
    "A target of *n tokens* is the bytes that n tokens of the dense cache take; other targets are what a method "
    "without a budget was measured to take. Each method got the nearest setting on a replayed answer; *kB* and *off "
    "by* were measured on its own answers. Methods that keep all tokens cannot hold less. Those named below the table "
    "could not come within 10 % of a target and were not run for it."
)


def equal_bytes(sweep: Sweep) -> list[tuple[str, str]]:
    """Heading and Markdown of each comparison at equal bytes among a sweep's settings."""
    return [
        (f"At equal {BYTES_WORDS[measure]}", _matched(sweep, root, record["matches"], metric))
        for measure, metric in MEASURES.items()
        for root in sorted({s.directory.parent for s in sweep.settings})
        if (record := read_json(record_path(root, measure))) is not None
    ]


def _matched(sweep: Sweep, root: Path, matches: list[dict[str, Any]], metric: str) -> str:
    settings = {s.directory.name: s for s in sweep.settings if s.directory.parent == root}
    rows, impossible = list[list[str]](), list[str]()

    def add(target: str, s: Setting, setting: str, target_bytes: float) -> None:
        measured = s.metrics[metric]
        off = NONE if measured is None else f"{100 * (measured / target_bytes - 1):+.0f}"
        accuracy = [f"{100 * s.accuracy.mean:.1f}", interval_of(s), minus_dense(sweep, s)]
        rows.append([target, s.marked, setting, scaled(measured, 1e-3, 1), off, *accuracy])

    for target in dict.fromkeys(m["target"] for m in matches):
        group = [m for m in matches if m["target"] == target]
        own = settings.get(target)  # the method that sets the target gets a row too
        if own is not None:
            add(target, own, own.nominal, group[0]["target_bytes"])
        for m in group:
            s = settings.get(m["label"])
            if m["matched"] and s is not None and s is not own:
                option = "" if m["knob"] == "token_budget" else f"{m['knob']} "
                add(target, s, f"{option}{m['value']}", m["target_bytes"])
        missed = {m["method"]: 100 * (m["bytes"] / m["target_bytes"] - 1) for m in group if not m["matched"]}
        if missed:
            listed = ", ".join(f"{method} ({percent:+.0f} %)" for method, percent in missed.items())
            impossible.append(f"- {markdown_text(f'not possible at {target}: {listed}')}")
    header = ["target", "method", "setting", "kB", "off by %", "accuracy %", "95 % interval", "minus dense"]
    blocks = [EQUAL_BYTES_NOTE, markdown(header, rows, left=3), "\n".join(impossible)]
    return "\n\n".join(filter(None, blocks))


def csv_text(sweep: Sweep) -> str:
    """All metrics as CSV, a row for each setting."""
    metrics = [flatten(s.metrics) for s in sweep.settings]
    listed = {name for each in metrics for name, value in each.items() if isinstance(value, list)}
    names = [name for name in dict.fromkeys(name for each in metrics for name in each) if name not in listed]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["method", "budget", "share", "threshold", "block_size", "accuracy_low", "accuracy_high", *names])
    for s, own in zip(sweep.settings, metrics, strict=True):
        interval = (None, None) if sweep.of_texts else s.interval
        given = (s.marked, s.budget, s.share, s.threshold, s.block_size, *interval)
        writer.writerow([*given, *(own.get(name) for name in names)])
    return text.getvalue()
