"""Findings and caveats of a sweep, as sentences computed from the numbers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from seergate.eval.generation.samples import Limit
from seergate.eval.report.load import Setting, Sweep
from seergate.eval.statistics.intervals import Difference
from seergate.eval.statistics.metrics import REPLY
from seergate.methods import EvictingMethod, SelectingMethod

CLOSE = 0.02
"""Largest difference from dense accuracy that counts as a match: two percentage points."""

TRUNCATED = 0.05
"""Share of answers cut at the length limit above which a caveat reports it and plots draw hollow markers."""

UNANSWERED = 0.5
"""Share of completions without an answer above which a caveat reports it."""

SOFTWARE = ("seergate", "git", "torch", "transformers")
"""Entries of a run's environment that affect results."""

FEW = 2
"""Number of evicting methods above which one sentence compares the gate with all of them."""


def findings(sweep: Sweep) -> list[str]:
    """The findings of a sweep, one sentence each, the most important first."""
    if sweep.of_texts:
        return [_of_texts(s) for s in sweep.settings]
    lines = list[str | None]()
    evicting = [m for m in sweep.methods if any(s.evicts for s in sweep.of(m))]
    controls = [m for m in sweep.methods if sweep.role(m) == "control"]
    at_random = [m for m in controls if m not in evicting]
    if sweep.dense is not None:
        lines.append(_dense(sweep, sweep.dense))
    if sweep.dense is not None and not at_chance(sweep.dense):
        lines += [_against_dense(sweep, method, sweep.dense) for method in sweep.methods if method not in at_random]
        lines += [_without_budget(sweep, setting, sweep.dense) for setting in sweep.settings if setting.budget is None]
    gates = [m for m in sweep.methods if m == "gate" or m.startswith("gate [")]  # several, if their weights differ
    few = sweep.methods if len(evicting) <= FEW else [m for m in sweep.methods if m not in evicting]
    for gate in gates:
        rivals = [m for m in few if m not in (*gates, *at_random) and sweep.role(m) != "bound"]
        lines += [_gate_against(sweep, gate, other) for other in rivals]
        if len(evicting) > FEW:
            lines.append(_ahead(sweep, gate, evicting, f"{gate} is"))
    rest = [m for m in evicting if m not in controls]
    for control in set(controls) & set(evicting) if rest else ():
        lines.append(_ahead(sweep, control, rest, f"{control}, the control of all evictors, is"))
    lines += _recall(sweep)
    return [line for line in lines if line is not None]


def _of_texts(s: Setting) -> str:
    metrics, dense = s.metrics, s.metrics["dense_perplexity"]
    return (
        f"{s.label}: KL to dense attention {with_interval(metrics, 'kl')} nats per token, 99th percentile "
        f"{with_interval(metrics, 'kl_p99')}; perplexity {metrics['perplexity']:.2f} ({dense:.2f} in one dense pass); "
        f"the most probable token is the same at {_percent(metrics['agreement'])} of tokens."
    )


def with_interval(metrics: dict[str, Any], name: str) -> str:
    """A non-negative metric as text, with its 95 % interval if it has one."""
    low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
    return f"{metrics[name]:.4f}" + ("" if low is None else f" ({max(0.0, low):.4f} to {high:.4f})")


def at_chance(dense: Setting) -> bool:
    """True if dense attention is not clearly better than guessing, so that sparsity has nothing to lose."""
    chance = dense.config["task"].get("chance") or 0.0
    return dense.accuracy.mean <= chance or dense.interval[0] < chance


def idle(sweep: Sweep) -> list[str]:
    """Name the settings that have no effect: they decode or leave out nothing, or reproduce dense logits exactly."""
    notes = defaultdict[str, list[str]](list)
    for s in sweep.settings:
        if s.method == "dense":
            continue
        limited = any(limit is not None for limit in (s.budget, s.share, s.threshold))
        density = s.metrics.get("density") or 0.0
        if s.metrics.get("max_tokens") == 1:
            notes["gave answers of one token, which the dense prompt decides: nothing was decoded"].append(s.label)
        elif limited and density > 1 - 1e-6:
            notes["read the whole context at every step, which does not measure sparsity"].append(s.label)
        elif sweep.dense is not None and (measures := _logit_measures(s)) and measures == _logit_measures(sweep.dense):
            notes["reproduced dense attention's logits bit for bit: their options have no effect"].append(s.label)
    return [f"{', '.join(labels)} {note}." for note, labels in notes.items()]


