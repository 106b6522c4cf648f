"""BlockStore: which physical block of a paged cache holds which tokens of which row. Bookkeeping only, no tensors.

A block is allocated empty, filled by its one user, and sealed when it is full. A sealed block is never written again
until it has been freed, so it may have several users: forks of a row (beam search), rows with the same prompt, and
later blocks of the same row whose contents are alike (ReasonCache). It is freed when its last user lets go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from seergate.errors import SeergateError

Copies = list[tuple[int, int]]
"""Physical blocks to be copied, (from, to), all at once and before anything is written."""

GROWTH_BLOCKS, GROWTH_SHARE = 16, 1 / 8
"""A store without a limit grows by whichever is larger, this many blocks or this share of those it has."""


class OutOfBlocks(SeergateError, MemoryError):
    """A paged cache has reached its limit. A `MemoryError` too: what backs off when memory runs out backs off here."""


@dataclass
class Row:
    """One sequence.

    Attributes:
        uid: its name for life; a fork gets one of its own.
        table: the physical block of each logical one.
        length: tokens.
        sealed: how many of its first blocks are known to be sealed.
        repeats: how many entries of the table name a block that an earlier entry names too.
    """

    uid: int
    table: list[int]
    length: int = 0
    sealed: int = 0
    repeats: int = 0


class BlockStore:
    """See the module's docstring.

    Args:
        block_size: tokens per block.
        limit: how many blocks there may be; ``None`` for as many as are asked for.
        numbers: where serial numbers of blocks and rows come from; stores whose rows may meet share one.

    Attributes:
        rows: in the order of the batch.
        references: per physical block, how many table entries name it.
        sealed: per physical block, whether it must not be written any more.
        serials: per physical block, the number of its present allocation: it tells a block from what it held before.
        stale: positions of rows whose tables have changed since whoever mirrors them emptied this set.
    """

    def __init__(self, block_size: int, limit: int | None = None, numbers: Iterator[int] | None = None) -> None:
        for name, value in (("block_size", block_size), ("limit", limit)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise SeergateError(f"{name} of a paged cache is {value!r}; it must be a positive number")
        self.block_size, self.limit = block_size, limit
        self.numbers = count() if numbers is None else numbers
        self.references: list[int] = []
        self.sealed: list[bool] = []
        self.serials: list[int] = []
        self.rows: list[Row] = []
        self.stale: set[int] = set()
        self._free: list[int] = []

    # --------------------------------------------------------------------------------------------------- counting

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
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def available(self) -> int | None:
        """Blocks that can still be handed out; ``None`` for no limit."""
        return None if self.limit is None else self.limit - self.physical

    # ------------------------------------------------------------------------------------------------- rows and tokens

    def add_rows(self, number: int) -> None:
        """Put empty rows at the end."""
        self.stale.update(range(len(self.rows), len(self.rows) + number))
        self.rows += [Row(next(self.numbers), []) for _ in range(number)]

    def extend(self, counts: Sequence[int]) -> Copies:
        """Make room for new tokens in every row. A row's last block, if it is not full and may not be written, is
        replaced by a copy.

        Args:
            counts: new tokens per row.

        Raises:
            OutOfBlocks: and then nothing has changed.
        """
        opens = [bool(n) and self._closed(row) for row, n in zip(self.rows, counts, strict=True)]
        needed = sum(self.blocks_of(row.length + n) - len(row.table) for row, n in zip(self.rows, counts, strict=True))
        leaving: dict[int, int] = {}  # of a block whose users all leave it, the last one's copy takes its place
        for row, reopened in zip(self.rows, opens, strict=True):
            if reopened:
                block = row.table[-1]
                leaving[block] = leaving.get(block, 0) + 1
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
            if reopened and row.repeats:  # what is open now may have been a repeat before a crop
                row.repeats = len(row.table) - len(set(row.table))
        return copies

    def seal(self) -> None:
        """Seal every block that is full by now: what `extend` made room for has been written."""
        for row in self.rows:
            for block in range(row.sealed, row.length // self.block_size):
                self.sealed[row.table[block]] = True
            row.sealed = row.length // self.block_size

    def crop(self, lengths: Sequence[int]) -> None:
        """Keep the first tokens of each row."""
        self.seal()  # what is full stays as it is, even if a row now uses only part of it
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

    def select(self, index: Sequence[int]) -> dict[int, int]:
        """Take these rows, in this order; a row that comes again is a fork, which shares all of its blocks.

        Returns:
            uid of every fork -> uid of the row it was taken from.
        """
        forks: dict[int, int] = {}
        taken: set[int] = set()
        rows = []
        for position in index:
            row = self.rows[position]
            fork = Row(row.uid, list(row.table), row.length, row.sealed, row.repeats)
            if position in taken:
                fork.uid = next(self.numbers)
                forks[fork.uid] = row.uid
            taken.add(position)
            for block in row.table:
                self.references[block] += 1
            rows.append(fork)
        for row in self.rows:
            for block in row.table:
                self._release(block)
        self.rows = rows
        self.stale = set(range(len(rows)))
        return forks

    def clear(self) -> None:
        """Let go of all rows."""
        self.select([])

    def adopt(self, other: BlockStore) -> Copies:
        """Put another store's rows after this one's; blocks that they share stay shared.

        Returns:
            What must be copied, from the other store's blocks to this one's.

        Raises:
            OutOfBlocks: and then nothing has changed.
        """
        self._reserve(other.physical)
        homes: dict[int, int] = {}
        for row in other.rows:
            for block in row.table:
                if block not in homes:
                    homes[block] = self._allocate()
                    self.references[homes[block]], self.sealed[homes[block]] = 0, other.sealed[block]
                self.references[homes[block]] += 1
            moved = Row(row.uid, [homes[block] for block in row.table], row.length, row.sealed, row.repeats)
            self.stale.add(len(self.rows))
            self.rows.append(moved)
        return list(homes.items())

    # -------------------------------------------------------------------------------------------------------- sharing

    def remap(self, position: int, block: int, physical: int) -> None:
        """Let a row's logical block be another physical one; no data moves.

        Raises:
            SeergateError: if one of the two is not sealed.
        """
        row = self.rows[position]
        old = row.table[block]
        for what, number in (("replaced", old), ("shared", physical)):
            if not self.sealed[number]:
                raise SeergateError(f"physical block {number} is to be {what} and is not full; only full ones may be")
        if old == physical:
            return
        self.references[physical] += 1
        row.table[block] = physical
        self._release(old)
        row.repeats = len(row.table) - len(set(row.table))
        self.stale.add(position)

    # ------------------------------------------------------------------------------------------------- physical blocks

    def _closed(self, row: Row) -> bool:
        """Whether a row's next token falls into a block that it may not write."""
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
        self.serials += [-1] * grown

    def _allocate(self) -> int:
        block = self._free.pop()
        self.references[block], self.sealed[block], self.serials[block] = 1, False, next(self.numbers)
        return block

    def _release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            self.sealed[block] = False
            self._free.append(block)
