"""Device functions of several kernels: the cap of scores, the best of a row, the branches of a gate."""

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


@triton.jit
def _cos_sin(angle):  # type: ignore[no-untyped-def]
    """Cosine and sine of an fp32 angle of any size, to within 1e-7.

    The library's functions hold a table for large angles in local memory. Here the angle is taken, in fp64, to within
    an eighth of a turn of the nearest quarter, where the first terms of both series are exact enough.
    """
    quarters = angle.to(tl.float64) * 0.6366197723675814
    nearest = tl.floor(quarters + 0.5)
    x = ((quarters - nearest) * 1.5707963267948966).to(tl.float32)
    y = x * x
    cos = 1.0 - y * (1 / 2 - y * (1 / 24 - y * (1 / 720 - y / 40320)))
    sin = x * (1.0 - y * (1 / 6 - y * (1 / 120 - y * (1 / 5040 - y / 362880))))
    quarter = nearest.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    turned_cos, turned_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    turned_cos = tl.where((quarter == 1) | (quarter == 2), -turned_cos, turned_cos)
    return turned_cos, tl.where(quarter >= 2, -turned_sin, turned_sin)


@triton.jit
def add_product(  # type: ignore[no-untyped-def]
    x_low, x_high, pooled, weights, held,
    stride_we,
    HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add ``pooled [CHUNK]`` times its lines of the linear map to both halves of the result, in fp32."""
    low = tl.arange(0, x_low.shape[0])[None, :]
    high = low + HALF
    w_low = tl.load(weights + low * stride_we, mask=held[:, None] & (low < HALF), other=0.0)
    w_high = tl.load(weights + high * stride_we, mask=held[:, None] & (high < WIDTH), other=0.0)
    factor = pooled.to(w_low.dtype).to(tl.float32)[:, None]  # rounded as where pooling and product are two steps
    return x_low + tl.sum(factor * w_low.to(tl.float32), 0), x_high + tl.sum(factor * w_high.to(tl.float32), 0)


@triton.jit
def branch_end(  # type: ignore[no-untyped-def]
    x_low, x_high, like_ptr, norm_ptr, freq_ptr,
    position, scaling,
    HALF: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """What follows the linear map in both branches of a gate: RMSNorm, where there is one, and RoPE, where there is.

    The vector's halves are fp32, rounded to what ``like_ptr`` points to wherever separate steps would round.
    """
    kind = like_ptr.dtype.element_ty
    low = tl.arange(0, x_low.shape[0])
    in_low, in_high = low < HALF, low + HALF < WIDTH
    x_low = x_low.to(kind).to(tl.float32)
    x_high = x_high.to(kind).to(tl.float32)
    if norm_ptr is not None:
        factor = tl.rsqrt((tl.sum(x_low * x_low, 0) + tl.sum(x_high * x_high, 0)) / WIDTH + EPS)
        n_low = tl.load(norm_ptr + low, mask=in_low, other=0.0).to(tl.float32)
        n_high = tl.load(norm_ptr + low + HALF, mask=in_high, other=0.0).to(tl.float32)
        x_low = ((x_low * factor).to(kind).to(tl.float32) * n_low).to(kind).to(tl.float32)
        x_high = ((x_high * factor).to(kind).to(tl.float32) * n_high).to(kind).to(tl.float32)
    if freq_ptr is not None:
        cos, sin = _cos_sin(position * tl.load(freq_ptr + low, mask=in_low, other=0.0).to(tl.float32))
        cos, sin = cos * scaling, sin * scaling
        x_low, x_high = x_low * cos - x_high * sin, x_high * cos + x_low * sin
        x_low = x_low.to(kind).to(tl.float32)
        x_high = x_high.to(kind).to(tl.float32)
    return x_low, x_high
