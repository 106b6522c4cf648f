"""Statistics of graded samples. Samples of one problem are not independent, so everything is clustered by problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z95 = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error.

    Attributes:
        mean: over problems of the mean over a problem's samples.
        se: standard error, clustered by problem; ``nan`` with a single problem.
        n: number of problems.
    """

    mean: float
    se: float
    n: int

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval (normal approximation)."""
        return Z95 * self.se


def clustered(outcomes: Mapping[str, Sequence[float]]) -> Estimate:
    r"""Mean and standard error of outcomes grouped by problem.

    With problem means :math:`m_c`, weighted equally: :math:`\bar m = \sum m_c / C` and
    :math:`se^2 = \sum_c (m_c - \bar m)^2 / (C (C - 1))`. With equally many samples per problem this is the clustered
    (CR1) standard error of the mean over samples; with one sample per problem it is the ordinary one.

    Args:
        outcomes: problem -> its samples' outcomes (0 or 1, a length, ...); at least one problem, none empty.
    """
    means = [sum(values) / len(values) for values in outcomes.values()]
    return mean_and_error(means)


def paired(ours: Mapping[str, Sequence[float]], baseline: Mapping[str, Sequence[float]]) -> Estimate:
    """Mean difference ``ours - baseline`` over the problems that both have, with its standard error.

    Both answered the same problems, so the spread between easy and hard problems cancels: the error is that of the
    per-problem differences, which is smaller than what the two separate errors suggest.

    Raises:
        ValueError: if they have no problem in common.
    """
    common = [problem for problem in ours if problem in baseline]
    if not common:
        raise ValueError("the two runs have no problem in common; they cannot be compared")
    return mean_and_error([_mean(ours[p]) - _mean(baseline[p]) for p in common])


def pass_at_k(outcomes: Mapping[str, Sequence[float]], k: int) -> float:
    r"""Chance that at least one of ``k`` samples of a problem is right, mean over problems.

    The unbiased estimate :math:`1 - \binom{n - c}{k} / \binom{n}{k}` from ``n`` samples of which ``c`` are right
    (Chen et al. 2021, equation 1).

    Raises:
        ValueError: if a problem has fewer than ``k`` samples.
    """
    fewest = min(map(len, outcomes.values()))
    if not 1 <= k <= fewest:
        raise ValueError(f"k is {k}; it must be in 1..{fewest}, the samples that every problem has")
    return _mean([1 - math.comb(len(v) - round(sum(v)), k) / math.comb(len(v), k) for v in outcomes.values()])


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank. ``nan`` if one side does not vary."""
    rx, ry = _ranks(xs), _ranks(ys)
    mx, my = _mean(rx), _mean(ry)
    spread = math.sqrt(math.fsum((x - mx) ** 2 for x in rx) * math.fsum((y - my) ** 2 for y in ry))
    return math.fsum((x - mx) * (y - my) for x, y in zip(rx, ry, strict=True)) / spread if spread else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def mean_and_error(values: Sequence[float]) -> Estimate:
    """Mean of independent values and its standard error."""
    n = len(values)
    if n == 0:
        raise ValueError("there is nothing to average")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, math.nan, 1)
    return Estimate(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n * (n - 1))), n)


def wilson(estimate: Estimate) -> tuple[float, float]:
    """A 95 % interval for a proportion that stays inside 0..1 and has a width even where all problems came out alike.

    Wilson's interval at the effective number of independent samples, ``p (1 - p) / se^2 + 1``, which is the number of
    problems if each has one sample; also the number of problems where ``se`` is 0 or unknown.
    """
    p, n = estimate.mean, float(estimate.n)
    if 0 < p < 1 and estimate.se > 0:
        n = p * (1 - p) / estimate.se**2 + 1
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(max(0.0, p * (1 - p) / n) + Z95**2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
