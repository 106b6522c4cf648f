"""The recommended token budget, in three sentences: by answers, by scored texts, and by both together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seergate.eval.report.findings import at_chance, enough_from
from seergate.eval.report.load import Setting, Sweep
from seergate.eval.statistics.intervals import Difference, mean_and_interval

METHOD = "gate"


@dataclass(frozen=True)
class _Conclusion:
    """The result of one kind of measurement: a sentence; ``conclusive``, whether the data could have shown a loss; and
    the smallest budget from which on no loss was seen, or ``None``.
    """

    sentence: str
    conclusive: bool
    budget: int | None


def recommendation(answers: Sweep, texts: Sweep) -> list[str]:
    """Recommend the smallest budget from which on the gates show no loss against dense attention.

    A budget shows no loss if the mean loss is at most two points of accuracy (on texts: .02 nats per token) and the
    95 % interval of the difference from dense attention reaches zero. All larger budgets must show none either.

    Args:
        answers: problems that dense attention and the gates have answered, at several budgets.
        texts: texts that were scored under the same settings.

    Returns:
        Three sentences: by answers, by texts, and by both together.
    """
    by_answers, by_texts = _of_answers(answers), _of_texts(texts)
    return [by_answers.sentence, by_texts.sentence, _combine(by_answers, by_texts, answers)]


def _of_answers(sweep: Sweep) -> _Conclusion:
    dense, settings = sweep.dense, sweep.of(METHOD)
    assert dense is not None
    task = sweep.config["task"]
    of = f"{dense.accuracy.n} problems of the task {task['name']}"
    if at_chance(dense):
        return _Conclusion(
            f"Answers cannot measure a budget's loss: dense attention itself answers {_right(dense)} of {of} right.",
            False,
            None,
        )
    compared = [sweep.difference(each, dense) for each in settings]
    start = f"Of {of}, dense attention answers {_right(dense)} right; the gates "
    parts = ", ".join(f"{_right(each)} at {_tokens(each.budget)}" for each in settings)
    return _conclude(start + parts, settings, compared, "points")


def _of_texts(sweep: Sweep) -> _Conclusion:
    settings = sweep.of(METHOD)
    compared = [mean_and_interval([x["dense_loss"] - x["loss"] for x in each.samples]) for each in settings]
    first = settings[0].metrics
    count, length = first["n_problems"], sweep.config["task"]["length"]
    parts = ", ".join(
        f"{100 * (each.metrics['perplexity'] / first['dense_perplexity'] - 1):+.1f} % at {_tokens(each.budget)} (KL "
        f"{each.metrics['kl']:.4f} nats per token)"
        for each in settings
    )
    text = (
        f"On {count} held-out text{'s' * (count != 1)} of {length:,} tokens dense attention has a perplexity of "
        f"{first['dense_perplexity']:.2f}; the gates {parts}"
    )
    return _conclude(text, settings, compared, "% of perplexity", conclusive=count > 1)


def _conclude(
    text: str, settings: Sequence[Setting], compared: Sequence[Difference], unit: str, conclusive: bool = True
) -> _Conclusion:
    """Complete a sentence with the budget from which on no loss was seen, and how large an unseen loss may be."""
    first = enough_from(compared)
    if first is None:
        largest = _tokens(settings[-1].budget)
        seen = (-compared[-1]).positive
        loss = f"a measurable loss even at {largest}" if seen else f"too few to tell if {largest} cause a loss"
        return _Conclusion(f"{text}: {loss}.", conclusive, None)
    loss = "no measurable loss " + ("at any budget" if first == 0 else f"from {_tokens(settings[first].budget)} on")
    if compared[first].n == 1:
        loss += ", but a single one proves nothing"
    else:
        loss += f", but one of up to {max(0.0, -100 * compared[first].low):.1f} {unit} is possible"
    return _Conclusion(f"{text}: {loss}.", conclusive, settings[first].budget)


def _combine(answers: _Conclusion, texts: _Conclusion, sweep: Sweep) -> str:
    conclusive = [result for result in (answers, texts) if result.conclusive]
    if not conclusive:
        return "So no budget can be recommended: give more problems or texts, or an easier task."
    alone = "" if len(conclusive) == 2 else f", by {'texts' if texts.conclusive else 'answers'} alone"
    budgets = [result.budget for result in conclusive if result.budget is not None]
    if len(budgets) < len(conclusive):
        return (
            f"So no budget up to {_tokens(max(sweep.budgets))} is clearly without loss{alone}: train for "
            "longer, or give larger budgets."
        )
    budget = max(budgets)
    return (
        f"So {_tokens(budget)}, {100 * budget / sweep.context:.0f} % of a context of {sweep.context:,.0f}, is the "
        f"smallest budget with no measurable loss{alone}."
    )


def _right(setting: Setting) -> int:
    return round(setting.accuracy.mean * setting.accuracy.n)


def _tokens(budget: int | None) -> str:
    return f"{budget:,} tokens"
