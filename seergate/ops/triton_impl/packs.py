"""Partition of a pack for the distillation kernels: chunks of rows that share a buffer, and their tiles.

Everything is computed on the host from the segment borders, so nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seergate.ops.arguments import check_cu_seqlens
from seergate.ops.host_memory import copied

FIELDS = 6
"""Numbers per tile: first row (in the pack), end of its piece, start of its candidate blocks, index in kg of the first
candidate, row in the chunk's buffer, first column (0 except for `column_tiles`)."""

MIN_ROWS = 512
"""Minimum rows of a chunk; at very long contexts the buffer grows. Fewer would leave the device idle.

With 8 KV heads and tiles of 32 rows, this gives 128 programs.
"""

WIDTH_MULTIPLE = 16
"""Rows of a buffer start at multiples of this many elements, for wide loads."""


class Piece(NamedTuple):
    """Equally spaced rows of one segment. Attributes: first token of the candidate blocks, index in kg of the first
    candidate, the rows (indices in the pack), the weight of a row in the loss.

    The segment's sink blocks, which are left out of the distributions, are before ``start``.
    """

    start: int
    block: int
    rows: range
    weight: float

    def candidates(self, block_size: int) -> int:
        """Number of candidate blocks strictly before the last row's own block."""
        return (self.rows[-1] - self.start) // block_size


class Chunk(NamedTuple):
    """Pieces that are processed together. Attributes: the pieces, their total rows, blocks per buffer row."""

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
    """Start and end of every segment. Waits for the device if ``cu_seqlens`` is on one.

    Raises:
        ValueError: if these are not borders of ``tokens`` tokens, which the op cannot check while tracing.
    """
    borders = cu_seqlens.cpu()
    check_cu_seqlens(borders, tokens)
    return list(pairwise(borders.tolist()))


def whole_segments(spans: Sequence[tuple[int, int]]) -> list[Piece]:
    """One piece per non-empty segment, with all its rows."""
    return [Piece(start, 0, range(start, end), 1.0) for start, end in spans if start < end]


def segment_pieces(
    spans: Sequence[tuple[int, int]],
    counted: Sequence[range],
    block_size: int,
    weights: Sequence[float],
    sink_blocks: int = 0,
) -> list[Piece]:
    """One piece per segment with `counted_rows`; these rows come after its first ``1 + sink_blocks`` blocks."""
    pieces, block = [], 0
    for (start, end), rows, weight in zip(spans, counted, weights, strict=True):
        if rows:
            moved = range(start + rows.start, start + rows.stop, rows.step)
            pieces.append(Piece(start + sink_blocks * block_size, block + sink_blocks, moved, weight))
        block += -(-(end - start) // block_size)
    return pieces


def chunks(pieces: Sequence[Piece], block_size: int, area: int) -> list[Chunk]:
    """Split large pieces and combine small ones, so that rows x width is at most ``area`` (except for `MIN_ROWS`).

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
    """Table and weights, on the host, of `Tiles` of up to ``rows`` rows, longest past first. If ``packed``, the
    buffer's rows are those of the pack.
    """
    whole: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}  # not torch's defaults
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
    """Table and weights, on the host, of `Tiles` of up to ``columns`` blocks, for sums over the rows of a piece."""
    table, weights, buffer = [], [], 0
    for piece in pieces:
        for column in range(0, piece.candidates(block_size), columns):
            table.append([piece.rows.start, piece.rows[-1] + 1, piece.start, piece.block, buffer, column])
            weights.append(piece.weight)
        buffer += len(piece.rows)
    rows = torch.tensor(table, dtype=torch.int64, device="cpu").view(-1, FIELDS)
    return rows, torch.tensor(weights, dtype=torch.float32, device="cpu")


def to_device(parts: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> list[Tiles]:
    """Copy all tables, and all weights, to the device in one asynchronous copy each."""
    counts = [len(table) for table, _ in parts]
    tables = copied(torch.cat([table for table, _ in parts]), device).split(counts)
    weights = copied(torch.cat([weight for _, weight in parts]), device).split(counts)
    return [Tiles(*pair) for pair in zip(tables, weights, strict=True)]


def _rounded(width: int) -> int:
    return math.ceil(width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE
