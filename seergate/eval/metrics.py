"""Metrics: derived from samples, never edited, the same however often a run was interrupted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from seergate.eval.stats import Estimate, clustered

COSTS = ("density", "bytes_read_per_step", "resident_bytes_mean")
"""What each sample's batch was measured to read and hold, per sequence; averaged over generated tokens."""


def by_problem(samples: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> dict[str, list[float]]:
    """A value of each sample, grouped by problem. Sorted, so that the order of generation does not matter."""
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s["problem_id"], s["sample_idx"])):
        groups[sample["problem_id"]].append(float(value(sample)))
    return dict(groups)


def derive(samples: list[dict[str, Any]], recall: dict[str, Any] | None = None) -> dict[str, Any]:
    """All figures of one run.

    Args:
        samples: at least one.
        recall: contents of `recall.json`, if it was measured.

    Returns:
        ``accuracy`` (mean over problems), ``accuracy_se`` (clustered by problem), ``n_problems``, ``n_samples``,
        ``mean_tokens`` and ``mean_tokens_se``, ``max_tokens``, ``mean_prompt_tokens``, ``truncation_rate``,
        ``unanswered_rate``, ``density`` (tokens read per token of context), ``bytes_read_per_step``,
        ``resident_bytes_mean``, ``resident_bytes_peak`` (the last three per sequence, all layers),
        ``tokens_per_second``, ``seconds``, ``recall`` and ``recall_per_layer`` (``None`` if not measured).
    """
    accuracy = clustered(by_problem(samples, lambda s: s["correct"]))
    length = clustered(by_problem(samples, lambda s: s["n_tokens"]))
    tokens = sum(s["n_tokens"] for s in samples)
    seconds = math.fsum(s["seconds"] for s in samples)
    peaks = [s["resident_bytes_peak"] for s in samples if s.get("resident_bytes_peak") is not None]
    return {
        "accuracy": accuracy.mean,
        "accuracy_se": _or_none(accuracy),
        "n_problems": accuracy.n,
        "n_samples": len(samples),
        "mean_tokens": length.mean,
        "mean_tokens_se": _or_none(length),
        "max_tokens": max(s["n_tokens"] for s in samples),
        "mean_prompt_tokens": math.fsum(s["n_prompt_tokens"] for s in samples) / len(samples),
        "truncation_rate": sum(s["finish_reason"] == "length" for s in samples) / len(samples),
        "unanswered_rate": sum(s["pred"] is None for s in samples) / len(samples),
        **{name: _per_token(samples, name) for name in COSTS},
        "resident_bytes_peak": max(peaks, default=None),
        "tokens_per_second": tokens / seconds if seconds else None,
        "seconds": seconds,
        "recall": recall["mean"] if recall else None,
        "recall_per_layer": recall["per_layer"] if recall else None,
    }


def _per_token(samples: list[dict[str, Any]], name: str) -> float | None:
    measured = [(s["n_tokens"], s[name]) for s in samples if s.get(name) is not None]
    weight = sum(n for n, _ in measured)
    return math.fsum(n * value for n, value in measured) / weight if weight else None


def _or_none(estimate: Estimate) -> float | None:
    return None if math.isnan(estimate.se) else estimate.se
