r"""Normalisation of mathematical answers, and rejection of those that math-verify would misread.

math-verify ignores the words after a number and everything else that it cannot parse, and would compare only the rest
of such an answer: ``5 \text{ or more}`` as 5. Therefore every symbol and word of an answer must be one that
math-verify is known to parse, a unit or a counted noun, or also in the gold answer (docs/evaluation.md has the rule).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

SPACE = r"(?:\\[,;:! ]|~|[^\S\n])"
"""A space within a line: a command of LaTeX, or a space character of any width."""

INVISIBLE = re.compile("[\u200b-\u200d\u2060\ufeff]")

_ARGUMENT = r"(\{[^{}]*\}|\\[A-Za-z]+(?![A-Za-z]|\s*\{)|[^\s{}\\])"
_FRACTION = re.compile(rf"\\[dt]?(frac|binom)\s*{_ARGUMENT}\s*{_ARGUMENT}")  # of arguments in braces or without
_UNBRACED = re.compile(
    r"(\\(?:math(?:bb|bf|cal|frak)|vec|hat|bar|overline)|\\sqrt\s*\[[^\[\]]*\])(?:\s+([A-Za-z\d])|(?<=\])([A-Za-z\d])|(\d))"
)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"(?:[({](\d+(?:\.\d+)?)[)}]|(\d+(?:\.\d+)?))\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
DECORATION = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:underline|boldsymbol|bm|bf|it|rm|sf|tt|limits|(?:display|text|script)style"
    r"|[bB]igg?[lrm]?|tiny|scriptsize|footnotesize|small|normalsize|[Ll]arge|LARGE|[Hh]uge)(?![A-Za-z])"
    r"|(?<=\\\\)\*?\s*\[\s*[-+]?[\d.]+\s*(?:pt|em|ex|[cm]m|in|\\baselineskip)\]"
)
"""Commands of LaTeX that change how a text looks only, and the space behind a line break (``\\\\[4pt]``)."""
_ANSWER = re.compile(r"\A(?:\\text(?:bf)?\s*\{\s*Answer\s*:\s*\}|Answer\s*:|\\approx(?![A-Za-z])|≈)\s*")
_AROUND = re.compile(
    r"\A(?:(\*\*?|`|\$\$?)([^*`$]+)\1|\\[(\[]((?:(?!\\[()\[\]]).)+)\\[)\]]|\{((?:[^{}]|\{[^{}]*\})*)\})\Z", re.DOTALL
)
_END = re.compile(r"(?:\\[!:]|[\s,;~\\]|(?<!\.)\.)+\Z")  # punctuation, line breaks and spaces
_SEPARATOR = rf"[^\S\n]*(?:,\\!|\{{\\?,\}}|{SPACE})[^\S\n]*"
_THOUSANDS = re.compile(rf"(?<![\w.^\\])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)")
_NOTHING = re.compile(
    r"\\text[a-z]*\s*\{\s*(?:there (?:is|are) )?(?:no(?: real| such| integer)? (?:solutions?|roots?)|none)\s*\}", re.I
)
_RECURRING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))(?![\d.])")
_MIXED = re.compile(rf"(?<![\w.^}}/])(\d+){SPACE}+(\d+)/(\d+)(?!\.?\d|/)")
_CLOCK = re.compile(  # 1:2:3 or a time
    r"\d\s*:\s*\d+\s*:\s*\d|\d\s*:\s*0\d|\d:\d\d\W*(?:\\text\s*\{\s*)?[ap]\.?\s?m(?![A-Za-z])", re.IGNORECASE
)
_MULTIPLES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLE = re.compile(
    rf"(?<=[\d}}]){SPACE}*(\\text\s*\{{\s*)?((?:{'|'.join(_MULTIPLES)})(?:{SPACE}+(?:{'|'.join(_MULTIPLES)}))*)(?![A-Za-z])"
)
_SIGN = {"∞": "infty", "×": "times", "÷": "div", "·": "cdot", "⋅": "cdot", "±": "pm", "∓": "mp", "≤": "le", "≥": "ge"}
_SIGN |= {"≠": "ne", "∪": "cup", "∩": "cap", "∅": "emptyset", "∈": "in", "→": "to"}
_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt(?=\())\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|\w))?")


def latex(text: str) -> str:
    r"""A text with its mathematical signs in LaTeX (``√3`` as ``\sqrt{3}``, ``½`` as ``\frac{1}{2}``, ``x²`` as
    ``x^{2}``, π as ``\pi``), digits and letters of other widths and fonts as ordinary ones, and nothing invisible.
    """

    def written(match: re.Match[str]) -> str:
        sign = match[0]
        if unicodedata.name(sign, "").startswith("VULGAR FRACTION") and unicodedata.decimal(sign, None) is None:
            return r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("⁄"))
        sign = unicodedata.normalize("NFKC", sign)
        letter = re.fullmatch(
            r"GREEK (SMALL|CAPITAL) LETTER (\w+)", unicodedata.name(sign, "") if len(sign) == 1 else ""
        )
        if letter:
            name = letter[2].replace("LAMDA", "LAMBDA").capitalize()
            return f"\\{name if letter[1] == 'CAPITAL' else name.lower()} "
        return f"\\{_SIGN[sign]} " if sign in _SIGN else sign

    text = INVISIBLE.sub("", text).translate(dict.fromkeys(map(ord, "–−"), "-") | dict.fromkeys(map(ord, "⁄∕"), "/"))
    for at, pattern in {"^": "[⁰¹²³⁴-⁹⁺⁻ⁿ]+", "_": "[₀-₉]+"}.items():
        text = re.sub(pattern, rf"{at}{{\g<0>}}", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}" if root[1] or root[2] else r"\sqrt", text)
    return re.sub(r"[^\x00-\x7f]", written, text).replace("−", "-")  # after ⁻


def multiplied(text: str) -> str:
    r"""A text with the words after a number as a power of ten: ``3 million`` as ``3\times 10^{6}``."""

    def power(match: re.Match[str]) -> str:
        return rf"\times 10^{{{sum(_MULTIPLES[word] for word in re.findall('[a-z]+', match[2]))}}} {match[1] or ''}"

    return _MULTIPLE.sub(power, text)


def _recurring(match: re.Match[str]) -> str:
    r"""A recurring decimal as a fraction: ``0.1\overline{6}`` as ``\frac{15}{90}``."""
    whole, fixed, period = match[1], match[2], match[3] or match[4]
    top = int(whole + fixed + period) - int(f"0{whole}{fixed}")
    return rf"\frac{{{top}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _mixed(match: re.Match[str]) -> str:
    """A whole number and a proper fraction as their sum; not 1 000/3001."""
    proper = int(match[2]) < int(match[3]) and not match[2].startswith("0")
    return rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}" if proper else match[0]


def plain(text: str) -> str:
    r"""Normalise an answer for math-verify: nothing around the formula, no punctuation at the end; ``^\circ``
    for a degree sign; a fraction's numerator and denominator in braces; no spaces between thousands; mixed numbers,
    powers of ten, primes, the imaginary unit and the empty set in their usual form; signs as `latex` has them.
    """
    text = _PRIME.sub(lambda match: "'" * max(1, match[0].count("prime")), text)
    text, before = re.sub(r"\^\s*\{\s*(\d)\s*\}(?!\d)", r"^\1", latex(text)), None
    while text != before:  # repeated, because wrappers may be nested
        before, text = text, _ANSWER.sub("", _END.sub("", DECORATION.sub("", text))).strip()
        text = re.sub(rf"\A{SPACE}+", "", text)
        text = _AROUND.sub(lambda match: match[match.lastindex or 0], text)
    text = _NOTHING.sub(lambda _: r"\emptyset", text.replace(r"\varnothing", r"\emptyset"))
    text = re.sub(r"\s*(?:°|\\degree(?![A-Za-z]))", r"^\\circ ", text)
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])", r"\1\\times 10^{\2}", text)
    text = re.sub(r"(\\math(?:rm|it))\s+([A-Za-z])", r"\1{\2}", text)
    text = re.sub(
        r"(\\[A-Za-z]+)?\s*\\(?:mathrm|mathit|text)\s*\{\s*([ie])\s*\}",
        lambda m: f"{m[1]} {m[2]}" if m[1] else m[2],
        text,
    )
    text = _FRACTION.sub(
        lambda match: "".join((f"\\{match[1]}", *("{" + part.strip("{}") + "}" for part in match.group(2, 3)))), text
    )
    text = _RECURRING.sub(_recurring, text)
    text = _UNBRACED.sub(lambda match: f"{match[1]}{{{match[match.lastindex or 0]}}}", text)
    if _TRIGONOMETRIC.search(text):  # math-verify ignores the sign
        text = _DEGREES.sub(lambda match: rf"\frac{{{match[1] or match[2]}\pi}}{{180}}", text)
    text = _MIXED.sub(_mixed, text)  # before the thousands: 1 100/101
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = multiplied(text)
    if not re.match(rf"{TEXT}(?:{TEXT}|[A-Za-z0-9 ()])*\Z", text):
        return text
    text = re.sub(TEXT, r" \1 ", text)
    return plain(text) if _FORMULA.search(text) else " ".join(re.findall(r"\w+", text))


_UNITS = """
    mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; nm nanometer;
    in inch inche; ft foot feet; yd yard; mi mile; unit; acre; ha hectare; s sec second; min minute; h hr hour;
    day; week; month; year yr; mg milligram; g gram; kg kilogram; lb pound; oz ounce; ton tonne;
    ml mL milliliter millilitre; l L liter litre; gal gallon; qt quart; pt pint; cup; degree deg; radian rad;
    percent; cent; dollar usd; euro eur; mph; Hz hertz; N newton; J joule; kJ kilojoule; W watt; V volt;
    A amp ampere; K kelvin; Pa pascal; atm; mol mole; eV; MeV; C coulomb; T tesla; way; people person;
    man men; student; point; time; item; term; digit