def _logit_measures(s: Setting) -> list[Any]:
    """What was measured on the decoded logits: KL on texts, replies and their log-probabilities, or proxies."""
    each = {(x["problem_id"], x["sample_idx"]): (x.get("kl", x.get(REPLY)), x.get("completion")) for x in s.samples}
    proxies = [s.metrics.get(name) for name in ("next_token_kl", "next_token_kl_p99", "perplexity")]
    sample_measures = [each[key] for key in sorted(each)] if all(x is not None for x, _ in each.values()) else []
    measured = proxies if proxies[0] is not None else []
    return [sample_measures, measured] if sample_measures or measured else []


def _without_budget(sweep: Sweep, setting: Setting, dense: Setting) -> str | None:
    """Compare a setting without a budget to dense; ``None`` for dense itself, or if they share no problem."""
    difference = sweep.difference(setting, dense)
    if setting.method == dense.method or not difference.n:
        return None
    if setting.threshold is not None or setting.share is not None:
        density = setting.metrics["density"]
        read = "" if density is None else f", and reads {_percent(density)} of the context"
        return f"{setting.label} is {in_points(difference)} points from dense{read}."
    start = f"{setting.label} ({setting.nominal}) is {in_points(difference)} points from dense"
    own_bytes, dense_bytes = (s.metrics["own_bytes_mean"] for s in (setting, dense))
    if not own_bytes or not dense_bytes:
        return f"{start}."
    return f"{start}, and holds {_percent(own_bytes / dense_bytes)} of its bytes."


def _by_budget(sweep: Sweep, ours: str, other: str) -> dict[int, Difference]:
    """Budget -> paired difference of two series, for the budgets at which they share problems."""
    pairs = {budget: (sweep.at(ours, budget), sweep.at(other, budget)) for budget in sweep.budgets}
    diffs = {budget: sweep.difference(a, b) for budget, (a, b) in pairs.items() if a is not None and b is not None}
    return {budget: difference for budget, difference in diffs.items() if difference.n}


def _ahead(sweep: Sweep, ours: str, others: list[str], start: str) -> str:
    """Count the budgets at which one series is ahead of, and behind, each of several others."""
    parts = []
    for other in others:
        if diffs := _by_budget(sweep, ours, other).values():
            ahead, behind = sum(d.positive for d in diffs), sum((-d).positive for d in diffs)
            parts.append(f"{other} {ahead} ({behind}) of {len(diffs)}")
    if not parts:
        return f"{start} at no budget of the others."
    return f"{start} ahead (behind), with an interval that excludes zero, at equal budgets: {', '.join(parts)}."


def _dense(sweep: Sweep, dense: Setting) -> str:
    low, high = map(_percent, dense.interval)
    return (
        f"dense answers {_percent(dense.accuracy.mean)} of {Sweep([dense]).problems} right (95 % interval "
        f"{low} to {high}); prompt and answer have {sweep.context:.0f} tokens on average."
    )


def verdict(sweep: Sweep) -> str:
    """State the budget that each method needs to match dense."""
    if sweep.dense is None:
        return "There is no dense run, so the cost of sparsity is not known."
    if at_chance(sweep.dense):
        return (
            f"Dense answers {_percent(sweep.dense.accuracy.mean)} right, which is not clearly better than guessing: "
            "the cost of sparsity cannot be measured."
        )
    enough, short, open_ = list[str](), list[str](), list[str]()
    for method in sweep.methods:
        if (smallest := _smallest_lossless(sweep, method, sweep.dense)) is None:
            continue
        setting, difference = smallest
        if _not_worse(difference):
            enough.append(f"{method} {setting.budget} tokens ({_share_of_context(sweep, setting)})")
        else:
            (short if (-difference).positive else open_).append(method)
    start = f"Dense answers {_percent(sweep.dense.accuracy.mean)} right, with {sweep.context:.0f} tokens of context. "
    needs = f"No measurable loss from these budgets on: {', '.join(enough)}. " if enough else ""
    lost = f"No tested budget was enough for {', '.join(short)}. " if short else ""
    return (start + needs + lost + (f"Too few problems to tell for {', '.join(open_)}." if open_ else "")).strip()


