r"""Grading: extract the answer from a completion and compare it with the gold answer.

The answer is the contents of the last ``\boxed{...}``. The graders in `BOXED` ignore everything outside the box, so a
right number in the reasoning earns nothing. The others fall back to the text if there is no box.

Every grade records its reason. math-verify decides on mathematical equivalence, in a separate process
(`seergate.eval.judge`), because symbolic algebra on a degenerate answer can take for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from seergate.errors import SeergateError
from seergate.eval.mathematics import INVISIBLE, SPACE, MisreadError, plain, readable
from seergate.eval.programs import PROGRAM, answered_program, check_record

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # a box, an escaped character, a brace

MAX_ANSWER = 2000
"""Characters of a boxed answer above which it is wrong; symbolic algebra on it could take for ever."""

MAX_DIGITS = 100
"""Digits of a number in an answer from which on the answer is only compared as text."""

Verdict = tuple[bool, str]
"""Whether an answer is right, and why, in a few words."""

Equivalence = Callable[[str, str], Verdict]
"""``(gold, answer) ->`` whether the two are equivalent."""

Grader = Callable[[str, str, Equivalence], Verdict]
"""``(answer, gold, equivalence) ->`` whether the answer is right."""


@dataclass(frozen=True)
class Grade:
    """A verdict: the answer that was found, or ``None``; whether it is right; and why, in a few words."""

    pred: str | None
    correct: bool
    reason: str


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete ``\boxed{...}``, braces inside it balanced, or ``None``.

    A ``\boxed{`` that is never closed (a truncated generation) is ignored. An escaped brace (``\{``) is a character.
    """
    # One pass with a stack of open braces: a model may open thousands of boxes, and trying each would be quadratic.
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


