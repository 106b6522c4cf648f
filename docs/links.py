"""Hook of mkdocs: what a page links to outside of docs/ is on the site a link into the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """``../pyproject.toml`` leads out of docs/, which is the site's root."""
    return re.sub(r"\]\(\.\./", f"]({config['repo_url']}/blob/main/", markdown)
