"""Hooks of mkdocs: links out of docs/ lead into the repository, and formulas need no script."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """``../pyproject.toml`` leads out of docs/, which is the site's root."""
    return re.sub(r"\]\(\.\./", f"]({config['repo_url']}/blob/main/", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves."""
    display = {"span": "inline", "div": "block"}
    return re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
        lambda found: convert(html.unescape(found[2]), display=display[found[1]]),
        content,
        flags=re.DOTALL,
    )
