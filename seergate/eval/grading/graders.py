r"""Grading: extract the answer from a completion and compare it with the gold answer.

The answer is the contents of the last ``\boxed{...}``. The graders in `BOXED` ignore everything outside the box, so a
right number in the reasoning earns nothing. The others fall back to the text if there is no box.

Every grade records its reason. math-verify decides on mathematical equivalence, in a separate process
(`seergate.eval.grading.judge`), because symbolic algebra on a degenerate answer can take for ever.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from seergate.errors import SeergateError
from seergate.eval.grading.mathematics import (
    DECORATION,
    INVISIBLE,
    SPACE,
    TEXT,
    UNITS,
    MisreadError,
    closed,
    latex,
    multiplied,
    plain,
    readable,
)
from seergate.eval.grading.programs import PROGRAM, answered_program, final_part

_TOKEN = re.compile(r"\\boxed\s*\{|\\boxed\s+[A-Za-z](?![A-Za-z])|\\.|[{}]", re.DOTALL)  # box, escaped sign, brace

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

    ``\boxed C`` is a box as well, but not ``\boxed 52``: TeX puts only the 5 into it. A ``\boxed{`` that is never
    closed (a truncated generation) is ignored. An escaped brace (``\{``) is a character.
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
        elif token.startswith("\\boxed") and token[-1] != "{":
            best = max(best or (0, 0), (match.end() - 1, match.end()))
        elif token[-1] == "{" and token != "\\{":
            braces.append(match.end() if token.startswith("\\boxed") else None)
    return None if best is None else text[best[0] : best[1]].strip()


def grade_digit(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """chain_sum: the box must hold exactly the gold digit."""
    return answer == gold.strip(), "compared as text"


def grade_exact(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """The answer must equal the gold answer, ignoring whitespace and a full stop at the gold answer's end."""
    answer, gold = ("".join(text.split()) for text in (answer, gold))
    return answer in (gold, gold.removesuffix(".")), "compared as text"


_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    r"\U00020000-\U0003ffff"
)
"""Characters of Thai, Lao, Burmese, Khmer, Chinese, Japanese and Korean: no space need follow a word."""

_PUNCTUATION = str.maketrans("‘’“”‐‑–−", "''\"\"----")


