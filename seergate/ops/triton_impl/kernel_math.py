"""What several kernels compute: the cap of scores, integers in the order of scores, the best of a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(scores, softcap):  # type: ignore[no-untyped-def]
    """``softcap * tanh(scores / softcap)``, from an exponential that cannot overflow."""
    small = tl.exp(tl.abs(scores) * (-2.0 / softcap))
    size = softcap * (1.0 - small) / (1.0 + small)
    return tl.where(scores < 0, -size, size)


@triton.jit
def ordered(scores):  # type: ignore[no-untyped-def]
    """Finite fp32 ``scores``, and uint32 of the same order; NaN is lowest, negative zero equals zero."""
    largest: tl.constexpr = 3.4028234663852886e38
    bounded = tl.where(scores == scores, tl.minimum(tl.maximum(scores, -largest), largest), -largest)  # NaN differs
    bounded = tl.where(bounded == 0, 0.0, bounded)
    bits = bounded.to(tl.int32, bitcast=True)
    return bounded, tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def last_needed(keys, weights, wanted):  # type: ignore[no-untyped-def]
    """Per row, the largest uint32 such that the weights of ``keys [rows, n]`` from it upwards sum to ``wanted``.

    Found bit by bit from the highest: 32 sums, whatever ``n`` is. 0 if all weights together are too few.
    """
    last = tl.zeros([keys.shape[0]], tl.uint32)
    bit = tl.full([], 1, tl.uint32) << 31
    for _ in range(32):
        tried = last | bit
        enough = tl.sum(tl.where(keys >= tried[:, None], weights, 0), 1) >= wanted
        last = tl.where(enough, tried, last)
        bit = bit >> 1
    return last


@triton.jit
def best(keys, candidates, wanted):  # type: ignore[no-untyped-def]
    """Which of the ``candidates [rows, n]`` are the ``wanted`` with the highest keys; of equal ones the earlier."""
    last = last_needed(keys, candidates.to(tl.int32), wanted)[:, None]
    above = candidates & (keys > last)
    equal = candidates & (keys == last)
    spare = wanted - tl.sum(above.to(tl.int32), 1)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= spare[:, None]))
