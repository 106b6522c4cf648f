r"""Grading: read the answer out of a completion and compare it with the gold answer.

An answer is what stands in the last ``\boxed{...}``, wherever that is. Nothing outside the box counts, so a right
number in the reasoning earns nothing.

What decides is written down with every grade. Mathematical equivalence is left to math-verify, which runs in a process
of its own (`seergate.eval.judge`), because symbolic algebra on what a lost model writes can take for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from seergate.errors import SeergateError

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # a box, an escaped character, a brace

MAX_ANSWER = 2000
"""Longer boxes (characters) are not answers; symbolic algebra on them could take for ever."""

MAX_DIGITS = 100
"""An answer with a longer number in it is not computed with, only compared as text."""

_BASE = re.compile(r"\d_\{?(\d+)\}?$")

Equivalence = Callable[[str, str], tuple[bool, str]]
"""``(gold, answer) -> (whether they are equivalent, why)``."""


@dataclass(frozen=True)
class Grade:
    """A verdict.

    Attributes:
        pred: the answer that was found, or ``None``.
        correct: whether it is right.
        reason: why, in a few words.
    """

    pred: str | None
    correct: bool
    reason: str


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete ``\boxed{...}``, braces inside it balanced, or ``None``.

    A ``\boxed{`` that is never closed (a truncated generation) is no answer. An escaped brace (``\{``) is a character.
    """
    # One pass with a stack of open braces: a lost model may open thousands of boxes, and trying each is quadratic.
    best: tuple[int, int] | None = None  # where the contents of the best box begin and end
    braces: list[int | None] = []  # for each open brace: where its contents begin, if it is a box's
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "}":
            begin = braces.pop() if braces else None
            if begin is not None and (best is None or begin > best[0]):
                best = begin, match.start()
        elif token[-1] == "{" and token != "\\{":
            braces.append(match.end() if token.startswith("\\boxed") else None)
    return None if best is None else text[best[0] : best[1]].strip()


def grade_digit(answer: str, gold: str, equivalent: Equivalence) -> Grade:
    """chain_sum: the box must hold exactly the gold digit."""
    return Grade(answer, answer == gold.strip(), "compared as text")


def grade_exact(answer: str, gold: str, equivalent: Equivalence) -> Grade:
    """The box must hold the gold answer, spaces aside."""
    return Grade(answer, "".join(answer.split()) == "".join(gold.split()), "compared as text")


_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{(.*?)\}", re.DOTALL)
_LETTER = re.compile(r"\(?([A-Z])(?:([.:)]+)|(?=\s|\Z))(.*)", re.DOTALL)  # the letter, its punctuation, the rest
_JOINED = r"(?:\bor\b|\band\b|\\(?:lor|vee)\b|\\?&|[/,;|+\n])"
_ALONE = r"(?<![\w\\^'-])([A-J])(?![\w^'-])"  # a letter that is no part of a word or a formula
_NEXT = re.compile(rf"\s*({_JOINED}?)\s*\(?{_ALONE}(?=(.*))", re.DOTALL)
_ENDS = re.compile(rf"\s*(?:\Z|[.:)]|{_JOINED}\s*\(?{_ALONE})")
_NO_CHOICE = re.compile(r"(?:\b(?:because|since|as|not|than|of)|\d)\s*\(?$")  # a reason, what is ruled out, or a unit


def _second_choice(letter: str, label: str, rest: str) -> str | None:
    """Another letter that the answer chooses as well, or ``None``.

    Args:
        letter, label: the first one, and the punctuation behind it (``.``, ``)``), which announces the option's text.
        rest: what follows. Single letters in an option's text are none of the model's choices ("C. A rise of 4 J").
    """
    following = _NEXT.match(rest)
    if following and following[2] != letter and (not label or following[1] or _ENDS.match(following[3])):
        return following[2]
    if label:
        again = rf"{_JOINED}\s*\(?{_ALONE}{re.escape(label)}(?=\s)|\bor\s+\(?{_ALONE}[.:)]*\Z"
        found = [match[1] or match[2] for match in re.finditer(again, rest)]
    else:
        found = [match[1] for match in re.finditer(_ALONE, rest) if not _NO_CHOICE.search(rest[: match.start()])]
    return next((other for other in found if other != letter), None)