"""
"""A unit and its other names; plurals are recognised."""

UNITS = {name: names.split()[0] for names in _UNITS.split(";") for name in names.split()}
"""A unit's names, and the one that stands for all."""
TEXT = r"\\(?:text[a-z]*|math(?:rm|it|sf|tt)|[mh]box|operatorname\*?)\s*\{([^{}]*)\}"
_FORMULA = re.compile(r"(?<![A-Za-z])-\s*\d|[+/.=^$<>:]\s*\d|\d\s*([+/=^*<>%]|-(?![A-Za-z]))|\d[.,:]\d")  # not F-2
_LAST_WORDS = re.compile(
    rf"(?<![_^{{])(?:{TEXT}|((?<![A-Za-z\\])[A-Za-z]+(?:[ /-][A-Za-z]+)*))\s*(?:\^\s*\{{?\s*(-?\d)\s*\}}?)?\Z"
)
_JOINED = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:or|and)\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z]))")
_SIGNS = """
    frac dfrac tfrac cfrac over sqrt cdot times div pm mp left right big Big bigg Bigg bigl bigr Bigl Bigr infty
    in cup cap setminus emptyset lbrace rbrace sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log
    ln lg exp lim sum prod int binom dbinom tbinom choose overline bar vec hat mathbb mathbf mathcal mathfrak
    circ angle triangle det gcd lcm min max lfloor rfloor lceil rceil lvert rvert vert langle rangle quad approx
    to le leq leqslant ge geq geqslant lt gt ne neq alpha beta gamma delta epsilon varepsilon zeta eta theta
    iota kappa lambda mu nu xi pi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi
    Sigma Phi Psi Omega
"""
"""The commands of LaTeX that math-verify interprets correctly."""

_FOREIGN = re.compile(r"[^\x20-\x7e\s£€¥₹]|['?#@`]|\.\.\.|\+\s*\Z")
_DENIAL = re.compile(  # words that change what a name before "=" or a number before them means
    "no|not|none|never|if|unless|when|where|for|or|and|but|except|than|least|most|more|less|mod|modulo|at|is|are|was|dozen"
    "|squared|cubed|factorial|hal(?:f|ves)|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths?"
)
_RELATION = re.compile(r"\\(?:[gl]eq?(?:slant|q)?|[gl]t|neq?)(?![A-Za-z])|[<>≤≥≠]")
_CURRENCY = re.compile(r"\A[£€¥₹]\s*(?=\d)|(?<=\d)\s*[£€¥₹]\Z")
_NUMBER = re.compile(r"-?\d[\d.,]*")
_UNIT_SIGN = re.compile(rf"\\?\$\s*({_NUMBER.pattern})|({_NUMBER.pattern})\s*\^\s*\{{?\s*\\circ\s*\}}?")
_COMMAND = r"\\(?:begin|end)\{\w*\}(?:\{[clr| ]*\})?|\\[A-Za-z]+"
_LETTER = re.compile(rf"{_COMMAND}|[Oo]\(|([A-Za-z])")  # O(n) is not o(n)
_ARROW = re.compile(r"\\to(?![A-Za-z])|[-=]>")
_PRIME = re.compile(r"[′’]|\^\s*(?:\{\s*(?:\\prime\s*)+\}|\\prime(?![A-Za-z]))")
_PRIMED = re.compile(r"(?:[A-Za-z)}]|_\w)'+")  # behind a number, minutes or feet
_NAMED = re.compile(r"(?:\A|[,;])\s*[A-Za-z]'*(?:\(\w+\))?\s*=")
_NAME = re.compile(rf"\s*(?:{TEXT}|\\?[A-Za-z]+)(?:_(?:\w|\{{\w+\}}))?\s*")
_BASE = re.compile(r"\d_\{?\(?(\d+)\)?\}?$")
_SIDE_BY_SIDE = re.compile(rf"(?<![\d._^])\d+(?:\.\d+)?(?:{SPACE}|\\q?quad)+\d")  # an index or a power may come first
_TUPLE = re.compile(r"\((?:[^()]|\([^()]*\))*,(?:[^()]|\([^()]*\))*\)")


