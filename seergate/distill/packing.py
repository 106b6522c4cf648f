"""Packs samples of different lengths into packs of one length, in nearly linear time and deterministically.

The algorithm is best-fit-decreasing: samples are placed in descending order of length, each in the fullest pack in
which it fits. There is a list of packs for each remaining room, and a bit mask (one big integer) of the rooms with
packs. The lowest set bit at or above the sample's length is the best room, so no search over packs is needed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Distribute samples over packs by best-fit-decreasing.

    Args:
        lengths: tokens per sample, each in ``1..capacity``; raises `ValueError` otherwise.
        capacity: tokens per pack.

    Returns:
        The sample indices of each pack. Every sample is in exactly one pack. The result depends on the arguments only.
    """
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if sizes.size and not (sizes.min() >= 1 and sizes.max() <= capacity):
        bad = int(np.flatnonzero((sizes < 1) | (sizes > capacity))[0])
        raise ValueError(f"lengths[{bad}] is {sizes[bad]}; it must be in 1..{capacity}, the capacity of a pack")
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # room -> packs with exactly this many tokens left
    rooms = 0  # bit r is set while with_room[r] is not empty
    order = np.argsort(-sizes, kind="stable")
    for index, length in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, chosen = capacity, len(packs)
            packs.append([])
        packs[chosen].append(index)
        left = room - length
        if left:
            with_room[left].append(chosen)
            rooms |= 1 << left
    return packs


def packs_of_step(packs: int, seed: int, step: int, packs_per_step: int) -> list[int]:
    """Return the numbers of the packs of an optimizer step, over all processes; steps count from 0.

    Each epoch is a new permutation of all packs, which depends on the seed and the number of the epoch only. So all
    processes compute the same order, and a resumed run finds its position without replaying earlier steps.
    """
    epoch, first = divmod(step * packs_per_step, packs)
    order: list[int] = []
    while len(order) < first + packs_per_step:
        order += _permutation(packs, seed, epoch)
        epoch += 1
    return order[first : first + packs_per_step]


@lru_cache(maxsize=2)
def _permutation(packs: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the packs in an epoch."""
    order = list(range(packs))
    random.Random(f"packs/{seed}/{epoch}").shuffle(order)
    return order


def packed(samples: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Concatenate samples to a pack in host memory: ids, int64 ``[1, T]``, and ``cu_seqlens``, int32 ``[n + 1]``: the
    offset of each sample's first token, and ``T``.
    """
    ids = torch.from_numpy(np.concatenate(samples).astype(np.int64))[None]
    return ids, torch.tensor([0, *np.cumsum([len(s) for s in samples])], dtype=torch.int32)
