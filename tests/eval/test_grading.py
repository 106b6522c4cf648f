from __future__ import annotations

import pytest

from seergate.errors import SeergateError
from seergate.eval.grading import grade_digit, grade_exact, grade_math, grader_of, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{ 7 }", "7"),
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed {5}", "5"),
        (r"\boxed{4} and then \boxed{cut of", "4"),  # a truncated box is none; the one before it counts
        (r"\boxed{", None),
        (r"\boxed", None),
        (r"\boxed 5", None),
        (r"\boxed{\boxed{3}}", "3"),
        ("boxed{3}", None),
        ("", None),
        (r"\boxed{}", ""),
        (r"\boxed{x\\}", r"x\\"),  # an escaped backslash does not escape the brace
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize("text", ["\\boxed{" * 3000, "{" * 1_000_000, "\\boxed{" + "{" * 500_000, "}" * 1_000_000])
def test_last_boxed_does_not_hang_on_rubbish(text):
    assert last_boxed(text) is None


def test_digit_is_exact():
    assert grade_digit(r"7 7 7 </think> \boxed{ 7 }", "7").correct
    for wrong in (r"7", r"\boxed{ 77 }", r"\boxed{ 7 7 }", r"\boxed{7} \boxed{ 1 }", r"\boxed{ a7= }", r"\boxed{07}"):
        assert not grade_digit(wrong, "7").correct
    assert grade_digit("no box", "7").pred is None


@pytest.mark.parametrize(
    ("answer", "gold", "correct"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\dfrac{2}{4}", r"\frac{1}{2}", True),
        ("204", "204", True),
        ("025", "25", True),
        ("205", "204", False),
        (r"3\sqrt{2}", r"\sqrt{18}", True),
        (r"x^2+1", r"1+x^2", True),
        (r"(1, 2)", r"(2, 1)", False),
        ("", "0", False),
        (r"\frac{1}{0}", "1", False),
        ("{" * 3 + "1" + "}" * 3, "2", False),
        (r"\undefined\macro", "1", False),
    ],
)
def test_math(answer, gold, correct):
    assert grade_math(f"so \\boxed{{{answer}}}", gold).correct is correct


def test_math_refuses_giant_answers_at_once():
    grade = grade_math("\\boxed{" + "9" * 1_000_000 + "}", "9")
    assert not grade.correct
    assert "longer" in grade.reason


def test_exact_ignores_spaces_only():
    assert grade_exact(r"\boxed{ a  b }", "ab").correct
    assert not grade_exact(r"\boxed{AB}", "ab").correct


def test_unknown_grader_is_refused():
    with pytest.raises(SeergateError, match="known are digit, math, exact"):
        grader_of("mth")
