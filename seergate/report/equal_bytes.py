"""Methods at equal bytes: what `seergate.eval.matching` has matched, with what the runs then measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seergate.eval import store
from seergate.eval.matching import MEASURES, record_path
from seergate.report.load import Setting, Sweep
from seergate.report.tables import NONE, interval_of, markdown, minus_dense, scaled

WORDS = {"resident": "resident bytes", "read": "bytes read per step"}

NOTE = (
    "A target of *n tokens* is the bytes that n tokens of the dense cache take; other targets are what a method "
    "without a budget was measured to take. Each method got the setting that comes nearest on a replayed answer; *kB* "
    "and *off by* are what its own answers then took. Methods that hold everything cannot hold less; those named "
    "below the table could not come within 10 % of a target and were not run for it."
)


def equal_bytes(sweep: Sweep) -> list[tuple[str, str]]:
    """Heading and Markdown for everything that was matched among a sweep's settings."""
    found = []
    for measure, metric in MEASURES.items():
        for root in sorted({s.directory.parent for s in sweep.settings}):
            record = store.read_json(record_path(root, measure))
            if record is not None:
                found.append((f"At equal {WORDS[measure]}", _section(sweep, root, record["matches"], metric)))
    return found


def _section(sweep: Sweep, root: Path, matches: list[dict[str, Any]], metric: str) -> str:
    settings = {s.directory.name: s for s in sweep.settings if s.directory.parent == root}
    rows, impossible = list[list[str]](), list[str]()
    for target in dict.fromkeys(m["target"] for m in matches):
        group = [m for m in matches if m["target"] == target]
        own = settings.get(target)  # the method that sets the target is a row of it
        if own is not None:
            rows.append(_row(sweep, target, own, own.nominal, group[0]["target_bytes"], metric))
        for m in group:
            setting = settings.get(m["label"])
            if m["matched"] and setting is not None and setting is not own:
                budget_option = f"{m['value']}" if m["knob"] == "token_budget" else f"{m['knob']} {m['value']}"
                rows.append(_row(sweep, target, setting, budget_option, m["target_bytes"], metric))
        missed = {m["method"]: 100 * (m["bytes"] / m["target_bytes"] - 1) for m in group if not m["matched"]}
        if missed:
            said = ", ".join(f"{method} ({percent:+.0f} %)" for method, percent in missed.items())
            impossible.append(f"- not possible at {target}: {said}")
    header = ["target", "method", "setting", "kB", "off by %", "accuracy %", "95 % interval", "minus dense"]
    table = markdown(header, rows, left=3)
    return "\n\n".join(part for part in (NOTE, table, "\n".join(impossible)) if part)


def _row(sweep: Sweep, target: str, s: Setting, budget_option: str, wanted: float, metric: str) -> list[str]:
    measured = s.metrics[metric]
    return [
        target,
        s.marked,
        budget_option,
        scaled(measured, 1e-3, 1),
        NONE if measured is None else f"{100 * (measured / wanted - 1):+.0f}",
        f"{100 * s.accuracy.mean:.1f}",
        interval_of(s),
        minus_dense(sweep, s),
    ]
