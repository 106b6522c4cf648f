r"""Grading: read the answer out of a completion and compare it with the gold answer.

An answer is what stands in the last ``\boxed{...}``, wherever that is. Nothing outside the box counts, so a right
number in the reasoning earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from seergate.errors import SeergateError

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # a box, an escaped character, a brace

MAX_ANSWER = 2000
"""Longer boxes (characters) are not answers; symbolic algebra on them could take for ever."""


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


def grade_digit(completion: str, gold: str) -> Grade:
    """chain_sum: the box must hold exactly the gold digit."""
    answer = last_boxed(completion)
    if answer is None:
        return Grade(None, False, "no boxed answer")
    return Grade(answer, answer == gold.strip(), "compared as text")


def grade_math(completion: str, gold: str) -> Grade:
    """Mathematical equivalence, by math-verify.

    Raises:
        SeergateError: if math-verify is not installed.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise SeergateError(
            "grading mathematics needs math-verify; install it with: pip install 'seergate[eval]'"
        ) from error
    answer = last_boxed(completion)
    if answer is None:
        return Grade(None, False, "no boxed answer")
    if len(answer) > MAX_ANSWER:
        return Grade(answer[:MAX_ANSWER], False, f"the boxed answer is longer than {MAX_ANSWER} characters")
    if answer == gold.strip():
        return Grade(answer, True, "equal as text")
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    try:
        wanted = parse(f"\\boxed{{{gold}}}", extraction_config=configs)
        found = parse(f"\\boxed{{{answer}}}", extraction_config=configs)
        correct = bool(verify(wanted, found))  # the order matters: gold first
    except Exception as error:  # a grader must judge whatever a model writes; the verdict says what happened
        return Grade(answer, False, f"math-verify failed: {type(error).__name__}")
    return Grade(answer, correct, "compared by math-verify" if wanted and found else "could not be parsed")


def grade_exact(completion: str, gold: str) -> Grade:
    """The box must hold the gold answer, spaces aside."""
    answer = last_boxed(completion)
    if answer is None:
        return Grade(None, False, "no boxed answer")
    return Grade(answer, "".join(answer.split()) == "".join(gold.split()), "compared as text")


GRADERS: dict[str, Callable[[str, str], Grade]] = {"digit": grade_digit, "math": grade_math, "exact": grade_exact}


def grader_of(name: str) -> Callable[[str, str], Grade]:
    """The grading function of a task.

    Raises:
        SeergateError: for an unknown name.
    """
    if name not in GRADERS:
        raise SeergateError(f"there is no grader {name!r}; known are {', '.join(GRADERS)}")
    return GRADERS[name]
