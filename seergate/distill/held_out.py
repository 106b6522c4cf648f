"""Divides texts into training rows and held-out texts, for `seergate tune`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seergate.distill.config import TrainConfig
from seergate.distill.data import parsed
from seergate.distill.formatting import Formatter, MalformedRow
from seergate.distill.long_text import SUFFIXES, referring_back, texts, texts_here, windows
from seergate.distill.sources import json_rows
from seergate.errors import SeergateError
from seergate.json_file import LINES
from seergate.progress import working

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST, MOST = 8, 200
"""Minimum and maximum number of held-out texts; between these limits, a tenth of all texts is held out."""

ROWS = 2000
"""Maximum number of texts that are read."""

FILLED = 0.8
"""Share of a pack that a window fills on average; the rest is for added facts and for code, which has more tokens."""


class Divided(NamedTuple):
    """Training rows in the format of `seergate train`, held-out texts, and the error messages of malformed rows."""

    rows: list[dict[str, Any]]
    held_out: list[str]
    malformed: list[str]


@working("reading the texts")
def divide(data: str | None, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, length: int) -> Divided:
    """Read texts and divide them into training rows and held-out texts.

    Args:
        data: a ``.jsonl`` file of rows; or a text file or a directory of text files, of which windows are made that
            refer back (`long_text`). By default, the files that `texts_here` finds.
        config: configuration of the training run; windows are about as long as its packs.
        length: minimum number of tokens of a held-out text.
    """
    if data is not None and Path(data).suffix in LINES:
        rows, every, malformed = _rows(Path(data), Formatter(tokenizer, config.data_column, config.chat_template))
        held_out = _held_out(every, tokenizer, length, data, malformed)
        return Divided(
            [row for i, row in enumerate(rows) if i not in held_out], [every[i] for i in sorted(held_out)], malformed
        )
    rng = random.Random(0)
    every = _windows(data, config.max_length, tokenizer, rng)
    held_out = _held_out(every, tokenizer, length, data or "the documentation and Python library of this machine")
    questions = referring_back([text for i, text in enumerate(every) if i not in held_out], rng)
    return Divided([{"text": text} for text in questions], [every[i] for i in sorted(held_out)], [])


def _rows(path: Path, formatter: Formatter) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return the rows of a file with different texts, the text of each, and the error messages of malformed rows."""
    rows, malformed = dict[str, dict[str, Any]](), list[str]()
    try:
        for number, stored in enumerate(islice(json_rows(path), ROWS), 1):
            try:
                row = parsed(stored)
                rows.setdefault(formatter.text(row).text, row)
            except MalformedRow as error:
                malformed.append(f"row {number}: {error}")
    except OSError as error:
        raise SeergateError(f"data is {str(path)!r}, which cannot be read: {error}") from error
    return list(rows.values()), list(rows), malformed


def _windows(data: str | None, context: int, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> list[str]:
    """Return windows of texts in random order; with added facts, they fit on average in ``context`` tokens."""
    every = list(texts(texts_here() if data is None else [Path(data)]))
    sample = "".join(text[len(text) // 2 :][:10_000] for text in rng.sample(every, min(50, len(every))))
    if not sample.strip():
        raise SeergateError(f"data is {data!r}, in which there is no text; files may be {', '.join(SUFFIXES)}")
    size = int(FILLED * context * len(sample) / len(_ids(tokenizer, sample)))
    parts = list(dict.fromkeys(part for text in every for part in windows(text, size)))
    rng.shuffle(parts)
    return parts[:ROWS]


def _held_out(
    every: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, source: str, malformed: Sequence[str] = ()
) -> set[int]:
    """Return the numbers of the held-out texts: texts of at least ``length`` tokens, evenly spread."""
    long = [number for number, text in enumerate(every) if len(_ids(tokenizer, text)) >= length]
    if len(every) < 2 * LEAST or len(long) < LEAST:
        left_out = f"; {len(malformed)} rows are left out ({malformed[0]})" if malformed else ""
        raise SeergateError(
            f"{source}: {len(every)} texts, {len(long)} of them of {length:,} tokens or more; there must be at least "
            f"{2 * LEAST}, and {LEAST} of that length to evaluate on; give more --data, or a smaller --max-length"
            f"{left_out}"
        )
    count = min(MOST, len(long), max(LEAST, len(every) // 10))
    return {long[i * len(long) // count] for i in range(count)}


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
