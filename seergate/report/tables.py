"""The report's tables, in Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from seergate.eval.metrics import REPLY
from seergate.report.findings import in_points
from seergate.report.load import Setting, Sweep
from seergate.report.published import deviations, published

NONE = "–"

Columns = dict[str, Callable[[Sweep, Setting], str]]
"""Heading -> a setting's cell."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are aligned left, numbers right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w if i < left else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


def table(sweep: Sweep, columns: Columns, settings: Sequence[Setting] | None = None) -> str:
    """A row for each setting; all of a sweep's if ``None``."""
    chosen = sweep.settings if settings is None else settings
    return markdown(list(columns), [[cell(sweep, s) for cell in columns.values()] for s in chosen])


def figure_of(name: str, factor: float = 1, digits: int = 1) -> Callable[[Sweep, Setting], str]:
    """The column of a metric."""
    return lambda _, s: scaled(s.metrics[name], factor, digits)


def scaled(value: float | None, factor: float, digits: int) -> str:
    """A number in other units; a dash where there is none."""
    return NONE if value is None else f"{factor * value:.{digits}f}"


def interval_of(s: Setting, digits: int = 1) -> str:
    """The 95 % interval of the accuracy, in percent."""
    low, high = s.interval
    return f"{100 * low:.{digits}f} to {100 * high:.{digits}f}"


def limit_of(s: Setting) -> str:
    """The nominal budget: tokens, a threshold, or words."""
    return NONE if s.method == "dense" else s.nominal


def minus_dense(sweep: Sweep, s: Setting) -> str:
    """The difference to dense in points, with its 95 % interval if there is one."""
    if sweep.dense is None or s is sweep.dense:
        return NONE
    d = sweep.difference(s, sweep.dense)
    return in_points(d) if d.n else NONE


SETTING: Columns = {"method": lambda _, s: s.marked, "budget": lambda _, s: limit_of(s)}

CORE: Columns = {
    **SETTING,
    "accuracy %": lambda _, s: f"{100 * s.accuracy.mean:.1f} ({interval_of(s, 0)})",
    "minus dense": minus_dense,
    "tokens per answer": figure_of("mean_tokens"),
    "truncated %": figure_of("truncation_rate", 100),
    "density %": figure_of("density", 100),
    "kB read per step": figure_of("bytes_read_per_step", 1e-3),
    "kB held": figure_of("own_bytes_mean", 1e-3),
}
"""The main columns: accuracy and its cost."""

ACCURACY: Columns = {
    **SETTING,
    "accuracy %": figure_of("accuracy", 100),
    "95 % interval": lambda _, s: interval_of(s),
    "minus dense": minus_dense,
    "problems": figure_of("n_problems", digits=0),
    "samples": figure_of("n_samples", digits=0),
    "mean tokens": figure_of("mean_tokens"),
    "10/50/90 %": lambda _, s: "/".join(str(s.metrics["token_quantiles"][q]) for q in ("0.1", "0.5", "0.9")),
    "max tokens": figure_of("max_tokens", digits=0),
    "truncated %": figure_of("truncation_rate", 100),
    "no answer %": figure_of("unanswered_rate", 100),
}
"""Accuracy and length."""

COST: Columns = {
    **SETTING,
    "block size": lambda _, s: scaled(s.config["method"].get("block_size"), 1, 0),
    "density %": figure_of("density", 100),
    "tokens cached": figure_of("cached_tokens", digits=0),
    "kB read per step": figure_of("bytes_read_per_step", 1e-3),
    "kB held, mean": figure_of("own_bytes_mean", 1e-3),
    "kB held, peak": figure_of("own_bytes_peak", 1e-3),
    "kB allocated, mean": figure_of("resident_bytes_mean", 1e-3),
    "tokens/s": figure_of("tokens_per_second"),
    "recall %": figure_of("recall", 100),
}
"""Columns of memory traffic, memory and time of decoding."""

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


