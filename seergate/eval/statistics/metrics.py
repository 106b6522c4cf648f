"""Metrics of a run, derived from its samples, so that they do not depend on how often it was interrupted."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

from seergate.eval.statistics.intervals import Estimate, clustered, clustered_quantile, mean_and_interval, pass_at_k
from seergate.eval.store import in_order

QUANTILES = (0.1, 0.5, 0.9, 0.99)
"""Quantiles of the distribution of answer lengths."""

COSTS = ("density", "cached_tokens", "bytes_read_per_step", "own_bytes_mean", "amsr")
"""Figures of a sample's decoding (tokens and bytes read, held and shared), averaged over generated tokens."""

PEAKS = ("own_bytes_peak",)
"""Figures of which a run's metric is the maximum over samples."""

REPLY = "reply_logprob"
"""Log-probability of a right answer in nats, for tasks whose problems have a `Problem.reply`."""

PROXIES = (
    *("recall", "recall_per_layer", "next_token_kl", "next_token_kl_p99", "perplexity", "dense_perplexity"),
    "agreement",
)
"""Figures of `seergate.eval.proxies`; ``None`` if they were not measured."""


def by_problem(samples: list[dict[str, Any]], name: str) -> dict[str, list[float]]:
    """A figure of each sample, grouped by problem, in an order that does not depend on that of generation."""
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in in_order(samples):
        groups[sample["problem_id"]].append(float(sample[name]))
    return dict(groups)


def derive(samples: list[dict[str, Any]], proxies: dict[str, Any] | None) -> dict[str, Any]:
    """All figures of one run, from its samples (at least one) and the contents of `proxies.json`.

    Returns:
        Where texts were scored, `of_texts`. Otherwise:

        ``accuracy`` (pass@1: mean over problems of the mean over a problem's samples), ``accuracy_se`` (clustered by
        problem), ``pass_at_k`` (k -> estimate, for the powers of two that all problems have samples for),
        ``n_problems``, ``n_samples``, ``mean_tokens`` and ``mean_tokens_se``, ``max_tokens``, ``token_quantiles``,
        ``mean_prompt_tokens``, ``truncation_rate``, ``unanswered_rate``, ``density`` (tokens read per token of
        context), ``cached_tokens`` (per KV head), ``bytes_read_per_step``, ``own_bytes_mean``, ``own_bytes_peak``
        (what a sequence would hold alone, all layers), ``amsr`` (the memory saving ratio of methods that share
        blocks), ``tokens_per_second`` (per process), ``seconds``, ``reply_logprob`` and ``reply_logprob_se``, and the
        `PROXIES`.
    """
    samples = in_order(samples)  # so that sums and resamples do not depend on when a sample was made
    if "kl" in samples[0]:
        return of_texts(samples)
    correct = by_problem(samples, "correct")
    accuracy, fewest = clustered(correct), min(map(len, correct.values()))
    length = clustered(by_problem(samples, "n_tokens"))
    tokens = [s["n_tokens"] for s in samples]
    seconds = math.fsum(s["seconds"] for s in samples)
    reply_samples = [s for s in samples if s.get(REPLY) is not None]
    reply = clustered(by_problem(reply_samples, REPLY)) if reply_samples else None
    return {
        "accuracy": accuracy.mean,
        "accuracy_se": _or_none(accuracy),
        "pass_at_k": {str(2**i): pass_at_k(correct, 2**i) for i in range(fewest.bit_length())},
        "n_problems": accuracy.n,
        "n_samples": len(samples),
        "mean_tokens": length.mean,
        "mean_tokens_se": _or_none(length),
        "max_tokens": max(tokens),
        "token_quantiles": {str(q): int(np.quantile(tokens, q, method="inverted_cdf")) for q in QUANTILES},
        "mean_prompt_tokens": math.fsum(s["n_prompt_tokens"] for s in samples) / len(samples),
        "truncation_rate": sum(s["finish_reason"] == "length" for s in samples) / len(samples),
        "unanswered_rate": sum(s["pred"] is None for s in samples) / len(samples),
        **{name: _per_token(samples, name) for name in COSTS},
        **{name: max((s[name] for s in samples if s.get(name) is not None), default=None) for name in PEAKS},
        "tokens_per_second": sum(tokens) / seconds if seconds else None,
        "seconds": seconds,
        REPLY: reply and reply.mean,
        f"{REPLY}_se": reply and _or_none(reply),
        **{name: (proxies or {}).get(name) for name in PROXIES},
    }


def _per_token(samples: list[dict[str, Any]], name: str) -> float | None:
    measured = [(s["n_tokens"], s[name]) for s in samples if s.get(name) is not None]
    weight = sum(n for n, _ in measured)
    return math.fsum(n * value for n, value in measured) / weight if weight else None


def _or_none(estimate: Estimate) -> float | None:
    return None if math.isnan(estimate.se) else estimate.se


def of_texts(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """All figures of one run that scored texts (`seergate.eval.teacher_forcing.TeacherForcing.measure`).

    Returns:
        ``kl``, ``loss``, ``agreement`` (means over texts) and ``kl_p99`` (of all tokens), each with ``_low`` and
        ``_high``, the ends of its 95 % interval, clustered by text, which are ``None`` for one text; ``kl_se``,
        ``agreement_se``; ``perplexity`` and ``dense_perplexity``; ``n_problems``; means of `COSTS`, maxima of `PEAKS`.
    """
    metrics: dict[str, Any] = {}
    for name in ("kl", "loss", "agreement"):
        mean = mean_and_interval([float(np.mean(text[name])) for text in texts])
        metrics |= {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high, f"{name}_se": mean.se}
    p99, low, high = clustered_quantile([text["kl"] for text in texts], 0.99)
    metrics |= {"kl_p99": p99, "kl_p99_low": low, "kl_p99_high": high}
    metrics |= {"perplexity": math.exp(metrics["loss"]), "n_problems": len(texts), "n_samples": len(texts)}
    metrics["dense_perplexity"] = math.exp(np.mean([text["dense_loss"] for text in texts]))
    read = {name: [text[name] for text in texts if name in text] for name in (*COSTS, *PEAKS, "n_tokens", "seconds")}
    metrics |= {name: float((max if name in PEAKS else np.mean)(values)) for name, values in read.items() if values}
    return {name: None if math.isnan(value) else value for name, value in metrics.items()}
