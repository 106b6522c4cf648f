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

_SPACE = r"(?:\\[,;:! ]|~|[^\S\n])"  # one within a line, as LaTeX writes it or of any width

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


_COLOUR = r"\\(?:text)?color\s*\{[^{}]*\}"
_FONT = re.compile(
    rf"{_COLOUR}|\\(?:(?:text|math)[a-z]*|mbox|fbox|boldsymbol|bm|underline|emph|bf|it|rm|sf|sl|tt)(?![A-Za-z])"
)
_DELIMITER = re.compile(r"\\[()\[\]]|(?<!\\)[${}]|\*\*|[`\"]")  # of formulas, groups, markdown and quotations
_LETTER = re.compile(r"[(\[]?([A-Z])(?:([.:)\]]+)|(?=\s|\Z))(.*)", re.DOTALL)  # the letter, its punctuation, the rest
_JOINED = r"(?:\bor\b|\band\b|\\(?:lor|vee)\b|\\?&|[/,;|+\n])"
_ALONE = r"(?<![\w\\^'-])([A-J])(?![\w^'-])"  # a letter that is no part of a word or a formula
_NEXT = re.compile(rf"\s*({_JOINED}?)\s*\(?{_ALONE}(?=(.*))", re.DOTALL)
_ENDS = re.compile(rf"\s*(?:\Z|[.:)]|{_JOINED}\s*\(?{_ALONE})")
_DENIED = re.compile(r"\s*(?:is|was)\s+(?:wrong|incorrect|false|not)\b")
_BEHIND = re.compile(  # what may stand behind a letter without punctuation, which may be the article or a variable
    r"(?:because|since)\b.*|is\s+(?:the\s+)?(?:right|correct|answer)\b.*|(?:or|and|not)\s+\(?[A-J]\b.*|only"
    r"|-?[\d.,]+(?:\s+\S+)?|\([^()]*\)",  # a quantity; the option's text
    re.DOTALL,
)
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


def _bare(answer: str) -> str:
    """An answer without fonts, colours, markdown, LaTeX's spaces, and punctuation at its end that tells nothing."""
    text = _DELIMITER.sub("", _FONT.sub("", answer))
    text = re.sub(_SPACE, " ", text.replace(r"\\", "\n")).strip(" \n*").rstrip(" \n,;\\*")
    return text.strip()


def grade_letter(answer: str, gold: str, equivalent: Equivalence) -> Grade:
    r"""Multiple choice: the box must hold the letter, alone or followed by the option's text.

    ``C``, ``(C)``, ``\text{C}``, ``C.`` and ``C. 4 eV`` are C, and so is ``C because A is impossible``. ``4 eV`` and
    ``A proton`` are no letters, and ``A, C``, ``A or C`` and ``A. 4 eV or C. 5 eV`` are no choice.
    """
    bare = _bare(answer)
    found = _LETTER.fullmatch(bare)
    if found is None:
        return Grade(answer, False, "the box does not hold one letter")
    letter, label, rest = found[1], found[2] or "", found[3]
    other = _second_choice(letter, label, rest)
    if other is not None:
        return Grade(answer, False, f"the box does not hold one letter, but {letter} and {other}")
    if _DENIED.match(rest) or not (label or not rest or _BEHIND.fullmatch(rest.strip())):
        return Grade(answer, False, "the box does not hold one letter, but a sentence or a formula")
    return Grade(answer, letter == gold.strip(), f"read as the letter {letter}")


_ARGUMENT = r"(\{[^{}]*\}|\\[A-Za-z]+(?![A-Za-z]|\s*\{)|[^\s{}\\])"
_FRACTION = re.compile(rf"\\[dt]?frac\s*{_ARGUMENT}\s*{_ARGUMENT}")  # of simple things, in braces or without
_DECORATION = re.compile(rf"{_COLOUR}|\\(?:underline|boldsymbol|bm|bf|displaystyle)(?![A-Za-z])")
_ANSWER = re.compile(r"\A(?:\\text(?:bf)?\s*\{\s*Answer\s*:\s*\}|Answer\s*:)\s*")
_AROUND = re.compile(
    r"\A(?:(\*\*?|`|\$\$?)([^*`$]+)\1|\\[(\[]((?:(?!\\[()\[\]]).)+)\\[)\]]|\{([^{}]*)\})\Z", re.DOTALL
)
_END = re.compile(r"(?:\\[!:]|[\s,;~\\]|(?<!\.)\.)+\Z")  # punctuation, line breaks and spaces
_SEPARATOR = rf"[^\S\n]*(?:,\\!|\{{\\?,\}}|{_SPACE})[^\S\n]*"
_THOUSANDS = re.compile(rf"(?<![\w.^\\])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)")


def _plain(text: str) -> str:
    r"""What math-verify does not read, written as it does: nothing around the formula, no punctuation at the end;
    ``^\circ`` for a degree sign; a fraction's numerator and denominator in braces; no spaces between thousands.
    """
    before = None
    while text != before:  # as often as there is something around it
        before, text = text, _ANSWER.sub("", _END.sub("", _DECORATION.sub("", text))).strip()
        text = _AROUND.sub(lambda match: match[match.lastindex or 0], text)
    text = re.sub(r"\s*(?:°|\\degree\b)", r"^\\circ", text).replace("–", "-").replace(r"\varnothing", r"\emptyset")
    text = _FRACTION.sub(
        lambda match: "".join((r"\frac", *("{" + part.strip("{}") + "}" for part in match.groups()))), text
    )
    return _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)


_BASE = re.compile(r"\d_\{?\(?(\d+)\)?\}?$")
_STATEMENT = re.compile(  # a relation without a left side, or a conclusion
    r"^(?:\\(?:[gl]eq?(?:slant|q)?|[gl]t|neq?|not)(?![A-Za-z])|[<>≤≥≠])"
    r"|\\(?:(?:[Ll]ong)?(?:[Ll]eft)?(?:[Rr]ight)?arrow|to|implies|iff)(?![A-Za-z])|[→⇒⇔]|[-=]>"
)
_SIDE_BY_SIDE = re.compile(rf"(?<![\d._^])\d+(?:\.\d+)?{_SPACE}+\d")  # an index or a power may come before a number
_TUPLE = re.compile(r"\((?:[^()]|\([^()]*\))*,(?:[^()]|\([^()]*\))*\)")


def _brackets(text: str) -> str:
    """``{`` for a set whose numbers are listed, ``(`` for a tuple or an open interval, empty for anything else."""
    value = re.split(r"=|\\in(?![A-Za-z])", re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text))[-1].strip()
    if re.match(r"\\(?:\{|lbrace)", value):
        return "" if re.search(r"[(:|<>]|\\mid", value) else "{"
    return "(" if _TUPLE.fullmatch(value) or re.search(r"[<>]|\\[lg]t(?![A-Za-z])", value) else ""


def _misread(gold: str, answer: str) -> str | None:
    """Why two answers must not be left to math-verify, which would take them for equal; or ``None``."""
    # It takes a base for an ornament, ignores what stands before the last relation, multiplies numbers that stand
    # beside each other, and compares sets with tuples.
    wanted, found = (match[1] if (match := _BASE.search(text)) else "10" for text in (gold, answer))
    if wanted != found:
        return "numbers to different bases"
    if _STATEMENT.search(re.sub(r"_\{[^{}]*\}", "", answer)) and not _STATEMENT.search(gold):  # not that of a limit
        return "a relation or a conclusion, where the gold answer is none"
    if _SIDE_BY_SIDE.search(gold) or _SIDE_BY_SIDE.search(answer):
        return "numbers beside each other are no product"
    if {_brackets(gold), _brackets(answer)} == {"{", "("}:
        return "a set and a tuple"
    return None


def grade_math(answer: str, gold: str, equivalent: Equivalence) -> Grade:
    """Mathematical equivalence, by math-verify."""
    if answer == gold.strip():
        return Grade(answer, True, "equal as text")
    written, gold, answer = answer, _plain(gold), _plain(answer)
    if answer == gold:
        return Grade(written, True, "equal as text but for how it is set")
    reason = _misread(gold, answer)
    if reason is not None:
        return Grade(written, False, reason)
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
        gold: the right answer; where it is empty (a problem that is graded elsewhere), nothing is right.
        equivalent: decides on mathematical equivalence, for the grader that asks.
    """
    answer = last_boxed(completion)
    if answer is None:
        return Grade(None, False, "no boxed answer")
    if not gold.strip():
        return Grade(answer[:MAX_ANSWER], False, "there is no gold answer")
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


def check_gold(name: str, gold: str) -> None:
    """Refuse a gold answer that no answer can equal. An empty one is accepted where text is compared.

    Args:
        name: a key of `GRADERS`.
        gold: the right answer.

    Raises:
        SeergateError: saying what it must be.
    """
    if name == "letter" and not re.fullmatch("[A-Z]", gold.strip()):
        raise SeergateError(f"the answer {gold!r} must be one capital letter for the grader 'letter'")
    if name != "exact" and not gold.strip():
        raise SeergateError(f"the answer is empty; for the grader {name!r} it must not be")