def grade_letter(answer: str, gold: str, equivalent: Equivalence) -> Grade:
    r"""Multiple choice: the box must hold the letter, alone or followed by the option's text.

    ``C``, ``(C)``, ``\text{C}``, ``C.`` and ``C. 4 eV`` are C, and so is ``C because A is impossible``. ``4 eV`` is no
    letter, and ``A, C``, ``A or C`` and ``A. 4 eV or C. 5 eV`` are no choice.
    """
    bare = _WRAPPED.sub(r"\1", answer).replace("$", "").strip()
    found = _LETTER.fullmatch(bare)
    if found is None:
        return Grade(answer, False, "the box does not hold one letter")
    letter, label, rest = found[1], found[2] or "", found[3]
    other = _second_choice(letter, label, rest)
    if other is not None:
        return Grade(answer, False, f"the box does not hold one letter, but {letter} and {other}")
    return Grade(answer, letter == gold.strip(), f"read as the letter {letter}")


_ARGUMENT = r"(\{[^{}]*\}|\\[A-Za-z]+(?![A-Za-z]|\s*\{)|[^\s{}\\])"
_FRACTION = re.compile(rf"\\[dt]?frac\s*{_ARGUMENT}\s*{_ARGUMENT}")  # of simple things, in braces or without


def _plain(text: str) -> str:
    r"""What math-verify does not read, written as it does: no full stop at the end; ``^\circ`` for a degree sign; a
    fraction's numerator and denominator in braces.
    """
    text = re.sub(r"\s*(?:°|\\degree\b)", r"^\\circ", text.strip()).removesuffix(".")
    return _FRACTION.sub(
        lambda match: "".join((r"\frac", *("{" + part.strip("{}") + "}" for part in match.groups()))), text
    )


def grade_math(answer: str, gold: str, equivalent: Equivalence) -> Grade:
    """Mathematical equivalence, by math-verify."""
    if answer == gold.strip():
        return Grade(answer, True, "equal as text")
    written, gold, answer = answer, _plain(gold), _plain(answer)
    if answer == gold:
        return Grade(written, True, "equal as text but for how it is set")
    bases = [_BASE.search(text) for text in (gold, answer)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return Grade(written, False, "numbers to different bases")  # math-verify takes the base for an ornament
    if re.search(rf"\d{{{MAX_DIGITS}}}", answer):
        return Grade(written, False, f"a number in the box has {MAX_DIGITS} or more digits")
    correct, reason = equivalent(gold, answer)
    return Grade(written, correct, reason)


GRADERS: dict[str, Callable[[str, str, Equivalence], Grade]] = {
    "digit": grade_digit,
    "math": grade_math,
    "exact": grade_exact,
    "letter": grade_letter,
}


def grade(grader: str, completion: str, gold: str, equivalent: Equivalence) -> Grade:
    """Grade one completion.

    Args:
        grader: a key of `GRADERS`.
        completion: what the model wrote.
        gold: the right answer.
        equivalent: decides on mathematical equivalence, for the grader that asks.
    """
    answer = last_boxed(completion)
    if answer is None:
        return Grade(None, False, "no boxed answer")
    if len(answer) > MAX_ANSWER:
        return Grade(answer[:MAX_ANSWER], False, f"the boxed answer is longer than {MAX_ANSWER} characters")
    return check_grader(grader)(answer, gold, equivalent)


def check_grader(name: str) -> Callable[[str, str, Equivalence], Grade]:
    """The grading function of a name.

    Raises:
        SeergateError: for an unknown name.
    """
    if name not in GRADERS:
        raise SeergateError(f"there is no grader {name!r}; known are {', '.join(GRADERS)}")
    return GRADERS[name]
