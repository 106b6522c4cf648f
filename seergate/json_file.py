"""JSON, and JSON Lines files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seergate.errors import SeergateError


def read_json_text(text: str | bytes) -> Any:
    """Parse JSON; a `json.JSONDecodeError` for every text that Python does not read, even one nested too deeply."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of thousands of digits, thousands of brackets
        raise json.JSONDecodeError(str(error), "", 0) from error


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
