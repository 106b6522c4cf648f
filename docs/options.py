"""Writes docs/options.md: the options of each method, from its dataclass.

python docs/options.py
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields
from itertools import groupby
from pathlib import Path

from seergate.config import DecodeConfig
from seergate.methods import METHODS, BudgetedMethod, Method, SelectingMethod

PAGE = Path(__file__).with_name("options.md")
INTRODUCTION = """# Options of each method

Written by `python docs/options.py` from the methods' dataclasses. In Python an option is a keyword,
`seergate.attach(model, "quest", block_size=16)`; on the command line and in sweep files it follows the name,
`quest:block_size=16` ([how](evaluation.md#methods-and-their-options)). The defaults are those of the papers or of
their code. Unless told otherwise, `seergate eval` gives methods without gates no dense layers and, if another method
decodes with gates, those that select blocks the gates' block size.

`EVICTOR+gate`, such as `snapkv+gate`, has the evictor's options and `read_budget`: the tokens that the gate reads of
what is kept.
"""
SHARED = {
    SelectingMethod: ("Methods that select blocks", "All methods that keep everything and read a part have these."),
    BudgetedMethod: ("Methods that evict to a budget", "All methods that keep `token_budget` tokens have these."),
}
"""Base class -> title and introduction of the options that its methods have in common."""


def described(kind: type) -> dict[str, str]:
    """Attribute -> what the class's docstring says of it, in one line."""
    section = re.search(r"^Attributes:\n((?:[ ].*\n|\n)*)", (inspect.getdoc(kind) or "") + "\n", re.M)
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", section[1] if section else "", re.M)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def meaning(kind: type, option: str) -> str:
    """What the nearest class that describes an option says; not where it refers to another class.

    Raises:
        LookupError: if no class does.
    """
    for source in (*kind.__mro__, DecodeConfig):
        text = described(source).get(option)
        if text and not text.startswith("see `"):
            return text
    raise LookupError(f"no docstring describes {kind.__name__}.{option}")


def options(kind: type[Method]) -> dict[str, Field]:
    """What can be given to a method."""
    return {field.name: field for field in fields(kind) if field.init}


def default(field: Field) -> str:
    """The default as one would write it in Python."""
    if field.default_factory is not MISSING:
        return repr(field.default_factory())
    return "must be given" if field.default is MISSING else f"`{field.default!r}`"


def table(kind: type[Method], names: list[str], base: type[Method] | None = None) -> str:
    """One row per option, or for several of which the same is said; what the base says already is not said again."""
    told = options(base) if base else {}
    means = {name: meaning(kind, name) for name in names}
    rows = []
    for text, group in groupby(names, key=means.__getitem__):
        own = list(group)
        values = ", ".join(dict.fromkeys(default(options(kind)[name]) for name in own))
        if base and own[0] in told and text == meaning(base, own[0]):
            text = "as there"
        rows.append(f"| {', '.join(f'`{name}`' for name in own)} | {values} | {text} |")
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def section(kind: type[Method]) -> str:
    """A method: what it does, where it shares options, and those that it adds, sets or has something to say about."""
    base = next((base for base in kind.__mro__[1:] if base in SHARED or base in METHODS.values()), None)
    own = [name for name in options(kind) if not base or name not in options(base) or name in vars(kind)]
    summary = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    if base:
        title = SHARED[base][0] if base in SHARED else base.name
        summary += f" With the options of [{title.lower()}](#{title.lower().replace(' ', '-')})."
    return f"## `{kind.name}`\n\n{summary}\n" + (f"\n{table(kind, own, base)}\n" if own else "")


def page() -> str:
    """The whole page."""
    common = [
        f"## {title}\n\n{about}\n\n{table(kind, list(options(kind)))}\n" for kind, (title, about) in SHARED.items()
    ]
    return "\n".join([INTRODUCTION, *common, *(section(METHODS[name]) for name in sorted(METHODS))])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