def _smallest_lossless(sweep: Sweep, method: str, dense: Setting) -> tuple[Setting, Difference] | None:
    """The setting with the smallest budget from which on no loss is shown (if there is none, with the largest budget)
    and its difference from dense; ``None`` if they share no problem.
    """
    compared = [(s, d) for s in sweep.of(method) if (d := sweep.difference(s, dense)).n]
    first = enough_from([d for _, d in compared])
    return compared[-1 if first is None else first] if compared else None


def enough_from(compared: Sequence[Difference]) -> int | None:
    """Index of the first difference from dense, by ascending budget, from which on none shows a loss; ``None`` if the
    last one shows a loss, or has too few problems to tell.
    """
    return next((i for i in range(len(compared)) if all(map(_not_worse, compared[i:]))), None)


def _share_of_context(sweep: Sweep, setting: Setting) -> str:
    share = (setting.budget or 0) / sweep.context
    return f"{100 * share:.0f} %" if share < 1 else "all"


def _against_dense(sweep: Sweep, method: str, dense: Setting) -> str | None:
    """Compare a method to dense at the budget that it needs; ``None`` if they share no problem."""
    if (smallest := _smallest_lossless(sweep, method, dense)) is None:
        return None
    setting, difference = smallest
    points = f"is {in_points(difference)} points from dense"
    if not _not_worse(difference):
        lost = (-difference).positive
        conclusion = "no tested budget was enough" if lost else "too few problems to tell if that is a loss"
        return f"{setting.label} tokens {points}; {conclusion}."
    start = f"{setting.label} tokens ({_share_of_context(sweep, setting)} of the full context) {points}"
    if difference.low >= -CLOSE and difference.high <= CLOSE:
        return f"{start}: level with dense."
    if difference.positive:
        return f"{start}, with an interval above zero: better than dense."
    reach = -100 * difference.low if difference.n > 1 else 100
    return f"{start}: no measurable loss, but one of up to {reach:.0f} points is possible."


def _gate_against(sweep: Sweep, gate: str, other: str) -> str:
    diffs = _by_budget(sweep, gate, other)
    if not diffs:
        return f"{gate} and {other} answered no problem at the same budget, so they cannot be compared."
    points = ", ".join(f"{in_points(difference)} at {budget}" for budget, difference in diffs.items())
    wins = f"ahead, with an interval above zero, at {sum(d.positive for d in diffs.values())} of {len(diffs)} budgets"
    return f"{gate} minus {other}, points on the same problems: {points} ({wins})."


def _recall(sweep: Sweep) -> list[str]:
    measured = sweep.having("recall")
    if not measured or sweep.proxies_on is None:
        return []
    budgets = Counter(s.budget for s in measured if s.budget is not None)
    smallest = min(budgets, key=lambda budget: (-budgets[budget], budget), default=None)  # among the most common
    if smallest is None:  # thresholds only
        each = "; ".join(f"{s.label} {_percent(s.metrics['recall'])}" for s in measured)
        return [f"recall of dense attention's mass: {each}."]
    row = [f"{s.series} {_percent(s.metrics['recall'])}" for s in measured if s.budget == smallest]
    return [f"recall of dense attention's mass at {smallest} tokens: {', '.join(row)}."]


