"""Packing: every sample exactly once, nothing overflows, the same everywhere, full, with little work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seergate.distill.packing import pack, packed, packs_of_step


def best_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """The number of packs of the textbook algorithm, by search over all packs."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=rooms.__getitem__)] -= length
        else:
            rooms.append(capacity - length)
    return len(rooms)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 300), st.data())
def test_is_best_fit_decreasing(capacity: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=80))
    packs = pack(lengths, capacity)
    assert sorted(i for samples in packs for i in samples) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in samples) <= capacity for samples in packs)
    assert len(packs) == best_fit_decreasing(lengths, capacity)
    assert packs == pack(np.array(lengths, dtype=np.int32), capacity)


@pytest.mark.parametrize("lengths", [[5, 0, 3], [5, 11, 3], [5, -1]])
def test_a_sample_that_cannot_fit_is_named(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] is -?\d+; it must be in 1\.\.10"):
        pack(lengths, 10)


def test_a_large_realistic_dataset_packs_full() -> None:
    """Median 5.5k tokens, one sample in twenty above 17k. With a search over all packs it would not end in time."""
    drawn = np.random.default_rng(0).lognormal(np.log(5500), 0.7, 220_000)
    lengths = np.clip(drawn, 200, 32768).astype(int)
    assert sum(lengths) >= 0.99 * 32768 * len(pack(lengths, 32768))


def test_order_visits_every_pack_once_per_epoch_whatever_the_batch() -> None:
    visits = packs_of_step(10, 3, step=0, packs_per_step=30)
    assert all(sorted(visits[e : e + 10]) == list(range(10)) for e in (0, 10, 20))
    assert visits[:10] != visits[10:20]
    assert packs_of_step(10, 4, 0, 10) != visits[:10]
    for size in (1, 4, 10, 13):
        for step in range(30 // size):
            assert packs_of_step(10, 3, step, size) == visits[size * step :][:size]


def test_a_pack_keeps_samples_apart() -> None:
    ids, cu_seqlens = packed([np.array([5, 6, 7], np.int32), np.array([8], np.int32)])
    assert ids.tolist() == [[5, 6, 7, 8]] and str(ids.dtype) == "torch.int64"
    assert cu_seqlens.tolist() == [0, 3, 4] and str(cu_seqlens.dtype) == "torch.int32"