def core_table(sweep: Sweep) -> str:
    """Accuracy and what it cost; with the log-probability of the right answer, where it was measured."""
    known = any(s.metrics[REPLY] is not None for s in sweep.settings)
    return table(sweep, CORE | ({"log p of the answer": figure_of(REPLY, digits=2)} if known else {}))


def accuracy_table(sweep: Sweep) -> str:
    """Accuracy and length."""
    return table(sweep, ACCURACY)


def cost_table(sweep: Sweep) -> str:
    """What decoding read, held and took, and what sharing blocks saved where methods do."""
    shares = any(s.metrics["amsr"] is not None for s in sweep.settings)
    return table(sweep, COST | ({"memory saved by sharing %": figure_of("amsr", 100)} if shares else {}))


def proxy_table(sweep: Sweep) -> str | None:
    """The cheap proxies, or ``None`` if they were not measured."""
    measured = [s for s in sweep.settings if s.metrics["next_token_kl"] is not None]
    return table(sweep, PROXIES, measured) if measured else None


def recall_table(sweep: Sweep) -> str | None:
    """Recall by layer, or ``None`` if it was not measured."""
    measured = [s for s in sweep.settings if s.metrics["recall"] is not None]
    if not measured:
        return None
    layers = measured[0].proxies["layers"] if measured[0].proxies else []
    by_layer = {f"layer {layer}": _percent_of("recall_per_layer", i) for i, layer in enumerate(layers)}
    return table(sweep, {**SETTING, "mean %": figure_of("recall", 100), **by_layer}, measured)


def pass_table(sweep: Sweep) -> str | None:
    """pass@k for every k that all settings have; ``None`` with one sample per problem."""
    ks = [
        k for k in sweep.settings[0].metrics["pass_at_k"] if all(k in s.metrics["pass_at_k"] for s in sweep.settings)
    ]
    by_k = {f"pass@{k} %": _percent_of("pass_at_k", k) for k in ks}
    return table(sweep, SETTING | by_k) if len(ks) > 1 else None


def _percent_of(name: str, key: Any) -> Callable[[Sweep, Setting], str]:
    return lambda _, s: scaled(s.metrics[name][key], 100, 1)


def table_beside(
    sweep: Sweep, theirs: Callable[[Setting], float | None], unlike: Callable[[Setting], Sequence[str]]
) -> str | None:
    """Ours beside a paper's, for what the paper ran and has been finished here; ``None`` if there is none of it.

    Args:
        sweep: the runs.
        theirs: a setting's published accuracy in percent, if it has one.
        unlike: in words, what a setting did otherwise than the paper.
    """
    numbers = {s.directory: number for s in sweep.settings if s.complete and (number := theirs(s)) is not None}
    columns: Columns = {
        **SETTING,
        "ours %": lambda _, s: f"{100 * s.accuracy.mean:.1f} ({interval_of(s)})",
        "published %": lambda _, s: f"{numbers[s.directory]:.1f}",
        "difference": lambda _, s: f"{100 * s.accuracy.mean - numbers[s.directory]:+.1f}",
        "unlike the paper": lambda _, s: "; ".join(unlike(s)) or NONE,
    }
    return table(sweep, columns, [s for s in sweep.settings if s.directory in numbers]) if numbers else None


def published_table(sweep: Sweep) -> str | None:
    """Ours beside SeerAttention-R's."""
    return table_beside(sweep, lambda s: published(s.config), lambda s: deviations(s.config))


def csv_text(sweep: Sweep) -> str:
    """All figures of all settings, for programs: a row for each."""
    names = [name for name, value in sweep.settings[0].metrics.items() if not isinstance(value, dict | list)]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["method", "budget", "threshold", "block_size", "accuracy_low", "accuracy_high", *names])
    for s in sweep.settings:
        given = [s.series, s.budget, s.threshold, s.block_size, *((None, None) if sweep.of_texts else s.interval)]
        writer.writerow([*given, *(s.metrics.get(name) for name in names)])
    return text.getvalue()
