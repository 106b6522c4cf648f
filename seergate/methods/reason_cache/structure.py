"""The structural check of ReasonCache: formulas and code of two steps as trees, which must be equal (IV-A1).

LaTeX is parsed by pylatexenc, Python by `ast`. What neither can parse (other languages, half a formula) is compared
token by token, which is stricter. The paper does not define formal content. Here it is the text between LaTeX's math
delimiters or in a code fence, and runs of operands and operators with a digit or an equals sign.
"""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

Tree = tuple[str, tuple[Any, ...]]
"""A label, and the subtrees."""

FENCE = re.compile(r"```[^\n`]*\n?")
MATH = re.compile(
    r"\$\$.+?\$\$"
    r"|(?<!\\)\\\[(?:(?!(?<!\\)\\\[).)+?\\\]"
    r"|(?<!\\)\\\((?:(?!(?<!\\)\\\().)+?\\\)"
    r"|\\begin\{(?P<name>[a-zA-Z]+\*?)\}(?:(?!\\begin\{(?P=name)\}).)+?\\end\{(?P=name)\}"
    r"|\$[^$\n]+\$",
    re.S,
)
r"""A formula cannot contain its own opening delimiter, so that unclosed ones are each searched only up to the next one
and time does not grow with the square of the text's length. ``\\[`` is a line break, and opens nothing."""

OPERAND = r"[\w.()\[\]{}\\]"
PLAIN = re.compile(rf"(?<!{OPERAND})(?:{OPERAND}+[ \t]*[-+*/^=<>≤≥≠≈×÷·][ \t]*)+{OPERAND}+")
"""Matches begin only at the start of an operand: from inside it, the search would fail again at each character."""

TOKEN = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|\S")


def formal_content(text: str, in_code: bool = False) -> Tree | None:
    """Return formulas and code of a step in order, as one tree; ``None`` for prose. ``in_code``: it begins in code."""
    parts: list[Tree] = []
    for number, piece in enumerate(FENCE.split(text)):
        if in_code ^ bool(number % 2):
            if piece.strip():
                parts.append(code_tree(piece))
            continue
        at = 0
        for match in MATH.finditer(piece):
            parts += _plain_formulas(piece[at : match.start()])
            parts.append(latex_tree(match.group()))
            at = match.end()
        parts += _plain_formulas(piece[at:])
    return ("step", tuple(parts)) if parts else None


def _plain_formulas(prose: str) -> list[Tree]:
    formulas = [match.group() for match in PLAIN.finditer(prose)]
    return [_token_tree("formula", formula) for formula in formulas if re.search(r"\d|=", formula)]


def _token_tree(label: str, text: str) -> Tree:
    return label, tuple((token, ()) for token in TOKEN.findall(text))


def latex_tree(source: str) -> Tree:
    """Parse a formula, delimiters included, into a tree; into its tokens if it does not parse."""
    from pylatexenc.latexwalker import LatexWalker

    try:
        nodes, *_ = LatexWalker(source, tolerant_parsing=True).get_latex_nodes()
        return "latex", _latex_forest(nodes)
    except Exception:  # a parser of a language without a grammar may stumble in any way
        return _token_tree("latex", source)


def _latex_forest(nodes: Any) -> tuple[Tree, ...]:
    trees: list[Tree] = []
    for node in nodes or ():
        kind = type(node).__name__
        if node is None or kind == "LatexCommentNode":
            continue
        if kind == "LatexCharsNode":
            trees += _token_tree("", node.chars)[1]
            continue
        arguments = getattr(node, "nodeargd", None)
        children = _latex_forest(arguments.argnlist if arguments is not None else ())
        children += _latex_forest(getattr(node, "nodelist", ()))
        names = (getattr(node, name, "") for name in ("macroname", "environmentname", "specials_chars"))
        trees.append((f"{kind}:{next(filter(None, names), '')}", children))
    return tuple(trees)


def code_tree(source: str) -> Tree:
    """Return Python code as its syntax tree, in one text; anything else as its tokens."""
    try:
        return "python", ((ast.dump(ast.parse(textwrap.dedent(source))), ()),)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _token_tree("code", source)
