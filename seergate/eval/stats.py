"""Statistics of graded samples. Samples of one problem are not independent, so everything is clustered by problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

Z95 = 1.959964
ALIKE = 1e-9
"""A standard error below this is the rounding of values that are all the same."""


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
        """Half of the 95 % interval, by Student's t; ``nan`` with a single problem."""
        return t95(self.n - 1) * self.se if self.n > 1 else math.nan

    @property
    def positive(self) -> bool:
        """Whether it is above zero by more than chance explains. Where all values are the same, nothing is known of
        chance.
        """
        return self.se > ALIKE and self.mean > self.half_width

    def __neg__(self) -> Estimate:
        return Estimate(-self.mean, self.se, self.n)


@cache
def t95(freedom: int) -> float:
    """What a variable with Student's t distribution exceeds, on either side, in 5 % of cases; by bisection.

    Args:
        freedom: degrees of freedom, from 1 on.
    """
    low, high = Z95, 13.0  # it is 12.7 at one degree of freedom, and falls
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < 0.95 else (low, middle)
    return high


def _share_within(t: float, freedom: int) -> float:
    """Probability of ``-t..t`` under Student's t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2 == 1
    cosine = math.cos(angle)
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(2 if odd else 1, freedom - 2, 2):
        term *= k / (k + 1) * cosine**2
        total += term
    part = math.sin(angle) * total
    return 2 / math.pi * (angle + part) if odd else part


def margin(difference: Estimate) -> float:
    """Half of the 95 % interval of a difference between two accuracies; ``nan`` with a single problem. Where all
    problems came out alike, three in n may yet come out otherwise (the rule of three).
    """
    return min(1.0, 3 / difference.n) if difference.se <= ALIKE else difference.half_width


def bounds(difference: Estimate) -> tuple[float, float]:
    """The 95 % interval of a difference between two accuracies, inside -1..1; ``nan`` with a single problem."""
    half = margin(difference)
    if math.isnan(half):
        return math.nan, math.nan
    return max(-1.0, difference.mean - half), min(1.0, difference.mean + half)


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


def wilson(estimate: Estimate, samples: int | None = None) -> tuple[float, float]:
    """A 95 % interval for a proportion that stays inside 0..1 and has a width even where all problems came out alike.

    Wilson's interval at the effective number of independent samples, ``p (1 - p) / se^2 + 1``, which is the number of
    problems if each has one sample; also the number of problems where ``se`` is 0 or unknown.

    Args:
        estimate: of the proportion.
        samples: how many there are, which the effective number cannot exceed; no limit if ``None``.
    """
    p, n = estimate.mean, float(estimate.n)
    if 0 < p < 1 and estimate.se > ALIKE:
        n = min(p * (1 - p) / estimate.se**2 + 1, samples or math.inf)
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(max(0.0, p * (1 - p) / n) + Z95**2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