def _unit(words: str, power: str | None) -> list[str] | None:
    """A unit's factors in canonical spelling; ``None`` if a word is not a unit."""
    factors, dimension = list[str](), {"square": "2", "sq": "2", "cubic": "3"}
    raised = ""
    for word in re.findall(r"[A-Za-z]+|\^?\d", words):
        if word.lower() in ("per", "a", "of"):
            continue
        if word.lower() in dimension:
            raised = dimension[word.lower()]
        elif factors and (word.lower() in ("squared", "cubed") or word.strip("^") in ("2", "3")):
            factors[-1] += {"squared": "2", "cubed": "3"}.get(word.lower(), word.strip("^"))
        else:
            names = (word, word.lower(), word.lower().removesuffix("s"))
            unit = next((UNITS[name] for name in names if name in UNITS), None)
            if unit is None:
                return None
            factors.append(unit + raised)
            raised = ""
    if factors and power and not factors[-1][-1].isdigit():
        factors[-1] += power
    return sorted(factors) if 0 < len(factors) <= 4 and not raised else None


def _without_unit(text: str, upright: set[str]) -> tuple[str, list[str]]:
    r"""A quantity without the unit or the counted noun at its end, and the unit's factors or the noun; no factors if
    there is neither. ``upright`` are the words in the ``\text{}`` of both answers.
    """
    if sign := _UNIT_SIGN.fullmatch(text):
        return sign[1] or sign[2], ["dollar" if sign[1] else "degree"]
    match = _LAST_WORDS.search(text)
    if match is None or not re.search(r"\d", before := text[: match.start()]):
        return text, []
    words = (match[1] or match[2] or "").strip()
    names = re.findall("[A-Za-z]+", words)
    if match[2] and all(len(name) == 1 and name not in upright for name in names):
        return text, []  # variables; in km/h, a letter is beside a longer unit
    unit = _unit(words, match[3])
    if unit is None:
        # Outside of \text{}, two or three letters may be a product of variables.
        is_noun = match[1] or (any(len(name) > 3 for name in names) and before[-1].isspace())
        if not is_noun or match[3] or len(names) > 4 or not re.fullmatch("[A-Za-z -]{2,}", words):
            return text, []
        if any(_DENIAL.fullmatch(name.lower()) for name in names):
            return text, []
        unit = [re.sub("e?s?$", "", names[-1].lower())]
    return re.sub(rf"(?:{SPACE}|\\q?quad)+\Z", "", before), unit


def _words(text: str, letters: set[str]) -> set[str]:
    """The words in a formula. Adjacent letters are a product, not a word, if the gold answer has all of them."""
    inside = " ".join(match[1] for match in re.finditer(TEXT, text))
    outside = re.sub(rf"{_COMMAND}|(?<=[A-Za-z])_\{{[^{{}}]*\}}", " ", re.sub(TEXT, " ", text))
    words = {word for word in re.findall(r"[A-Za-z]{2,}", outside) if not set(word) <= letters}
    return {word.lower() for word in (*words, *re.findall(r"[A-Za-z0-9]+", inside))}


