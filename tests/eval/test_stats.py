"""Against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from seergate.eval.stats import Estimate, bounds, clustered, correlation, paired, pass_at_k, quantile, t95, wilson


def test_one_sample_per_problem_is_the_ordinary_standard_error():
    # values 1, 0, 1, 1: mean 3/4; squared deviations 3/16 + 9/16 = 12/16; se = sqrt(0.75 / (4 * 3)) = 0.25
    estimate = clustered({"a": [1], "b": [0], "c": [1], "d": [1]})
    assert estimate == Estimate(0.75, pytest.approx(0.25), 4)


def test_samples_of_one_problem_are_not_independent():
    # problem means 1, 0, 1/2: mean 1/2; squared deviations 1/4 + 1/4 = 1/2; se = sqrt(0.5 / (3 * 2)) = 0.288675
    groups = {"a": [1, 1, 1, 1], "b": [0, 0, 0, 0], "c": [1, 0, 1, 0]}
    assert clustered(groups) == Estimate(0.5, pytest.approx(0.2886751), 3)
    pooled = [v for values in groups.values() for v in values]  # what ignoring the clusters would claim: 0.15
    assert math.sqrt(sum((v - 0.5) ** 2 for v in pooled) / (12 * 11)) == pytest.approx(0.1507557)


def test_problems_weigh_equally_however_many_samples_they_have():
    assert clustered({"a": [1, 1, 1], "b": [0]}).mean == 0.5


def test_paired_difference_cancels_the_spread_between_problems():
    dense = {"a": [1, 1], "b": [1, 0], "c": [0, 0], "d": [1, 1]}  # means 1, .5, 0, 1
    ours = {"a": [1, 0], "b": [0, 0], "c": [0, 0], "d": [1, 0]}  # means .5, 0, 0, .5
    # differences -.5, -.5, 0, -.5: mean -.375; squared deviations 3 * .015625 + .140625 = .1875; se = sqrt(.1875 / 12)
    assert paired(ours, dense) == Estimate(-0.375, pytest.approx(0.125), 4)
    assert clustered(ours).se + clustered(dense).se > 0.3


def test_paired_uses_common_problems_only():
    assert paired({"a": [1], "x": [0]}, {"a": [0], "y": [1]}).mean == 1.0
    with pytest.raises(ValueError, match="no problem in common"):
        paired({"a": [1]}, {"b": [1]})


def test_a_single_problem_has_no_standard_error():
    assert math.isnan(clustered({"a": [1, 0]}).se)


def test_wilson():
    # 8 of 10: the textbook's interval is 0.4902 .. 0.9433
    right = clustered({str(i): [i < 8] for i in range(10)})
    assert wilson(right) == pytest.approx((0.4902, 0.9433), abs=2e-4)
    low, high = wilson(Estimate(1.0, 0.0, 16))  # all right: 16 / (16 + 1.96^2) .. 1
    assert (low, high) == pytest.approx((16 / (16 + 1.959964**2), 1.0))
    assert wilson(Estimate(0.0, 0.0, 16))[0] == 0.0


def test_a_proportion_is_no_surer_than_its_samples():
    """Problems of which each is right half of the time have means without any spread."""
    halves = clustered({str(i): [1, 0] for i in range(3)} | {"x": [1, 1, 0]})
    assert wilson(halves, 9) == pytest.approx(wilson(Estimate(halves.mean, 0.0, 9)))
    assert wilson(halves)[0] > wilson(halves, 9)[0]


def test_quantiles_of_students_t():
    for freedom, value in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (19, 2.093), (30, 2.042), (1000, 1.962)):
        assert t95(freedom) == pytest.approx(value, abs=5e-4)
    assert Estimate(0.0, 1.0, 5).half_width == t95(4)


def test_the_interval_of_a_difference():
    assert bounds(Estimate(0.1, 0.1, 5)) == pytest.approx((0.1 - 0.2776, 0.1 + 0.2776), abs=1e-4)
    assert bounds(Estimate(-0.6, 0.3, 3)) == (-1.0, pytest.approx(-0.6 + 0.3 * t95(2)))
    assert bounds(Estimate(0.0, 0.0, 20)) == (-0.15, 0.15), "no disagreement: three in n"
    assert all(math.isnan(bound) for bound in bounds(Estimate(1.0, math.nan, 1)))
    assert Estimate(0.3, 0.1, 20).positive and not (-Estimate(0.3, 0.1, 20)).positive
    assert not Estimate(0.3, 0.1, 3).positive and not Estimate(1.0, 0.0, 3).positive
    third = {name: [1, 0, 0] for name in "abc"}  # 1/3 - 0 and its like differ in the last bit at most
    assert not paired(third, {name: [0] for name in "abc"}).positive


def test_pass_at_k():
    # two right of four: 1 - C(2,2)/C(4,2) = 5/6; none right: 0; mean 5/12. k = 1: the mean accuracy; k = 4: 1 and 0
    outcomes = {"a": [1, 0, 1, 0], "b": [0, 0, 0, 0]}
    assert pass_at_k(outcomes, 2) == pytest.approx(5 / 12)
    assert pass_at_k(outcomes, 1) == pytest.approx(0.25)
    assert pass_at_k(outcomes, 4) == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"k is 5; it must be in 1\.\.4"):
        pass_at_k(outcomes, 5)


def test_quantiles():
    assert [quantile([5, 1, 3, 2, 4], q) for q in (0.1, 0.5, 0.9, 1.0)] == [1, 3, 5, 5]
    assert quantile([7], 0.5) == 7


def test_rank_correlation():
    assert correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    # ranks 0, 1, 2, 3 against 0.5, 0.5, 2, 3: covariance 4.5, variances 5 and 4.5
    assert correlation([1, 2, 3, 4], [5, 5, 6, 7]) == pytest.approx(4.5 / math.sqrt(5 * 4.5))
    assert math.isnan(correlation([1, 2], [3, 3]))
