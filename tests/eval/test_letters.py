r"""Which letter an answer to a multiple-choice problem names, and what names none."""

import re

import pytest

from seergate.eval.grading.graders import grade


def letter(answer, gold="C"):
    return grade("letter", f"so \\boxed{{{answer}}}", gold, lambda *_: (False, "no algebra"))


ONE = r"""
    C || c || (C) || [C] || C. || C) || C: || C, || C; || Option C || Answer: C || the answer is C || {C}
    Choice C || The correct option is (C) || C. 4 eV || C) 4 eV || C: 4 eV || C \quad 4 eV || C\\4 eV || C (4 eV)
    C. A rise of 4 J || C. Vitamin C || C. between A and B || C. I and II only || C. $F = A/B$ || C. A-B bonds
    (C) at 25 D || \text{C} || \textbf{C.} 4 eV || \mathrm{(C)} || \(C\) || **C** || `C` || "C" || \,C || {\bf C}
    \rm C || \color{blue}{\textbf{(C)}} || \text{Option C} || C - 4 eV || \large C || \displaystyle C || \boxed C
    C. Vitamin E.
"""


@pytest.mark.parametrize("answer", [*re.split(r" \|\| |\n +", ONE.strip()), " C ", "C\n4 eV", "C\u200b", "（Ｃ）"])
def test_one_letter_however_it_is_written(answer):
    assert letter(answer).correct, letter(answer).reason
    assert not letter(answer, "B").correct


@pytest.mark.parametrize(
    "joint", [", ", " & ", "; ", "/", "\n", r" \lor ", r" \text{ or } ", " and ", ". ", r"\,", ""]
)
@pytest.mark.parametrize("second", ["D", "(D)", r"\text{D}", "D."])
def test_two_letters_however_they_are_joined(joint, second):
    assert not letter(f"C{joint}{second}").correct


NONE = r"""
    C. 4 eV or D. 5 eV || C) 4 eV and D) 5 eV || C - 4 eV or D - 5 eV || (C) 4 eV or (D) 5 eV || C. 4 eV or D || [C, D]
    C or possibly D || C (or D) || C. A and B || C is wrong, D is right || C. is wrong || not C || C = 4 || C - 4
    4 eV || Carbon || \boxed{} || C' || \{C\}
"""


@pytest.mark.parametrize("answer", [*re.split(r" \|\| |\n +", NONE.strip()), "", "C. 4 eV\nD. 5 eV"])
def test_what_is_no_letter_or_more_than_one(answer):
    verdict = letter(answer)
    assert not verdict.correct and "does not hold one letter" in verdict.reason


@pytest.mark.parametrize("answer", ["A proton", "A higher energy electron", "A 10 kg mass", "a rise", "A is the unit"])
def test_an_article_is_no_choice(answer):
    assert not letter(answer, "A").correct