def _values(text: str) -> list[str]:
    """The values that a text lists outside of brackets, without what precedes ``=``."""
    depth = 0
    text = re.sub(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)", lambda match: match[0].replace(",", ""), text)  # thousands
    for match in re.finditer(r"\\\\|\\q?quad(?![A-Za-z])|\\[{}]|\\[A-Za-z]+|[()\[\]{}]|[,;&\n]", text):
        token = match[0]
        if token[-1] in "([{":
            depth += 1
        elif token[-1] in ")]}":
            depth -= 1
        elif depth <= 0 and (token in (",", ";", "&", "\n", "\\\\") or token.endswith("quad")):
            text = text[: match.start()] + "\0" * len(token) + text[match.end() :]
    return [part.rpartition("=")[2].strip() for part in text.split("\0") if part.strip()]


def _in_case(gold: str, answer: str) -> str:
    """The answer with its letters in the gold answer's case, except those that one of the two has in both cases."""
    right, given = ({match[1] for match in _LETTER.finditer(text)} for text in (gold, answer))
    others = {letter for letter in given - right if letter and letter.swapcase() in right - given}
    return _LETTER.sub(lambda match: match[1].swapcase() if match[1] in others else match[0], answer)


def _brackets(text: str) -> str:
    """``{`` for a set of listed numbers, ``(`` for a tuple, an open interval or a strict inequality, else empty."""
    value = re.split(r"=|\\in(?![A-Za-z])", re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text))[-1].strip()
    if re.match(r"\\(?:\{|lbrace)", value):
        return "" if re.search(r"[(:|<>]|\\mid", value) else "{"
    return "(" if _TUPLE.fullmatch(value) or re.search(r"[<>]|\\[lg]t(?![A-Za-z])", value) else ""


def closed(text: str) -> str:
    r"""A formula with a plain space for LaTeX's spaces, and none before ``%``, ``i`` and ``^``; line breaks stay. A
    percent sign behind a bracket is a factor.
    """
    text = re.sub(rf"(\\\\)|(?:{SPACE}|\\>)+", lambda match: match[1] or " ", text)
    text = re.sub(r"(?<=[\d}]) (?=\\?%|i(?![A-Za-z])|\^)", "", text)
    return re.sub(r"(?<=[})])\\?%", r"\\cdot 1\\%", text)  # math-verify reads it behind a plain number only


def _both_signs(text: str) -> str:
    r"""A formula with one ``\pm`` inside braces as two formulas; math-verify reads it outside of them only."""
    signs = list(re.finditer(r"\\(?:pm|mp)(?![A-Za-z])", text))
    before = re.sub(r"\\[{}]", "", text[: signs[0].start()]) if len(signs) == 1 else ""
    if before.count("{") <= before.count("}"):
        return text
    sign, parts = signs[0][0], re.split(r",(?![^(\[{]*[)\]}])", text)  # parts of a list
    return ",".join(part.replace(sign, each) for part in parts for each in ("+-" if sign in part else "+"))


class MisreadError(ValueError):
    """Raised for two different answers that math-verify might call equal; the message says why."""


