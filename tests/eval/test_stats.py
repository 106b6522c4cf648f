"""Against numbers worked out by hand, and the coverage of intervals, which is computed exactly."""

import math

import pytest

from benchmarks.interval_coverage import one_sided
from seergate.eval.statistics.intervals import Estimate, clustered, paired, pass_at_k, wilson
from tests.support.running import invalid


def test_standard_errors_are_those_of_problems():
    """Samples of one problem are not independent, and problems weigh equally however many samples they have."""
    # values 1, 0, 1, 1: mean 3/4; squared deviations 3/16 + 9/16 = 12/16; se = sqrt(0.75 / (4 * 3)) = 0.25
    assert clustered({"a": [1], "b": [0], "c": [1], "d": [1]}) == Estimate(0.75, pytest.approx(0.25), 4)
    # problem means 1, 0, 1/2: mean 1/2; squared deviations 1/4 + 1/4 = 1/2; se = sqrt(0.5 / (3 * 2)) = 0.288675
    groups = {"a": [1, 1, 1, 1], "b": [0, 0, 0, 0], "c": [1, 0, 1, 0]}
    assert clustered(groups) == Estimate(0.5, pytest.approx(0.2886751), 3)
    assert clustered({"a": [1, 1, 1], "b": [0]}).mean == 0.5 and math.isnan(clustered({"a": [1, 0]}).se)


def test_paired_difference_cancels_the_spread_between_problems():
    dense = {"a": [1, 1], "b": [1, 0], "c": [0, 0], "d": [1, 1]}  # means 1, .5, 0, 1
    ours = {"a": [1, 0], "b": [0, 0], "c": [0, 0], "d": [1, 0]}  # means .5, 0, 0, .5
    # differences -.5, -.5, 0, -.5: mean -.375; squared deviations 3 * .015625 + .140625 = .1875; se = sqrt(.1875 / 12)
    difference = paired(ours, dense)
    assert (difference.mean, difference.se, difference.n) == (-0.375, pytest.approx(0.125), 4)
    # s^2 = (1 + 3/4) / 4 = .4375; of the six: mean -.25, squares .75 + .875 = 1.625, less 6 / 16 = 1.25;
    # se = sqrt(1.25 / 30) = .204124; t(5) = 2.570582
    assert (difference.low, difference.high) == pytest.approx((-0.25 - 0.52472, -0.25 + 0.52472), abs=1e-5)


def test_paired_uses_common_problems_only():
    assert paired({"a": [1], "x": [0]}, {"a": [0], "y": [1]}).mean == 1.0
    invalid("no problem in common", paired, {"a": [1]}, {"b": [1]})


def won(wins, of, losses=0):
    return paired(*({str(i): [i < n] for i in range(of)} for n in (wins, losses)))


def test_a_difference_is_ahead_beyond_its_interval():
    assert won(64, 64).positive and not (-won(64, 64)).positive
    assert won(6, 6).positive and not won(4, 4).positive, "as the sign test has it, but for one problem"
    assert won(12, 64).positive and not won(3, 64).positive and not won(0, 64).positive
    assert -won(12, 64) == paired(*({str(i): [i < n] for i in range(64)} for n in (0, 12)))
    only = won(1, 1)
    assert math.isnan(only.low) and math.isnan(only.high) and not only.positive and only.mean == 1
    third = {name: [1, 0, 0] for name in "abc"}  # 1/3 - 0 and its like differ in the last bit at most
    assert not paired(third, {name: [0] for name in "abc"}).positive


def test_intervals_of_losses_cover_them_and_are_monotone():
    """The benchmark's own computation: every loss from 2 to 20 %, every number of problems lost."""
    for n in (16, 32, 64, 128):
        summary = one_sided(n)
        assert summary["coverage"] >= 0.93 and summary["monotone"], summary


def test_more_samples_per_problem_make_an_interval_shorter():
    sure = paired({str(i): [1] * 9 + [0] for i in range(30)}, {str(i): [1] * 10 for i in range(30)})
    assert -0.17 < sure.low < -0.1 < sure.high < -0.03 and sure.margin == pytest.approx(sure.high + 0.1)


def test_wilson():
    # 8 of 10: the textbook's interval is 0.4902 .. 0.9433
    right = clustered({str(i): [i < 8] for i in range(10)})
    assert wilson(right, 10) == wilson(right) == pytest.approx((0.4902, 0.9433), abs=2e-4)
    low, high = wilson(Estimate(1.0, 0.0, 16))  # all right: 16 / (16 + 1.96^2) .. 1
    assert (low, high) == pytest.approx((16 / (16 + 1.959964**2), 1.0))
    assert wilson(Estimate(0.0, 0.0, 16))[0] == 0.0


def test_few_problems_of_many_samples_are_less_sure_than_as_many_problems():
    few, many = Estimate(0.5, 0.1, 5), Estimate(0.5, 0.1, 26)  # 26 effective samples both
    # 26 times (t(79) / t(4))^2 = (1.990450 / 2.776445)^2 = 0.513957: 13.3629; half width by hand
    n, z = 26 * 0.513957, 1.959964
    half = z / (1 + z * z / n) * math.sqrt(0.25 / n + z * z / (4 * n * n))
    assert wilson(few, 80) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-5)
    assert wilson(few, 80)[0] < wilson(many, 26)[0]
    halves = clustered({str(i): [1, 0] for i in range(3)} | {"x": [1, 1, 0]})
    assert wilson(halves, 9)[0] < 0.3, "problems that are half right have means without spread, and few samples"


def test_pass_at_k():
    # two right of four: 1 - C(2,2)/C(4,2) = 5/6; none right: 0; mean 5/12. k = 1: the mean accuracy; k = 4: 1 and 0
    outcomes = {"a": [1, 0, 1, 0], "b": [0, 0, 0, 0]}
    assert [pass_at_k(outcomes, k) for k in (1, 2, 4)] == pytest.approx([0.25, 5 / 12, 0.5])
    invalid(r"k is 5; it must be in 1\.\.4", pass_at_k, outcomes, 5)
