"""Untrusted text (ids, questions, answers, names, messages) as plain text of a terminal, of Markdown and of HTML.

A model, a data file, a run directory or an adapter may say anything. Each function returns text that its output shows
as the characters given: nothing in it acts as a terminal escape, as markup or as a link.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from typing import Any

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKED = re.compile(r"[\\`*\[\]#]|(?<![^\W_])_|_(?![^\W_])|^(?:\d+[.)]|[-+])(?=\s|[-+]|$)")
_REFERENCES = {ord(each): f"&#{ord(each)};" for each in "&<>~|$"}


_LAYOUT = "\n\t"
"""Control characters that lay out a text of several lines."""


def visible(text: str, kept: str = "") -> str:
    r"""Control characters, marks of the writing direction and lone surrogates as escapes such as ``\x1b``, except the
    characters in ``kept``.
    """
    return _UNSEEN.sub(lambda one: one[0] if one[0] in kept else one[0].encode("unicode_escape").decode(), text)


class Terminal:
    """A text stream that writes `visible` text to ``stream``; line feeds and tabs stay. Its other attributes are the
    stream's.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write visible text; returns the number of characters given."""
        self.stream.write(visible(text, _LAYOUT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write visible texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def html_text(text: str) -> str:
    """One line as the content of an HTML element or the value of an attribute."""
    return html.escape(visible(text))


def markdown_text(text: str) -> str:
    """One line as inline Markdown, also in a table's cell. Characters become character references where not every
    Markdown renderer lets a backslash escape them.
    """
    marked = _MARKED.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", visible(text).strip())
    return marked.translate(_REFERENCES)


def markdown_code(text: str) -> str:
    """One line as a code span, not for a table's cell."""
    mark, line = _outside(text, "`", 1), visible(text)
    return f"{mark} {line} {mark}" if line.startswith("`") or line.endswith("`") else f"{mark}{line}{mark}"


def markdown_block(text: str, language: str = "", mark: str = "~") -> str:
    """Lines as a fenced code block."""
    fence = _outside(text, mark, 3)
    return f"{fence}{language}\n{visible(text, _LAYOUT)}\n{fence}"


def _outside(text: str, mark: str, least: int) -> str:
    """A run of a mark, of ``least`` or more, that is longer than all such runs in a text."""
    return mark * max(least, 1 + max(map(len, re.findall(f"{mark}+", text)), default=0))


def with_policy(page: str) -> str:
    """An HTML page, not yet filled with untrusted text, with a content security policy: it allows the ``<script>`` and
    ``<style>`` elements that the page has now, images inside the page, and nothing else.
    """
    parts = ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for kind in ("script", "style"):
        own = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in own]
        parts += [" ".join([f"{kind}-src", *(f"'sha256-{each}'" for each in hashes)])] if own else []
    start = '<meta charset="utf-8">'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(parts)}">'
    return page.replace(start, f"{start}\n{policy}", 1)