def readable(gold: str, answer: str) -> tuple[str, str]:
    """The two answers, both already `plain`, to give to math-verify: without units and without a name before ``=``.

    Raises:
        MisreadError: if math-verify would ignore or misread a part of the answer.
    """
    # math-verify ignores the base of a number and what precedes the last relation, multiplies adjacent numbers, and
    # compares sets with tuples.
    gold_base, answer_base = (match[1] if (match := _BASE.search(text)) else "10" for text in (gold, answer))
    if gold_base != answer_base:
        raise MisreadError("numbers to different bases")
    if _SIDE_BY_SIDE.search(gold) or _SIDE_BY_SIDE.search(answer):
        raise MisreadError("numbers beside each other are no product")
    gold, answer = (_both_signs(closed(text)) for text in (gold, answer))
    if _NUMBER.fullmatch(gold) or _NUMBER.fullmatch(answer):
        gold, answer = (_CURRENCY.sub("", text) for text in (gold, answer))
    if {_brackets(gold), _brackets(answer)} == {"{", "("}:
        raise MisreadError("a set and a tuple")
    if not _RELATION.search(gold):
        gold = _JOINED.sub(", ", gold)
    if len(_values(gold)) > 1 or _brackets(gold) == "{" or re.search(r"\\[pm]{2}(?![A-Za-z])", gold):
        answer = _JOINED.sub(", ", answer)
    upright = set(re.findall("[A-Za-z]+", " ".join(re.findall(TEXT, gold + answer))))
    numbers = [list(map(int, re.findall(r"\d+", text.rpartition("=")[2]))) for text in (gold, answer)]
    if numbers[0] != numbers[1] and (_CLOCK.search(gold) or _CLOCK.search(answer)):
        raise MisreadError("another time, or another ratio of several numbers")
    whole = gold, answer
    (gold, unit), (answer, other) = _without_unit(gold, upright), _without_unit(answer, upright)
    for text, against, another in zip(whole, whole[::-1], (other, unit), strict=True):
        if another and re.search(r"%\s*\Z", text) and not re.search("%|percent", against):
            raise MisreadError("a percentage and another unit")
    if unit and other and unit != other:
        raise MisreadError(f"another unit: {' '.join(other)} for {' '.join(unit)}")
    primed = [sorted(_PRIMED.findall(_NAMED.sub("", text))) for text in (gold, answer)]
    if primed[0] != primed[1]:  # math-verify leaves primes out
        raise MisreadError("other primes")
    gold_signs = {match[0] for match in _FOREIGN.finditer(gold)}
    if strange := next((match[0] for match in _FOREIGN.finditer(answer) if match[0] not in gold_signs), None):
        raise MisreadError(f"the sign {strange!r}, which the gold answer does not have")
    commands, gold_commands = (set(re.findall(r"\\([A-Za-z]+)", re.sub(TEXT, " ", text))) for text in (answer, gold))
    if strange := min(commands - gold_commands - set(_SIGNS.split()), default=None):
        raise MisreadError(f"\\{strange}, which the gold answer does not have")
    letters = set(re.sub(rf"{TEXT}|\\[A-Za-z]+", "", gold))
    name, equals, value = answer.partition("=")
    named = equals and not any(map(_DENIAL.fullmatch, _words(name, letters)))
    if strange := min(_words(value if named else answer, letters) ^ _words(gold, letters), default=None):
        raise MisreadError(f"the word {strange!r}, which stands in one of the two answers only")
    bare = re.sub(r"_\{[^{}]*\}", "", answer)  # without the condition of a limit
    if _ARROW.search(bare) and not _ARROW.search(gold):
        raise MisreadError("a conclusion, where the gold answer is none")
    if _RELATION.search(bare) and not (_RELATION.search(gold) or re.search(r"[\[(].*,.*[\])]", gold)):
        raise MisreadError("a relation, where the gold answer is none")
    if re.match(_RELATION, bare) and not _RELATION.search(gold):
        raise MisreadError("a relation without a left side")
    values, gold_values = _values(answer), _values(gold)
    tallies = [Counter("".join(value.split()) for value in each) for each in (values, gold_values)]
    counts = [sorted(tally.values()) for tally in tallies]
    names = [set(re.findall(r"([A-Za-z])[^,;&=]*=", text)) for text in (gold, answer)]  # x = 5, y = 3
    lists = min(len(values), len(gold_values)) > 1 and (len(names[0]) > 1) == (len(names[1]) > 1)
    lists = lists and not re.search(r"\\(?:begin|pm|mp)|[-+][^,;&=]*=", f"{gold}, {answer}")  # x + y = 0, x - y = 0
    if lists and counts[0] != counts[1] and max(counts[0] + counts[1]) > 1:
        raise MisreadError("values are repeated in one of the two answers only")
    if len(values) > 1 and not re.search(r"[,;&\n]|\\(?:\\|pm|mp|q?quad)", gold):
        raise MisreadError("several values, where the gold answer is one")
    lists = lists and len(names[0] | names[1]) < 2 and not re.search(r"%|\d[^,;&=]*=", f"{gold}, {answer}")
    if lists and max(counts[0]) > 1:  # as sets, 1, 1, 2 and 1, 2, 2 would be equal
        spelled = {"".join(value.split()): value for value in gold_values + values}
        answer, gold = (", ".join(f"({spelled[key]}, {n})" for key, n in tally.items()) for tally in tallies)
        return gold, _in_case(gold, answer)
    if len(names[0]) == len(gold_values) > 1 and "=" not in answer and (bracket := _brackets(answer)) != "{":
        gold, answer = f"({', '.join(gold_values)})", answer if bracket else f"({answer})"
    return gold, _in_case(gold, value if named and "=" not in gold + value and _NAME.fullmatch(name) else answer)
