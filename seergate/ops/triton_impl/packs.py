"""Partition of a pack for the distillation kernels: chunks of rows that share a buffer, and their tiles.

All of it is computed on the host from the segments' borders, so nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seergate.ops.checks import check_cu_seqlens
from seergate.ops.host_memory import copied

FIELDS = 6
"""Numbers per tile: first row (in the pack), end of the piece it belongs to, start of its candidate blocks, the first
block's entry of kg, row in the chunk's buffer, first column (0 but for tiles of columns)."""

MIN_ROWS = 512
"""Rows of a chunk at very long contexts, where the buffer then grows: fewer would leave the device idle.

With 8 KV heads and tiles of 32 rows, these make 128 programs.
"""

WIDTH_MULTIPLE = 16
"""Rows of a buffer begin at multiples of so many elements, so that they can be read in wide words."""


class Piece(NamedTuple):
    """Rows of one segment at equal distances. Attributes: where its candidate blocks start, the first one's entry of
    kg, the rows (all in the pack), the weight of a row in the loss.

    Blocks that are left out of the distributions, the segment's first ones, lie before ``start``.
    """

    start: int
    block: int
    rows: range
    weight: float

    def candidates(self, block_size: int) -> int:
        """Number of candidate blocks strictly before the last row's own."""
        return (self.rows[-1] - self.start) // block_size


class Chunk(NamedTuple):
    """Pieces that are worked on together. Attributes: the pieces, their rows in total, blocks of a buffer row."""

    pieces: list[Piece]
    rows: int
    width: int


class Tiles(NamedTuple):
    """Tiles on the device: ``table`` int64 ``[n, FIELDS]``; ``weights`` fp32 ``[n]``."""

    table: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.table)


def segments(cu_seqlens: Tensor, tokens: int) -> list[tuple[int, int]]:
    """Start and end of every segment. Waits for the device if ``cu_seqlens`` lies on one.

    Raises:
        ValueError: if these are not the borders of ``tokens`` tokens; while a graph was traced nobody could check.
    """
    borders = cu_seqlens.cpu()
    check_cu_seqlens(borders, tokens)
    return list(pairwise(borders.tolist()))


def whole_segments(spans: Sequence[tuple[int, int]]) -> list[Piece]:
    """One piece per segment that is not empty, with all its rows."""
    return [Piece(start, 0, range(start, end), 1.0) for start, end in spans if start < end]


def segment_pieces(
    spans: Sequence[tuple[int, int]],
    counted: Sequence[range],
    block_size: int,
    weights: Sequence[float],
    sink_blocks: int = 0,
) -> list[Piece]:
    """One piece per segment that has `counted_rows`, which lie beyond its first ``1 + sink_blocks`` blocks."""
    pieces, block = [], 0
    for (start, end), rows, weight in zip(spans, counted, weights, strict=True):
        if rows:
            moved = range(start + rows.start, start + rows.stop, rows.step)
            pieces.append(Piece(start + sink_blocks * block_size, block + sink_blocks, moved, weight))
        block += -(-(end - start) // block_size)
    return pieces


def chunks(pieces: Sequence[Piece], block_size: int, area: int) -> list[Chunk]:
    """Cut pieces, and put small ones together, so that rows x width stays within ``area`` (but see `MIN_ROWS`).

    A segment occurs at most once in a chunk.
    """
    done: list[Chunk] = []
    for piece in pieces:
        left = piece.rows
        while left:
            width = _rounded(piece.candidates(block_size))
            many = max(area // width, MIN_ROWS)
            part, left = piece._replace(rows=left[:many]), left[many:]
            width, rows = _rounded(part.candidates(block_size)), len(part.rows)
            last = done[-1] if done else None
            if last and last.pieces[-1].start != part.start and (last.rows + rows) * max(last.width, width) <= area:
                done[-1] = Chunk([*last.pieces, part], last.rows + rows, max(last.width, width))
            else:
                done.append(Chunk([part], rows, width))
    return done


def row_tiles(pieces: Sequence[Piece], rows: int, *, packed: bool = False) -> tuple[Tensor, Tensor]:
    """Table and weights, on the host, of `Tiles` of up to ``rows`` rows, those with the longest past first.
    ``packed``: the buffer is numbered as the pack.
    """
    whole: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}  # whatever the defaults are
    real: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    tables, weights, buffer = [torch.empty(0, FIELDS, **whole)], [torch.ones(0, **real)], 0
    for piece in pieces:
        places = torch.arange(0, len(piece.rows), rows, **whole)
        table = torch.zeros(len(places), FIELDS, **whole)
        table[:, 0] = piece.rows.start + places * piece.rows.step
        table[:, 1:4] = torch.tensor([piece.rows[-1] + 1, piece.start, piece.block], **whole)
        table[:, 4] = places + (piece.rows.start if packed else buffer)
        tables.append(table)
        weights.append(torch.full((len(places),), piece.weight, **real))
        buffer += len(piece.rows)
    table, weight = torch.cat(tables), torch.cat(weights)
    longest_first = (table[:, 2] - table[:, 0]).argsort(stable=True)
    return table[longest_first], weight[longest_first]


def column_tiles(pieces: Sequence[Piece], columns: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Table and weights, on the host, of `Tiles` of up to ``columns`` candidate blocks, for sums over the rows of a
    piece.
    """
    table, weights, buffer = [], [], 0
    for piece in pieces:
        for column in range(0, piece.candidates(block_size), columns):
            table.append([piece.rows.start, piece.rows[-1] + 1, piece.start, piece.block, buffer, column])
            weights.append(piece.weight)
        buffer += len(piece.rows)
    rows = torch.tensor(table, dtype=torch.int64, device="cpu").view(-1, FIELDS)
    return rows, torch.tensor(weights, dtype=torch.float32, device="cpu")


def to_device(parts: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> list[Tiles]:
    """All tables of a call in one copy each, without waiting for it."""
    counts = [len(table) for table, _ in parts]
    tables = copied(torch.cat([table for table, _ in parts]), device).split(counts)
    weights = copied(torch.cat([weight for _, weight in parts]), device).split(counts)
    return [Tiles(*pair) for pair in zip(tables, weights, strict=True)]


def _rounded(width: int) -> int:
    return math.ceil(width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE
