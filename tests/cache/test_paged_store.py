"""The block store against a model that keeps every row's contents: random operations, and each by hand."""

import copy
import itertools
from collections import Counter

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seergate import Paging, SeergateError
from seergate.cache.block_store import BlockStore, OutOfBlocks
from seergate.methods import Dense, Gate
from seergate.methods.selecting import page_tokens
from tests.decode.test_decode import gates
from tests.support.models import tiny_model
from tests.support.running import invalid, refused

SIZE = 3
INDEX = strategies.integers(0, 2**16)


class NumberedStore(BlockStore):
    """A store that numbers the allocations of each block."""

    def __init__(self) -> None:
        super().__init__(SIZE, limit=60)
        self.serials: Counter[int] = Counter()

    def _allocate(self) -> int:
        block = super()._allocate()
        self.serials[block] += 1
        return block


class Contents(RuleBasedStateMachine):
    """Rows of numbered tokens beside the store; ``written[block]`` is what a layer's tensor would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.store = itertools.count(1), NumberedStore()
        self.written: dict[int, list[int]] = {}
        self.rows: list[list[int]] = []
        self.kept: dict[tuple[int, int], list[int]] = {}  # (block, serial) -> contents when it was sealed

    def write(self, counts: list[int]) -> None:
        """What a layer does with new tokens."""
        starts = [row.length for row in self.store.rows]
        copies = self.store.extend(counts)
        before = {old: list(self.written[old]) for old, _ in copies}
        for old, new in copies:
            self.written[new] = list(before[old])
        for row, expected, start, count in zip(self.store.rows, self.rows, starts, counts, strict=True):
            for place in range(start, start + count):
                block = row.table[place // SIZE]
                assert not self.store.sealed[block] and self.store.references[block] == 1, "written to after sealing"
                contents = self.written.setdefault(block, [0] * SIZE)
                contents[place % SIZE] = next(self.token)
                expected.append(contents[place % SIZE])

    def seal(self) -> None:
        self.store.seal()
        for block, sealed in enumerate(self.store.sealed):
            if sealed:
                self.kept.setdefault((block, self.store.serials[block]), list(self.written[block]))

    @rule(number=strategies.integers(1, 3))
    def allocate(self, number: int) -> None:
        if len(self.rows) < 8:
            self.store.add_rows(number)
            self.rows += [[] for _ in range(number)]

    @precondition(lambda self: self.rows)
    @rule(counts=strategies.lists(strategies.integers(0, 7), min_size=11, max_size=11))
    def append(self, counts: list[int]) -> None:
        before = copy.deepcopy((self.store.rows, self.store.references))
        try:
            self.write(counts[: len(self.rows)])
        except OutOfBlocks:
            assert (self.store.rows, self.store.references) == before, "a refusal changes nothing"

    @precondition(lambda self: self.rows)
    @rule()
    def seal_full(self) -> None:
        self.seal()

    @precondition(lambda self: self.rows)
    @rule(row=INDEX, newer=INDEX, older=INDEX)
    def share(self, row: int, newer: int, older: int) -> None:
        self.seal()
        position = row % len(self.rows)
        full = self.store.rows[position].length // SIZE
        if full >= 2:
            newer, older = newer % full, older % full
            before, physical = self.store.physical, self.store.rows[position].table[older]
            self.store.remap(position, newer, older)
            assert self.store.physical <= before, "sharing never takes a block"
            self.rows[position][newer * SIZE : (newer + 1) * SIZE] = self.written[physical]

    @precondition(lambda self: self.rows)
    @rule(order=strategies.lists(INDEX, max_size=8))
    def fork_free_reorder(self, order: list[int]) -> None:
        index = [i % len(self.rows) for i in order]
        self.store.select(index)
        self.rows = [list(self.rows[i]) for i in index]

    @precondition(lambda self: self.rows)
    @rule(kept=strategies.lists(INDEX, min_size=11, max_size=11))
    def crop(self, kept: list[int]) -> None:
        lengths = [k % (len(row) + 1) for k, row in zip(kept, self.rows, strict=False)]
        self.store.crop(lengths)
        self.seal()
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]

    @precondition(lambda self: 0 < len(self.rows) < 8)
    @rule(counts=strategies.lists(strategies.integers(0, 7), min_size=2, max_size=2))
    def adopt(self, counts: list[int]) -> None:
        other = Contents()
        other.token = self.token
        other.store.add_rows(2)
        other.rows = [[], []]
        other.write(counts)
        other.store.seal()
        try:
            copies = self.store.adopt(other.store)
        except OutOfBlocks:
            return
        for theirs, ours in copies:
            self.written[ours] = list(other.written[theirs])
        self.rows += other.rows

    @invariant()
    def references_are_conserved(self) -> None:
        used = Counter(block for row in self.store.rows for block in row.table)
        assert self.store.references == [used[block] for block in range(self.store.capacity)]
        assert self.store.logical == sum(used.values()) and self.store.physical == len(used)
        assert sorted(self.store._free) == [block for block in range(self.store.capacity) if not used[block]]
        assert self.store.capacity <= 60
        assert all(row.repeats == len(row.table) - len(set(row.table)) for row in self.store.rows)

    @invariant()
    def rows_are_what_was_written(self) -> None:
        for row, expected in zip(self.store.rows, self.rows, strict=True):
            assert row.length == len(expected) and len(row.table) == -(-row.length // SIZE)
            stored = [token for block in row.table for token in self.written[block]]
            assert stored[: row.length] == expected

    @invariant()
    def sealed_blocks_never_change(self) -> None:
        for (block, serial), contents in self.kept.items():
            if self.store.serials[block] == serial and self.store.references[block]:
                assert self.store.sealed[block] and self.written[block] == contents


TestContents = Contents.TestCase
TestContents.settings = settings(max_examples=10, stateful_step_count=50, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(600)
class TestContentsForLong(Contents.TestCase):
    settings = settings(max_examples=50, stateful_step_count=200, deadline=None)


def test_sharing_a_prefix_and_parting_ways():
    """Two rows from one: full blocks stay shared, the open one is copied for the first that writes."""
    store = BlockStore(4)
    store.add_rows(1)
    assert store.extend([6]) == []
    store.select([0, 0])
    assert (store.logical, store.physical) == (4, 2)
    first, second = store.rows[0].table
    copies = store.extend([1, 1])
    assert len(copies) == 2 and store.physical == 3
    assert {copy[0] for copy in copies} == {second}, "one of the two copies is of the block to itself"
    assert store.rows[0].table[0] == store.rows[1].table[0] == first
    assert len({store.rows[0].table[1], store.rows[1].table[1]}) == 2


def test_refusals():
    store = BlockStore(4, limit=3)
    store.add_rows(2)
    store.extend([4, 5])
    with pytest.raises(OutOfBlocks, match=r"1 more blocks of 4 tokens are needed and 0 of the 3"):
        store.extend([1, 0])
    assert issubclass(OutOfBlocks, MemoryError) and issubclass(OutOfBlocks, SeergateError)
    store.extend([0, 3])
    refused("is to be replaced and is not full", store.remap, 1, 1, 0)
    refused("a row of 8 tokens cannot be cropped to 9", store.crop, [4, 9])
    for option in ("block_size", "max_blocks"):
        for wrong in (0, -1, 2.5, True):
            invalid(f"{option} is {wrong}; it must be a whole number, 1 or greater", Paging, **{option: wrong})


def test_pages_hold_whole_blocks_of_the_method():
    gate = Gate(bank=gates(tiny_model("qwen3")), token_budget=64)
    assert page_tokens(gate, None) == 8 and page_tokens(gate, 24) == 24 and page_tokens(Dense(), None) == 16
    refused("pages of 12 tokens would cut the blocks of 8 that 'gate' selects", page_tokens, gate, 12)
