"""Which letter an answer to a multiple-choice problem names, and what names none."""

from __future__ import annotations

import pytest

from tests.eval.test_grading import graded


@pytest.mark.parametrize(
    "answer", ["C", "(C)", r"\text{C}", r"\mathrm{C}", r"\textbf{(C)}", "C.", "C. 4 eV", "C) 4 eV", "$C$", "C: so"]
)
def test_letters(answer):
    assert graded("letter", f"so \\boxed{{{answer}}}", "C").correct
    assert not graded("letter", f"so \\boxed{{{answer}}}", "B").correct


@pytest.mark.parametrize(
    "joint", ["C or A", "C and A", "C A", "C) or A)", "C. or A.", "(C) (A)", "C or A or B", "C/A"]
)
@pytest.mark.parametrize("form", ["{}", r"\text{{{}}}", "${}$"])
def test_two_letters_are_no_choice(joint, form):
    """Whichever of them is right."""
    for gold in "ABC":
        found = graded("letter", f"so \\boxed{{{form.format(joint)}}}", gold)
        assert not found.correct and "does not hold one letter" in found.reason


@pytest.mark.parametrize(
    "separator", [", ", " & ", r" \& ", "; ", "/", " / ", "\n", r" \lor ", r" \text{ or } ", ": ", "."]
)
@pytest.mark.parametrize("second", ["D", "J", "(D)", r"\text{D}", "D."])
def test_two_letters_however_they_are_joined(separator, second):
    assert not graded("letter", f"\\boxed{{C{separator}{second}}}", "C").correct


@pytest.mark.parametrize(
    "answer",
    [
        *("C. 4 eV or D. 5 eV", "C) 4 eV and D) 5 eV", "(C) 4 eV or (D) 5 eV", "C. 4 eV\nD. 5 eV", "C. 4 eV or D"),
        *("C or possibly D", "C (or D)", "C but maybe D", "C is wrong, D is right", "C. A and B"),
    ],
)
def test_a_second_choice_further_on_is_noticed(answer):
    assert not graded("letter", f"\\boxed{{{answer}}}", "C").correct


@pytest.mark.parametrize(
    "answer",
    [
        *("C because A is wrong", "C is right because A is wrong", "C not A", "C 300 J"),
        *("C. A rise of 4 J", "C. Vitamin C", "C. between A and B", "C) A larger one", "C. I and II only", "C or C"),
        *(r"C. $F = A/B$", "C. A-B bonds", "(C) at 25 D"),
    ],
)
def test_letters_in_the_text_of_an_option_or_in_a_reason_are_no_choice(answer):
    assert graded("letter", f"\\boxed{{{answer}}}", "C").correct


@pytest.mark.parametrize(
    "answer",
    [
        *(r"\textrm{C}", r"\textit{C}", r"\textsf{C}", r"\boldsymbol{C}", r"\underline{C}", r"{\bf C}", r"\rm C"),
        *("{C}", r"\(C\)", r"\[C\]", "[C]", "**C**", "*C*", "`C`", '"C"', "C,", "C;", r"\,C", r"C\\"),
        *(
            r"\textbf{C.} 4 eV",
            r"\textcolor{red}{C}",
            r"\color{blue}{\textbf{(C)}}",
            "**C.** 4 eV",
            "C (4 eV)",
            "C 4.5 eV",
            "C only",
        ),
    ],
)
def test_letters_however_they_are_set(answer):
    assert graded("letter", f"so \\boxed{{{answer}}}", "C").correct
    assert not graded("letter", f"so \\boxed{{{answer}}}", "B").correct


@pytest.mark.parametrize(
    "answer",
    [
        *("A proton", "A higher energy electron", "A decrease in entropy", "A = 4", "A - 4", "A x"),
        *(
            r"\text{A proton}",
            "A is incorrect",
            "A is wrong",
            "A. is wrong",
            "A is not right",
            "A is the unit of charge",
        ),
        *(
            "A 10 kg mass",
            "A 2-fold increase",
            "A (positively charged) ion",
            "A not too heavy ion",
            "A and a proton",
            r"\{A\}",
            "A'",
        ),
        *(r"A\,B", r"A\\B", "**A** or **B**", r"\text{A}\text{B}", "[A, B]"),
    ],
)
def test_an_article_or_a_variable_is_no_choice(answer):
    """Nor is a letter that is ruled out, or one of two that are set differently."""
    found = graded("letter", f"so \\boxed{{{answer}}}", "A")
    assert not found.correct and "does not hold one letter" in found.reason


@pytest.mark.parametrize("answer", ["A,C", "4 eV", "AC", "c", "", "Carbon", r"\boxed{}", "Choice C"])
def test_what_is_no_letter(answer):
    found = graded("letter", f"so \\boxed{{{answer}}}", "C")
    assert not found.correct
    assert "does not hold one letter" in found.reason
