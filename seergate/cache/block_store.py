"""`BlockStore`: the block table of a paged cache, without tensors.

A block, or page, is allocated empty, filled by its one user, and sealed when it is full. A sealed block is read-only
until it is freed, so several users may share it: forks of a row (beam search), and later blocks of a row with similar
contents (ReasonCache). It is freed when its last user releases it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from seergate.errors import SeergateError

Copies = list[tuple[int, int]]
"""Pairs (from, to) of physical blocks to copy, all at once and before anything is written."""

GROWTH_BLOCKS, GROWTH_SHARE = 16, 1 / 8
"""A store grows by this many blocks or by this share of its blocks, whichever is larger, up to its limit."""


class OutOfBlocks(SeergateError, MemoryError):
    """A paged cache has reached its limit. Also a `MemoryError`, for callers that retry when memory runs out."""


@dataclass
class Row:
    """One sequence.

    Attributes:
        table: the physical block of each logical block.
        sealed: number of first blocks that are known to be sealed.
        repeats: number of table entries whose block occurs earlier in the table.
        reasoning: what a method that shares blocks knows of the row, if anything.
    """

    table: list[int]
    length: int = 0
    sealed: int = 0
    repeats: int = 0
    reasoning: Any = None


class BlockStore:
    """Block table of a paged cache: the physical block, or page, of each row's tokens. There may be up to ``limit``
    blocks.

    Attributes:
        rows: the rows, in the order of the batch.
        references: per physical block, the number of table entries that refer to it.
        sealed: per physical block, whether it is read-only.
        stale: indices of rows whose tables have changed since the copy on the device was updated.
    """

    def __init__(self, block_size: int, limit: int | None = None) -> None:
        self.block_size, self.limit = block_size, limit
        self.references: list[int] = []
        self.sealed: list[bool] = []
        self.rows: list[Row] = []
        self.stale: set[int] = set()
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        """Physical blocks that exist, free ones included."""
        return len(self.references)

    @property
    def physical(self) -> int:
        """Physical blocks in use."""
        return len(self.references) - len(self._free)

    @property
    def logical(self) -> int:
        """Blocks that the rows would take if none were shared."""
        return sum(len(row.table) for row in self.rows)

    def blocks_of(self, tokens: int) -> int:
        """Number of blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    def add_rows(self, number: int) -> None:
        """Append empty rows."""
        self.stale.update(range(len(self.rows), len(self.rows) + number))
        self.rows += [Row([]) for _ in range(number)]

    def extend(self, counts: Sequence[int]) -> Copies:
        """Make room for ``counts[b]`` new tokens of row b; return the copies to make. A row's last block is replaced
        by a copy if it is partly filled and sealed or shared. Raises `OutOfBlocks` at the limit, before any change.
        """
        opens = [bool(n) and self._closed(row) for row, n in zip(self.rows, counts, strict=True)]
        needed = sum(self.blocks_of(row.length + n) - len(row.table) for row, n in zip(self.rows, counts, strict=True))
        # If all users of a block replace it, the last copy takes the freed block.
        leaving = Counter(row.table[-1] for row, reopened in zip(self.rows, opens, strict=True) if reopened)
        needed += sum(n - (n == self.references[block]) for block, n in leaving.items())
        self._reserve(needed)
        copies: Copies = []
        for position, (row, n, reopened) in enumerate(zip(self.rows, counts, opens, strict=True)):
            if reopened:
                old = row.table[-1]
                self._release(old)
                row.table[-1] = self._allocate()
                copies.append((old, row.table[-1]))
            missing = self.blocks_of(row.length + n) - len(row.table)
            row.table += [self._allocate() for _ in range(missing)]
            row.length += n
            if reopened or missing:
                self.stale.add(position)
            if reopened and row.repeats:  # the open block may have been a repeat before a crop
                row.repeats = len(row.table) - len(set(row.table))
        return copies

    def seal(self) -> None:
        """Seal every full block; the tokens that `extend` made room for must have been written."""
        for row in self.rows:
            for block in range(row.sealed, row.length // self.block_size):
                self.sealed[row.table[block]] = True
            row.sealed = row.length // self.block_size

    def crop(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[b]`` tokens of row b."""
        self.seal()  # a full block stays as it is, even if a row now uses only part of it
        for position, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            if not 0 <= length <= row.length:
                raise SeergateError(f"a row of {row.length} tokens cannot be cropped to {length}")
            kept = self.blocks_of(length)
            for block in row.table[kept:]:
                self._release(block)
            if kept < len(row.table):
                row.table = row.table[:kept]
                row.repeats = kept - len(set(row.table))
                self.stale.add(position)
            row.length, row.sealed = length, length // self.block_size

    def select(self, index: Sequence[int]) -> None:
        """Keep the rows ``index``, in that order; a repeated row becomes a fork, which shares all blocks."""
        rows = [replace(self.rows[position], table=list(self.rows[position].table)) for position in index]
        for row in rows:
            for block in row.table:
                self.references[block] += 1
        for row in self.rows:
            for block in row.table:
                self._release(block)
        self.rows = rows
        self.stale = set(range(len(rows)))

    def clear(self) -> None:
        """Drop all rows."""
        self.select([])

    def adopt(self, other: BlockStore) -> Copies:
        """Append another store's rows; blocks that they share stay shared. Return the copies to make, from the other
        store's blocks to this one's. Raises `OutOfBlocks` at the limit, before any change.
        """
        other.seal()
        self._reserve(other.physical)
        homes: dict[int, int] = {}
        for row in other.rows:
            for block in row.table:
                if block not in homes:
                    homes[block] = self._allocate()
                    self.references[homes[block]], self.sealed[homes[block]] = 0, other.sealed[block]
                self.references[homes[block]] += 1
            self.stale.add(len(self.rows))
            self.rows.append(replace(row, table=[homes[block] for block in row.table]))
        return list(homes.items())

    def remap(self, position: int, newer: int, older: int) -> None:
        """Map a row's logical block ``newer`` to the physical one of its block ``older``, without moving data. Both
        must be sealed.
        """
        row = self.rows[position]
        old, physical = row.table[newer], row.table[older]
        for what, number in (("replaced", old), ("shared", physical)):
            if not self.sealed[number]:
                raise SeergateError(f"physical block {number} is to be {what} and is not full; only full ones may be")
        if old == physical:
            return
        self.references[physical] += 1
        row.table[newer] = physical
        self._release(old)
        row.repeats = len(row.table) - len(set(row.table))
        self.stale.add(position)

    def _closed(self, row: Row) -> bool:
        """True if a row's next token belongs to a sealed or shared block."""
        if row.length % self.block_size == 0:
            return False
        last = row.table[-1]
        return self.sealed[last] or self.references[last] > 1

    def _reserve(self, number: int) -> None:
        missing = number - len(self._free)
        if missing <= 0:
            return
        grown = max(missing, GROWTH_BLOCKS, int(self.capacity * GROWTH_SHARE))
        if self.limit is not None:
            grown = min(grown, self.limit - self.capacity)
            if grown < missing:
                raise OutOfBlocks(
                    f"{number} more blocks of {self.block_size} tokens are needed and {len(self._free) + grown} of "
                    f"the {self.limit} that the paged cache may have are left; decode fewer rows at a time or allow "
                    "more (max_blocks)"
                )
        first = self.capacity
        self._free = [*range(first + grown - 1, first - 1, -1), *self._free]
        self.references += [0] * grown
        self.sealed += [False] * grown

    def _allocate(self) -> int:
        block = self._free.pop()
        self.references[block], self.sealed[block] = 1, False
        return block

    def _release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            self.sealed[block] = False
            self._free.append(block)