def cautions(sweep: Sweep) -> list[str]:
    """The caveats of a sweep's numbers, one sentence each."""
    lines = idle(sweep)
    lines += [
        f"{s.label} is unfinished: {s.metrics['n_samples']} samples so far." for s in sweep.settings if not s.complete
    ]
    if sweep.of_texts:
        count = sweep.settings[0].metrics["n_problems"]
        texts = f"{count} text{'s' if count > 1 else ''}"
        return [*lines, f"{texts} of {sweep.config['task']['length']} tokens were scored."]
    most = max(s.accuracy.n for s in sweep.settings)
    if sweep.dense is None:
        lines.append("there is no dense run, so the cost of sparsity is not known.")
    elif most > 1:
        compared = [sweep.difference(s, sweep.dense) for s in sweep.settings if s.method != "dense"]
        if differences := [d for d in compared if not math.isnan(d.se)]:
            least = max(d.margin for d in differences)
            lines.append(f"with {sweep.problems}, differences to dense below {100 * least:.0f} points may be chance.")
    if most == 1:
        lines.append("a single problem gives no interval; any difference may be chance.")
    generation = sweep.config["generation"]
    if generation["temperature"] == 0:
        lines.append("decoding was greedy, one chain per problem; sampled chains would vary more.")
    if unanswered := _above(sweep, "unanswered_rate", UNANSWERED):
        lines.append(f"no result was found in many answers: {unanswered}.")
    if truncated := _above(sweep, "truncation_rate", TRUNCATED):
        limit = Limit(generation["max_new_tokens"], generation.get("max_total_tokens"))
        lines.append(f"answers hit the limit, {limit}, so lengths are lower bounds: {truncated}.")
    if chance := sweep.config["task"].get("chance"):
        lines.append(f"guessing gets {_percent(chance)} right.")
    if sweep.dense is not None and at_chance(sweep.dense):
        lines.insert(0, "dense itself is not clearly better than guessing, so differences from it are not meaningful.")
    if str(sweep.config["task"]["name"]) == "gpqa_diamond_published":
        lines.append("in this file the right option is A in every problem; a model that prefers A gains from that.")
    budgeted = [s.kind for s in sweep.settings if s.budget is not None]
    if all(any(issubclass(kind, base) for kind in budgeted) for base in (EvictingMethod, SelectingMethod)):
        lines.append(
            "at equal token budgets, an evicting method stores only the budget, and a selecting method stores all "
            "tokens and reads only the budget: compare the two by bytes."
        )
    lines += [
        f"{s.label} shared no block in any answer, so it does not measure sharing (no step ended or was like "
        "an earlier one, or the answers were too short for its warm-up and block size)."
        for s in sweep.settings
        if s.metrics["amsr"] == 0
    ]
    sizes = {s.block_size for s in sweep.settings if s.block_size is not None}
    if len(sizes) > 1:
        lines.append(f"block sizes differ between methods ({', '.join(map(str, sorted(sizes)))} tokens).")
    environments = [s.config.get("environment", {}) for s in sweep.settings]
    if len({str(environment.get("hardware")) for environment in environments}) > 1:
        lines.append("the settings ran on different machines; do not compare their tokens per second.")
    versions = {name: sorted({str(each.get(name) or "unknown") for each in environments}) for name in SOFTWARE}
    if unlike := "; ".join(f"{name} {', '.join(values)}" for name, values in versions.items() if len(values) > 1):
        lines.append(f"the settings were made with different software: {unlike}; differences may come from that.")
    return lines


def _above(sweep: Sweep, rate: str, limit: float) -> str:
    """The settings of which a rate is above a limit, with the rate."""
    rates = {s.label: s.metrics[rate] for s in sweep.settings}
    return ", ".join(f"{label} ({_percent(value)})" for label, value in rates.items() if value > limit)


def _not_worse(difference: Difference) -> bool:
    """True if a difference shows no loss: its mean is above ``-CLOSE`` and its interval, if any, reaches zero."""
    return difference.mean >= -CLOSE and (difference.n == 1 or difference.high >= 0)


def in_points(difference: Difference) -> str:
    """A difference of accuracies in percentage points, with its 95 % interval if there is one."""
    interval = f" ({100 * difference.low:+.0f} to {100 * difference.high:+.0f})"
    return f"{100 * difference.mean:+.1f}{'' if math.isnan(difference.low) else interval}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if abs(value * 100 - round(value * 100)) < 0.05 else f"{100 * value:.1f} %"
