"""Statistics of graded samples. Samples of one problem are not independent, so everything is clustered by problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from seergate.errors import SeergateError, how_to_install

ALIKE = 1e-9
"""A standard error below this is rounding: all values are the same."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error.

    Attributes:
        mean: mean over problems of the mean over a problem's samples.
        se: standard error, clustered by problem; ``nan`` with a single problem.
        n: number of problems.
    """

    mean: float
    se: float
    n: int


@dataclass(frozen=True)
class Difference(Estimate):
    """A paired difference between two accuracies.

    Attributes:
        low, high: ends of the 95 % interval; ``nan`` with a single problem.
    """

    low: float = math.nan
    high: float = math.nan

    @property
    def positive(self) -> bool:
        """True if it is above zero by more than chance explains."""
        return self.low > 0

    @property
    def margin(self) -> float:
        """The larger of the distances to the interval's ends."""
        return max(self.high - self.mean, self.mean - self.low)

    def __neg__(self) -> Difference:
        return Difference(-self.mean, self.se, self.n, -self.high, -self.low)


def t95(freedom: float) -> float:
    """The value that Student's t of so many degrees of freedom exceeds, on either side, in 5 % of cases."""
    try:
        from scipy.special import stdtrit
    except ImportError:
        raise SeergateError(f"intervals need scipy; {how_to_install('eval')}") from None
    return float(stdtrit(freedom, 0.975))


def clustered(outcomes: Mapping[str, Sequence[float]]) -> Estimate:
    r"""Mean and standard error of outcomes grouped by problem.

    With problem means :math:`m_c`, weighted equally: :math:`\bar m = \sum m_c / C` and
    :math:`se^2 = \sum_c (m_c - \bar m)^2 / (C (C - 1))`. With equally many samples per problem this is the clustered
    (CR1) standard error of the mean over samples; with one sample per problem it is the ordinary one.

    Args:
        outcomes: problem -> its samples' outcomes (0 or 1, a length, ...); at least one problem, none empty.
    """
    return mean_and_error([fmean(values) for values in outcomes.values()])


def paired(ours: Mapping[str, Sequence[float]], baseline: Mapping[str, Sequence[float]]) -> Difference:
    r"""Mean difference ``ours - baseline`` over the problems that both have, with its standard error and interval.

    Both answered the same problems, so the spread between easy and hard problems cancels: the error is that of the
    per-problem differences :math:`d_c`, which is smaller than what the two separate errors suggest.

    The interval is Student's t on these differences and two more, :math:`+s` and :math:`-s`, with
    :math:`s^2 = (1 + \sum d_c^2) / (1 + m)` where :math:`m` of them are not zero. With one sample per problem
    :math:`s = 1`, which is the interval of Bonett and Price (2012) with t for z: where few problems were lost, or
    none, the plain interval is much too short.
    """
    common = [problem for problem in ours if problem in baseline]
    if not common:
        raise ValueError("the two runs have no problem in common; they cannot be compared")
    differences = [fmean(ours[p]) - fmean(baseline[p]) for p in common]
    diff = mean_and_error(differences)
    if diff.n == 1:
        return Difference(diff.mean, diff.se, 1)
    apart = [d * d for d in differences if abs(d) > ALIKE]
    size = math.sqrt((1 + math.fsum(apart)) / (1 + len(apart)))
    wider = mean_and_error([*differences, size, -size])
    half = t95(wider.n - 1) * wider.se
    return Difference(diff.mean, diff.se, diff.n, max(-1.0, wider.mean - half), min(1.0, wider.mean + half))


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
    return fmean([1 - math.comb(len(v) - round(sum(v)), k) / math.comb(len(v), k) for v in outcomes.values()])


RESAMPLES = 1000
"""Bootstrap resamples of the clusters for the interval of a quantile."""


def clustered_quantile(groups: Sequence[Sequence[float]], share: float) -> tuple[float, float, float]:
    """A quantile of all values, and the ends of its 95 % interval: of its bootstrap over the groups, whose values are
    not independent. The ends are ``nan`` for one group.
    """
    values = [np.asarray(group) for group in groups]
    point = float(np.quantile(np.concatenate(values), share))
    if len(values) == 1:
        return point, math.nan, math.nan
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    again = [np.quantile(np.concatenate([values[i] for i in some]), share) for some in drawn]
    low, high = np.quantile(again, (0.025, 0.975)).tolist()
    return point, low, high


def mean_and_error(values: Sequence[float]) -> Estimate:
    """Mean of independent values and its standard error."""
    n = len(values)
    if n == 0:
        raise ValueError("there is nothing to average")
    mean = fmean(values)
    if n == 1:
        return Estimate(mean, math.nan, 1)
    return Estimate(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n * (n - 1))), n)


def mean_and_interval(values: Sequence[float]) -> Difference:
    """Mean of independent values, such as differences by text, with its 95 % interval by Student's t."""
    diff = mean_and_error(values)
    half = t95(diff.n - 1) * diff.se
    return Difference(diff.mean, diff.se, diff.n, diff.mean - half, diff.mean + half)


def wilson(estimate: Estimate, samples: int | None = None) -> tuple[float, float]:
    """A 95 % interval for a proportion that stays inside 0..1 and has a width even where all problems came out alike.

    Wilson's interval at the effective number of independent samples, ``p (1 - p) / se^2 + 1``, which is the number of
    problems if each has one sample; also the number of problems where ``se`` is 0 or unknown. With few problems of
    many samples that number is itself uncertain: it is divided by the squared ratio of the two quantiles of Student's
    t, at the number of problems and at the number of samples (Korn and Graubard, 1998).

    Args:
        samples: how many there are, which the effective number cannot exceed; as many as problems if ``None``.
    """
    p, n, z = estimate.mean, float(estimate.n), t95(math.inf)
    if 0 < p < 1 and estimate.se > ALIKE:
        n = p * (1 - p) / estimate.se**2 + 1
        if samples is not None and samples > estimate.n:
            n = min(n, samples) * (t95(samples - 1) / t95(estimate.n - 1)) ** 2
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(max(0.0, p * (1 - p) / n) + z**2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