def grade_contains(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """Every line of the gold answer must occur in the answer as whole words, in any case, order and Unicode form. In a
    script that is written without spaces, it may stand anywhere.
    """
    parts, text = filter(None, map(_folded, gold.splitlines())), _folded(answer)
    missing = [part for part in parts if not re.search(_whole(part), text)]
    return not missing, f"{missing[0]!r} is missing" if missing else "all of it is there"


def _folded(text: str) -> str:
    text = unicodedata.normalize("NFKC", INVISIBLE.sub("", text).translate(_PUNCTUATION)).casefold()
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _whole(part: str) -> str:
    """A pattern for a text with no letter or digit beside it, unless one of the two is of a script without spaces."""
    letter, ends = rf"[^\W_{_UNSPACED}]", [re.match(f"[{_UNSPACED}]", end) for end in (part[0], part[-1])]
    before, after = "" if ends[0] else f"(?<!{letter})", "" if ends[1] else f"(?!{letter})"
    if part[0].isdigit():  # 5 is not in 2.5, but 2020 in 21.12.2020
        before += r"(?:(?<!\d\.)|(?<=\.\d\.)|(?<=\.\d\d\.))"
        if re.match(r"\d{3}(?!\d)", part):  # 500 is not in 1,500
            before += "".join(rf"(?<!(?<!\d)\d{{{digits}}},)" for digits in (1, 2, 3))
    if part[-1].isdigit():
        after += r"(?!\.0*[1-9]\d*(?!\d|\.\d))(?!(?:,\d{3})+(?!\d|,\d))"
    return before + re.escape(part) + after


_GROUP = re.compile(r"(?<=\d)(?:['’\u00a0\u2009\u202f]|\{,\}|,\\!|\\[,;: ])(?=\d{3}(?!\d))")  # between thousands
_SPACED = re.compile(  # 10 000, as no decimal number begins with 0; not 110 011
    r"(?<![\d.,])(?![01]{3}(?: [01]{3})* [01]{0,2}1)[1-9]\d{0,2}(?: \d{3})*? 0\d\d(?: \d{3})*(?!\d)"
)
_PART = r"\{\s*([-+]?\d{1,99}(?:,\d{3}){0,9}(?:\.\d{1,99})?)\s*\}"
_FRACTION = re.compile(rf"(?:(\d)\s{{0,3}})?\\[dt]?frac\s*(?:{_PART}\s*{_PART}|(\d)\s*(\d))")
_POWER = re.compile(r"(?:(?<=[\d}])\s*(?:\\times|\\cdot|[*x])\s*|(?<![\w.]))10\^(?:\{([-+]?\d{1,3})\}|([-+]?\d{1,3}))")
_SIGN_APART = r"(?:(?<=[=({] )|(?<=[=({$])|(?<=\\\()|\A(?=[^A-Za-z\n]*\Z))[-+]"  # no dash of a list, no difference
_NUMBER = re.compile(
    r"(?<![A-Za-z\d_.^/])(?<![\^_}]\{)(?<!sqrt\{)"  # no part of a name, of a number, a power, a denominator, a root
    rf"((?:(?<![A-Za-z\d)}}])[-+](?!\s|\\[,;:! ])|{_SIGN_APART})?)"
    r"(?:\s|\\[,;:! ])?(?:\\?[$€£¥₹]\s?)?"
    r"(?>(?:(\d+)\s+)?(\d+)\s*/\s*(0*[1-9]\d*)|((?:(?:\d{1,3}(?:,\d{3})+|\d\d?(?:,\d\d)+,\d{3})(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE]([-+]?\d{1,3}))?)"
    r"(?!\.?\d|/\d|\^\{?[-\d]|\s*\\(?:sqrt|pi)(?![A-Za-z]))([A-Za-z_]*)"
)


def _quotient(match: re.Match[str]) -> str:
    """A fraction of LaTeX as ``a/b``, behind the whole number before it."""
    top, bottom = (Fraction((match[i] or match[i + 2]).replace(",", "")) for i in (2, 3))
    if not bottom:
        return f"{top}/0"  # no number
    value = "/".join(map(str, (top / bottom).as_integer_ratio()))
    return f"{match[1]} {value}" if match[1] else value


def last_number(text: str) -> str | None:
    r"""The last number in a text, or ``None``: an integer or decimal without separators, else a fraction ``a/b``.

    Letters after a number must be a unit (``120km``). Only the last 10,000 characters are read, which bounds the time.
    """
    text = _SPACED.sub(lambda match: match[0].replace(" ", ","), _GROUP.sub(",", text[-10_000:]))
    text = multiplied(latex(text))
    text = re.sub(r"(\\(?!sqrt|pi)[A-Za-z]+)(?=\d)", r"\1 ", text)  # \approx5
    text = _FRACTION.sub(_quotient, text)
    text = _POWER.sub(lambda m: f"{'1' if m[0].startswith('10') else ''}e{m[1] or m[2]}", text)
    numbers = [match for match in _NUMBER.finditer(text) if not match[7] or match[7].removesuffix("s") in UNITS]
    if not numbers:
        return None
    sign, whole, top, bottom, decimal, power, _ = numbers[-1].groups()
    if len(numbers[-1][0]) > MAX_ANSWER:
        return numbers[-1][0].replace(",", "")
    if top:
        value = int(whole or 0) + Fraction(int(top), int(bottom))
    elif power:
        value = Fraction(decimal.replace(",", "")) * Fraction(10) ** int(power)
    else:
        return sign + decimal.replace(",", "")
    return str(-value if sign == "-" else value)


def grade_number(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """The last number of the answer must equal the gold one. Units, currencies and percent signs are ignored."""
    number, right = last_number(answer), last_number(gold)
    if number is None or right is None or max(len(number), len(right)) > 2 * MAX_ANSWER:
        return number is not None and number == right, "compared as text"
    return Fraction(number) == Fraction(right), "compared as numbers"


_SETTING = re.compile(  # colours, fonts, sizes, formulas, markdown, quotation marks
    rf"{DECORATION.pattern}|\\(?:(?:text|math)[a-z]*|mbox|fbox|boxed|emph|left|right)(?![A-Za-z])|\\[()\[\]]|[${{}}*`\"]"
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
_DASH = r"\s+[-–—]+\s+(?=[^\\]*[A-Za-z]{2})"  # before an option's text, not in a difference
_DENIED = re.compile(r"(?:is|was)\s+(?:wrong|incorrect|false|not)\b|(?:or|and|not)\b", re.IGNORECASE)


def grade_letter(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    r"""Multiple choice: the box must hold one letter, alone or followed by punctuation and the option's text.

    ``C``, ``c``, ``(C)``, ``\text{C}``, ``Option C``, ``C. 4 eV``, ``C - 4 eV`` and ``C \quad 4 eV`` are read as C.
    ``4 eV``, ``A proton`` and ``C because A is wrong`` hold no letter; ``A, C``, ``A or C`` and
    ``A. 4 eV or C. 5 eV`` hold two.
    """
    text = unicodedata.normalize("NFKC", INVISIBLE.sub("", answer))  # （Ｃ） as (C)
    text = re.sub(r"\\q?quad(?![A-Za-z])|\\\\", "\n", text)
    text = re.sub(SPACE, " ", _SETTING.sub("", text)).strip().rstrip(",;.\\ \n")
    if re.match(rf"[A-Z]{_DASH}", text, re.IGNORECASE):
        text = re.sub(rf"\b([A-Ja-j]){_DASH}", r"\1. ", text)
    choice = _CHOICE.fullmatch(text)
    if choice is None or _DENIED.match(choice[2]):
        return False, "the box does not hold one letter"
    letter = choice[1].upper()
    others = {next(filter(None, match.groups())) for match in _ANOTHER.finditer(choice[2])} - {letter}
    if others:
        return False, f"the box does not hold one letter, but {letter} and {min(others)}"
    return letter == gold.strip(), f"read as the letter {letter}"


_WORDS = re.compile(r"(?:YES|TRUE|FALSE|N[Oo]|no|[A-Za-z][a-z]{2,})(?:[ /-](?:[A-Za-z][a-z]*|\d+))*")  # not aBc


def _same_text(gold: str, answer: str) -> bool:
    """Whether two answers are the same text but for spaces, or the same words in any case."""
    right, text = (re.sub(r"\s+(?!\w)|(?<!\w)\s+", "", closed(each)) for each in (gold, answer))  # { x } as {x}
    return text == right or bool(
        _WORDS.fullmatch(answer) and _WORDS.fullmatch(gold) and answer.lower() == gold.lower()
    )


def grade_math(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """The answer must be mathematically equivalent to the gold answer, by math-verify."""
    if answer == gold.strip():
        return True, "equal as text"
    words = (" ".join(re.sub(TEXT, r" \1 ", DECORATION.sub("", each)).split()) for each in (gold, answer))
    word = any(re.fullmatch(r"\\text[a-z]*\s*\{\s*[^\W\d_]+\s*\}", each) for each in (gold, answer))
    upright, (gold, answer) = _same_text(*words), (plain(gold), plain(answer))
    if upright or _same_text(gold, answer):
        return True, "equal as text but for how it is set"
    letters = ["".join(each.split()).lower() for each in (gold, answer)]
    if word and letters[0] != letters[1] and sorted(letters[0]) == sorted(letters[1]):  # to math-verify, a product
        return False, "the same letters in another order"
    try:
        gold, answer = readable(gold, answer)
    except MisreadError as error:
        return False, str(error)
    if re.search(rf"\d{{{MAX_DIGITS}}}", answer):
        return False, f"a number in the box has {MAX_DIGITS} or more digits"
    return equivalent(gold, answer)


def grade_program(answer: str, gold: str, equivalent: Equivalence) -> Verdict:
    """The program must pass the tests in the gold answer (`seergate.eval.grading.programs`)."""
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
    text = final_part(text).strip()
    if grader == "number":
        return last_number(text)
    return (text.splitlines()[0].rstrip(" .") if grader == "exact" and text else text) or None


def grade(grader: str, completion: str, gold: str, equivalent: Equivalence) -> Grade:
    """Grade one completion with a grader of `GRADERS`. If the gold answer is empty (the problem is graded elsewhere),
    every answer is wrong.
    """
    answer = None if grader == PROGRAM else last_boxed(completion if grader in BOXED else final_part(completion))
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
    if name in BOXED and re.search(r"^\s*####", gold, re.MULTILINE):
        raise SeergateError(f"the answer {gold!r} must be only what stands behind '####', except for 'number'")
    if name != "exact" and not gold.strip():
        raise SeergateError(f"the answer is empty; for the grader {name!r} it must not be")
