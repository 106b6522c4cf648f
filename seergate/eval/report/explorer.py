"""An HTML page that shows which blocks were read for each generated token, and which dense attention attends to.

The page is one self-contained file. For each decode step it stores three bytes per block, layer and KV head: whether
the block was read, and the square roots of its shares of the method's scores (after softmax) and of dense attention.
"""

from __future__ import annotations

import base64
import html
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seergate.decode.trace import read_trace
from seergate.durable import naming
from seergate.errors import SeergateError, sentence
from seergate.escaping import visible, with_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = Path(__file__).with_suffix(".html")


@dataclass(frozen=True)
class Page:
    """A written page, which a notebook shows inline."""

    path: Path

    def _repr_html_(self) -> str:
        text = html.escape(self.path.read_text(encoding="utf-8"))
        size = "width: 100%; height: 46rem; border: 0"
        return f'<iframe srcdoc="{text}" sandbox="allow-scripts" style="{size}"></iframe>'


def write_explorer(
    trace: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    out: str | os.PathLike[str],
    row: int = 0,
) -> Page:
    """Write the page of one row of a batch to ``out``.

    Args:
        trace: the file that ``Handle.traced(path, attention=True)`` wrote during one ``generate``.
        tokens: token ids of prompt and answer, without padding.

    Raises:
        SeergateError: if the trace cannot be read or holds no attention of this row, or the page cannot be written.
    """
    data = page_data(trace, row)
    data = {name: visible(value) if isinstance(value, str) else value for name, value in data.items()}
    data["tokens"] = [visible(piece, "\n\t") for piece in pieces(tokenizer, tokens)]
    data["steps"] = [data["steps"].get(i) for i in range(len(tokens))]
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # as in HTML, `</script>` would end the data
    page = with_policy(TEMPLATE.read_text(encoding="utf-8")).replace("{{data}}", text)
    try:
        with naming(Path(out)):
            Path(out).write_text(page, encoding="utf-8")
    except OSError as error:
        raise SeergateError(f"the page {Path(out)} cannot be written: {sentence(error)}") from error
    return Page(Path(out))


def page_data(trace: str | os.PathLike[str], row: int = 0) -> dict[str, Any]:
    """The data of one row of a trace, in the page's format.

    Returns:
        ``prompt``: number of prompt tokens. ``cells``: (layer, KV head) of each row of the arrays. ``scored``: whether
        each cell has scores. ``steps``: index of a generated token -> three uint8 arrays ``[cells, blocks]`` of its
        decode step, compressed by zlib and in base64. The trace's metadata.

    Raises:
        SeergateError: if the trace holds no attention of this row.
    """
    import pyarrow.parquet as pq

    columns, about = read_trace(trace)
    lists = pq.read_table(os.fspath(trace), columns=["blocks", "scores", "attention"])
    blocks, scores, attention = (lists[name].combine_chunks() for name in lists.column_names)
    # Rejected draft tokens have steps too; only the last step at a position counts.
    order = np.lexsort([columns[name] for name in ("step", "head", "layer", "position")])
    order = order[columns["row"][order] == row]
    key = np.stack([columns[name][order] for name in ("position", "layer", "head")])
    last = np.append((key[:, 1:] != key[:, :-1]).any(0), True)[: len(order)]
    order = order[last]
    if not len(order) or attention.is_valid().take(order).false_count:
        raise SeergateError(f"the trace {Path(trace)} has no attention of row {row}; write it with attention=True")
    positions, first = np.unique(columns["position"][order], return_index=True)
    cells = order[: first[1] if len(first) > 1 else None]
    size, steps = about["block_size"], dict[int, str]()
    for position, lines in zip(positions.tolist(), np.split(order, first[1:]), strict=True):
        planes = np.zeros((3, len(lines), position // size + 1), np.uint8)
        for cell, line in enumerate(lines.tolist()):
            read, score = blocks[line], scores[line]
            planes[0, cell, read.values.to_numpy() if read.is_valid else slice(None)] = 1
            if score.is_valid:
                planes[1, cell, :-1] = _byte(_softmax(score.values.to_numpy()))
            planes[2, cell, :-1] = _byte(attention[line].values.to_numpy())
        steps[position + 1] = base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()
    return {
        **about,
        "prompt": int(positions[0]),
        "cells": [[int(columns["layer"][line]), int(columns["head"][line])] for line in cells],
        "scored": [scores[line].is_valid for line in cells.tolist()],
        "steps": steps,
    }


def _softmax(scores: np.ndarray) -> np.ndarray:
    shares = np.exp(scores - scores.max(initial=-np.inf))
    return shares / shares.sum()


def _byte(shares: np.ndarray) -> np.ndarray:
    """The square roots of shares as bytes, so that small shares keep some precision."""
    return np.rint(255 * np.sqrt(shares)).astype(np.uint8)


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; the last of the tokens that form one character gets the character."""
    parts, decoded, window, group = list[str](), "", 0, 0
    for i in range(len(tokens)):
        text = tokenizer.decode(tokens[window : i + 1])
        whole = not text.endswith("\ufffd") or i == len(tokens) - 1
        parts.append(text[len(decoded) :] if whole else "")
        if whole:  # the next token is decoded after this one, which shows whether a space separates them
            decoded, window, group = tokenizer.decode(tokens[group : i + 1]), group, i + 1
    return parts
