"""JSON, and JSON Lines files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seergate.errors import SeergateError

LINES = (".jsonl", ".ndjson")
"""Suffixes of JSON Lines files."""


def read_json_text(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse JSON; a `ValueError` for every text that Python does not read, even one nested too deeply. If ``unique``,
    also for an object with the same key twice, of which Python would take the last.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given again")
    return values


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values in a JSON Lines file, each with the number of its line, counted from 1. Empty lines are left out.

    The file is in UTF-8 and may begin with a byte order mark. Only line feeds, with or without carriage returns, end a
    line: JSON texts may contain U+2028, U+2029 and U+0085, at which `str.splitlines` would break.

    Raises:
        SeergateError: if the file cannot be read, is not UTF-8, or has a line that is not JSON, which is named.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        value = read_json_text(line)
                    except ValueError as error:
                        raise SeergateError(f"{path}, line {number} is not JSON: {error}") from error
                    yield number, value
    except UnicodeDecodeError as error:
        raise SeergateError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise SeergateError(f"{path} cannot be read: {error}") from error
