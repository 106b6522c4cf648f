"""The report's tables, in Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from seergate.report.findings import in_points
from seergate.report.load import Setting, Sweep
from seergate.report.published import deviations, published

NONE = "–"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are aligned left, numbers right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w if i < left else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


def core_table(sweep: Sweep) -> str:
    """What is looked at first: accuracy, and what it cost."""
    header = [
        "method",
        "budget",
        "accuracy %",
        "minus dense",
        "truncated %",
        "density %",
        "kB read per step",
        "kB held",
    ]
    rows = []
    for s in sweep.settings:
        m = s.metrics
        low, high = s.interval
        rows.append(
            [
                s.marked,
                limit_of(s),
                f"{100 * m['accuracy']:.1f} ({100 * low:.0f} to {100 * high:.0f})",
                minus_dense(sweep, s),
                f"{100 * m['truncation_rate']:.1f}",
                _scaled(m["density"], 100, 1),
                _scaled(m["bytes_read_per_step"], 1e-3, 1),
                _scaled(m["own_bytes_mean"], 1e-3, 1),
            ]
        )
    return markdown(header, rows)


def csv_text(sweep: Sweep) -> str:
    """All figures of all settings, for programs: a row for each."""
    names = [name for name, value in sweep.settings[0].metrics.items() if not isinstance(value, dict | list)]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["method", "budget", "threshold", "block_size", "accuracy_low", "accuracy_high", *names])
    for s in sweep.settings:
        given = [s.series, s.budget, s.threshold, s.block_size, *s.interval]
        writer.writerow([*given, *(s.metrics[name] for name in names)])
    return text.getvalue()


def accuracy_table(sweep: Sweep) -> str:
    """Accuracy and length."""
    header = [
        "method",
        "budget",
        "accuracy %",
        "95 % interval",
        "minus dense",
        "problems",
        "samples",
        "mean tokens",
        "10/50/90 %",
        "max tokens",
        "truncated %",
        "no answer %",
    ]
    return markdown(header, [_accuracy_row(sweep, s) for s in sweep.settings])


def _accuracy_row(sweep: Sweep, s: Setting) -> list[str]:
    m = s.metrics
    low, high = s.interval
    return [
        s.marked,
        limit_of(s),
        f"{100 * m['accuracy']:.1f}",
        f"{100 * low:.1f} to {100 * high:.1f}",
        minus_dense(sweep, s),
        str(m["n_problems"]),
        str(m["n_samples"]),
        f"{m['mean_tokens']:.1f}",
        "/".join(str(m["token_quantiles"][q]) for q in ("0.1", "0.5", "0.9")),
        str(m["max_tokens"]),
        f"{100 * m['truncation_rate']:.1f}",
        f"{100 * m['unanswered_rate']:.1f}",
    ]


def minus_dense(sweep: Sweep, s: Setting) -> str:
    """The difference to dense in points, with its 95 % interval if there is one."""
    if sweep.dense is None or s is sweep.dense:
        return NONE
    d = sweep.difference(s, sweep.dense)
    return in_points(d) if d.n else NONE


def cost_table(sweep: Sweep) -> str:
    """What decoding read, held and took."""
    header = [
        "method",
        "budget",
        "block size",
        "density %",
        "tokens cached",
        "kB read per step",
        "kB held, mean",
        "kB held, peak",
        "kB allocated, mean",
        "tokens/s",
        "recall %",
    ]
    shares = any(s.metrics["amsr"] is not None for s in sweep.settings)
    header += ["memory saved by sharing %"] if shares else []
    rows = []
    for s in sweep.settings:
        m = s.metrics
        rows.append(
            [
                s.marked,
                limit_of(s),
                _plain(s.config["method"].get("block_size")),
                _scaled(m["density"], 100, 1),
                _scaled(m["cached_tokens"], 1, 0),
                _scaled(m["bytes_read_per_step"], 1e-3, 1),
                _scaled(m["own_bytes_mean"], 1e-3, 1),
                _scaled(m["own_bytes_peak"], 1e-3, 1),
                _scaled(m["resident_bytes_mean"], 1e-3, 1),
                _scaled(m["tokens_per_second"], 1, 1),
                _scaled(m["recall"], 100, 1),
                *([_scaled(m["amsr"], 100, 1)] if shares else []),
            ]
        )
    return markdown(header, rows)


def recall_table(sweep: Sweep) -> str | None:
    """Recall by layer, or ``None`` if it was not measured."""
    measured = [s for s in sweep.settings if s.metrics["recall"] is not None]
    if not measured:
        return None
    layers = measured[0].proxies["layers"] if measured[0].proxies else []
    header = ["method", "budget", "mean %", *(f"layer {layer}" for layer in layers)]
    rows = [
        [
            s.marked,
            limit_of(s),
            _scaled(s.metrics["recall"], 100, 1),
            *(_scaled(value, 100, 1) for value in s.metrics["recall_per_layer"]),
        ]
        for s in measured
    ]
    return markdown(header, rows)


def limit_of(s: Setting) -> str:
    """What it is given to read or to hold: a budget, a threshold, or words."""
    return NONE if s.method == "dense" else s.nominal


def pass_table(sweep: Sweep) -> str | None:
    """pass@k for every k that all settings have; ``None`` with one sample per problem."""
    ks = [
        k for k in sweep.settings[0].metrics["pass_at_k"] if all(k in s.metrics["pass_at_k"] for s in sweep.settings)
    ]
    if len(ks) < 2:
        return None
    rows = [[s.marked, limit_of(s), *(f"{100 * s.metrics['pass_at_k'][k]:.1f}" for k in ks)] for s in sweep.settings]
    return markdown(["method", "budget", *(f"pass@{k} %" for k in ks)], rows)


def proxy_table(sweep: Sweep) -> str | None:
    """The cheap proxies beside the accuracy, or ``None`` if they were not measured."""
    measured = [s for s in sweep.settings if s.metrics["next_token_kl"] is not None]
    if not measured:
        return None
    header = [
        "method",
        "budget",
        "accuracy %",
        "recall %",
        "KL to dense, nats",
        "same next token %",
        "perplexity",
        "dense",
    ]
    rows = [
        [
            s.marked,
            limit_of(s),
            f"{100 * s.metrics['accuracy']:.1f}",
            _scaled(s.metrics["recall"], 100, 1),
            f"{s.metrics['next_token_kl']:.4f}",
            _scaled(s.metrics["agreement"], 100, 1),
            _scaled(s.metrics["perplexity"], 1, 3),
            _scaled(s.metrics["dense_perplexity"], 1, 3),
        ]
        for s in measured
    ]
    return markdown(header, rows)


def published_table(sweep: Sweep) -> str | None:
    """Ours beside the paper's, for what the paper ran and has been finished here; ``None`` if there is none of it."""
    rows = []
    for s in sweep.settings:
        theirs = published(s.config)
        if theirs is None or not s.complete:
            continue
        ours, (low, high) = 100 * s.accuracy.mean, s.interval
        error = f" ({100 * low:.1f} to {100 * high:.1f})"
        unlike = "; ".join(deviations(s.config)) or NONE
        rows.append([s.series, limit_of(s), f"{ours:.1f}{error}", f"{theirs:.1f}", f"{ours - theirs:+.1f}", unlike])
    header = ["method", "budget", "ours %", "published %", "difference", "unlike the paper"]
    return markdown(header, rows) if rows else None


def _plain(value: object) -> str:
    return NONE if value is None else str(value)


def _scaled(value: float | None, factor: float, digits: int) -> str:
    return NONE if value is None else f"{factor * value:.{digits}f}"
