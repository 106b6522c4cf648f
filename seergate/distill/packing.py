"""Packs samples of many lengths into rows of one length, near-linearly and the same on every machine.

Best-fit-decreasing: the longest sample first, each into the fullest pack it still fits in. The packs that have a given
room left stand in a list per room, and the rooms that have any form one big integer, a bit each: the smallest room
that is large enough is then the lowest set bit above the length. One shift per sample replaces a search over packs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Distribute samples over as few packs as best-fit-decreasing finds.

    Args:
        lengths: tokens per sample, each in ``1..capacity``.
        capacity: tokens per pack.

    Returns:
        Per pack, the indices of its samples. Every sample is in exactly one pack. A function of the arguments only.
    """
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if sizes.size and not (sizes.min() >= 1 and sizes.max() <= capacity):
        bad = int(np.flatnonzero((sizes < 1) | (sizes > capacity))[0])
        raise ValueError(f"lengths[{bad}] is {sizes[bad]}; it must be in 1..{capacity}, the capacity of a pack")
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # room -> packs that have exactly this much left
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
    """The numbers of the packs of an optimizer step, over all processes.

    Their order is endless: each epoch is a fresh permutation of all packs, made from the seed and the epoch's number
    alone. So all ranks compute the same order, and a resumed run finds its place without replaying anything.
    """
    epoch, first = divmod(step * packs_per_step, packs)
    order: list[int] = []
    while len(order) < first + packs_per_step:
        order += _permutation(packs, seed, epoch)
        epoch += 1
    return order[first : first + packs_per_step]


@lru_cache(maxsize=2)
def _permutation(packs: int, seed: int, epoch: int) -> list[int]:
    """The order of the packs in an epoch."""
    order = list(range(packs))
    random.Random(f"packs/{seed}/{epoch}").shuffle(order)
    return order


def packed(samples: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """A pack as the frozen model takes it, in host memory: the samples' ids one after another, int64 ``[1, T]``, and
    ``cu_seqlens``, int32 ``[n + 1]``: where each sample starts, and ``T``.
    """
    ids = torch.from_numpy(np.concatenate(samples).astype(np.int64))[None]
    return ids, torch.tensor([0, *np.cumsum([len(s) for s in samples])], dtype=torch.int32)