def grade_digit(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """chain_sum: the box must hold exactly the gold digit."""
    return answer == gold.strip(), "compared as text"


def grade_exact(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """The answer must equal the gold answer, ignoring whitespace."""
    return "".join(answer.split()) == "".join(gold.split()), "compared as text"


def grade_contains(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """Every line of the gold answer must occur in the answer as whole words, in any case and order."""
    parts, text = filter(None, map(_lower, gold.splitlines())), _lower(answer)
    missing = [part for part in parts if not re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text)]
    return not missing, f"{missing[0]!r} is missing" if missing else "all of it is there"


def _lower(text: str) -> str:
    return " ".join(text.lower().split())


_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")


def last_number(text: str) -> str | None:
    """The last number in a text, without commas between its digits, or ``None``."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def grade_number(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """The last number of the answer must equal the gold one."""
    found, right = last_number(answer), last_number(gold)
    equal = None not in (found, right) and Decimal(str(found)) == Decimal(str(right))
    return equal, "compared as numbers"


_SETTING = re.compile(  # colours, fonts, formulas, markdown, quotation marks
    r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:(?:text|math)[a-z]*|mbox|fbox|boldsymbol|bm|underline|emph|bf|it|rm|sf|tt)"
    r"(?![A-Za-z])|\\[()\[\]]|[${}*`\"]"
)
_CHOICE = re.compile(  # the letter, what ends it, the option's text
    r"(?:(?:the\s+)?(?:(?:correct|right|final)\s+)?(?:answer|option|choice)(?:\s+is)?\s*:?\s*){0,2}"
    r"[(\[]?([A-Z])(?:\s*[.:)\]]\s*|\s*\n\s*|\Z|\s+(?=\([^()]*\)\Z))(.*)",
    re.DOTALL | re.IGNORECASE,
)
_ANOTHER = re.compile(  # a second letter: labelled, or last behind "or", or before "and" and the like
    r"(?<![\w\\^'-])\(?([A-J])[.:)](?=\s|\Z)|(?:\bor\b|\\(?:lor|vee)\b)\s*\(?([A-J])\b(?=\W*\Z)"
    r"|\A\(?([A-H])\b(?=\s*(?:\Z|\b(?:or|and)\b|[/,;|&+]))"
)
_DENIED = re.compile(r"(?:is|was)\s+(?:wrong|incorrect|false|not)\b|(?:or|and|not)\b", re.IGNORECASE)


def grade_letter(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    r"""Multiple choice: the box must hold one letter, alone or followed by punctuation and the option's text.

    ``C``, ``c``, ``(C)``, ``\text{C}``, ``Option C``, ``C. 4 eV`` and ``C \quad 4 eV`` are read as C. ``4 eV``,
    ``A proton`` and ``C because A is wrong`` hold no letter; ``A, C``, ``A or C`` and ``A. 4 eV or C. 5 eV`` hold two.
    """
    text = re.sub(r"\\q?quad(?![A-Za-z])|\\\\", "\n", INVISIBLE.sub("", answer))
    text = re.sub(SPACE, " ", _SETTING.sub("", text)).strip().rstrip(",;\\ \n")
    found = _CHOICE.fullmatch(text)
    if found is None or _DENIED.match(found[2]):
        return False, "the box does not hold one letter"
    letter = found[1].upper()
    others = {next(filter(None, match.groups())) for match in _ANOTHER.finditer(found[2])} - {letter}
    if others:
        return False, f"the box does not hold one letter, but {letter} and {min(others)}"
    return letter == gold.strip(), f"read as the letter {letter}"


def grade_math(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """The answer must be mathematically equivalent to the gold answer, by math-verify."""
    if answer == gold.strip():
        return True, "equal as text"
    gold, answer = plain(gold), plain(answer)
    if answer == gold:
        return True, "equal as text but for how it is set"
    try:
        gold, answer = readable(gold, answer)
    except MisreadError as error:
        return False, str(error)
    if re.search(rf"\d{{{MAX_DIGITS}}}", answer):
        return False, f"a number in the box has {MAX_DIGITS} or more digits"
    return equivalent(gold, answer)


def grade_program(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """The program must pass the tests in the gold answer (`seergate.eval.programs`)."""
    return equivalent(gold, answer)


GRADERS: dict[str, Grader] = {
    "digit": grade_digit,
    "math": grade_math,
    "exact": grade_exact,
    "letter": grade_letter,
    "contains": grade_contains,
    "number": grade_number,
    PROGRAM: grade_program,
}
BOXED = ("digit", "math", "letter")
"""Graders that accept an answer in a box only."""


def _answer(grader: str, text: str) -> str | None:
    """The answer in a completion that has no box, or ``None``."""
    text = text.rpartition("</think>")[2].strip()
    if grader == "number":
        return last_number(text)
    return (text.splitlines()[0].rstrip(" .") if grader == "exact" and text else text) or None


def grade(grader: str, completion: str, gold: str, equivalent: Equivalence) -> Grade:
    """Grade one completion with a grader of `GRADERS`. If the gold answer is empty (the problem is graded elsewhere),
    every answer is wrong.
    """
    answer = None if grader == PROGRAM else last_boxed(completion)
    if boxed := answer is not None or grader in BOXED:
        what = "boxed answer"
    else:
        what = grader if grader in ("number", PROGRAM) else "answer"
        answer = answered_program(completion, gold) if grader == PROGRAM else _answer(grader, completion)
    if answer is None:
        return Grade(None, False, f"no {what}")
    if not gold.strip():
        verdict = False, "there is no gold answer"
    elif boxed and len(answer) > MAX_ANSWER:
        verdict = False, f"the boxed answer is longer than {MAX_ANSWER} characters"
    else:
        verdict = check_grader(grader)(answer, gold, equivalent)
    return Grade(answer[:MAX_ANSWER], *verdict)


def check_grader(name: str) -> Grader:
    """The grader of this name; a `SeergateError` if there is none."""
    if name not in GRADERS:
        raise SeergateError(f"there is no grader {name!r}; known are {', '.join(GRADERS)}")
    return GRADERS[name]


def check_gold(name: str, gold: str) -> None:
    """Raise `SeergateError` for a gold answer that no answer can match; only ``exact`` takes an empty one."""
    if name == "letter" and not re.fullmatch("[A-Z]", gold.strip()):
        raise SeergateError(f"the answer {gold!r} must be one capital letter for the grader 'letter'")
    if name == "number" and last_number(gold) is None:
        raise SeergateError(f"the answer {gold!r} must be a number for the grader 'number'")
    if name == PROGRAM:
        check_record(gold)
    if name != "exact" and not gold.strip():
        raise SeergateError(f"the answer is empty; for the grader {name!r} it must not be")
