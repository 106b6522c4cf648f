"""`update_compressed_keys` in Triton: one launch per decode step, whether or not a block closes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from seergate.inference_mode import without_gradients
from seergate.ops.custom_op import custom_op
from seergate.ops.gate_math import NORM_EPS, Branch
from seergate.ops.rows import RowLengths
from seergate.ops.triton_impl.gpus import gpu_of
from seergate.ops.triton_impl.kernel_math import add_product, branch_end
from seergate.ops.triton_impl.launch import DTYPES, padded

CHUNK = 32
"""Key dimensions per iteration of the loop: 64 bytes of each key in 16 bits."""

THREADS = 256
"""Threads per program. With half as many, registers spill on a B200; with twice as many, loads are narrower."""


@triton.jit
def update_kernel(  # type: ignore[no-untyped-def]
    k_ptr, lengths_ptr, recent_ptr, compressed_ptr, weight_ptr, norm_ptr, freq_ptr,
    stride_kb, stride_kh, stride_kd, stride_rb, stride_rh, stride_rs, stride_rd,
    stride_cb, stride_ch, stride_cn, stride_ce, stride_wh, stride_wp, stride_we,
    slots, blocks, scaling, offset,
    MAX_AT: tl.constexpr, MIN_AT: tl.constexpr, AVG_AT: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One row and KV head. Grid: KV heads, batch.

    ``k [B, Hkv, d]``, ``lengths [B]``, ``recent [B, Hkv, slots, d]``, ``compressed [B, Hkv, blocks, E]``,
    ``weight [Hkv, P * d, E]``, ``norm [E]`` or None, ``freq [E / 2]`` or None. The result is made in two halves, which
    RoPE pairs. A kind's place is -1 if it is not wanted.
    """
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    k_ptr += b * stride_kb + h * stride_kh
    recent_ptr += b * stride_rb + h * stride_rh
    kind = recent_ptr.dtype.element_ty
    dim = tl.arange(0, PADDED_DIM)
    key = tl.load(k_ptr + dim * stride_kd, mask=dim < DIM, other=0.0)
    tl.store(recent_ptr + (length - 1) % slots * stride_rs + dim * stride_rd, key.to(kind), mask=dim < DIM)

    block = length // BLOCK_SIZE - 1
    if (length % BLOCK_SIZE == 0) & (block < blocks):
        row = tl.arange(0, ROWS)[:, None]
        older = row < BLOCK_SIZE - 1  # the newest key is not read back: other threads may have written it
        first = recent_ptr + block * BLOCK_SIZE % slots * stride_rs
        low = tl.arange(0, PADDED_HALF)
        high = low + HALF
        in_low, in_high = low < HALF, high < WIDTH
        weight_ptr += h * stride_wh
        result = compressed_ptr.dtype.element_ty
        x_low = tl.zeros([PADDED_HALF], tl.float32)
        x_high = tl.zeros([PADDED_HALF], tl.float32)
        for begin in range(0, DIM, CHUNK):
            dims = begin + tl.arange(0, CHUNK)
            held = dims < DIM
            newest = tl.load(k_ptr + dims * stride_kd, mask=held, other=0.0).to(kind).to(tl.float32)
            keys = tl.load(
                first + row * stride_rs + dims[None, :] * stride_rd, mask=older & held[None, :], other=0.0
            ).to(tl.float32)
            line = weight_ptr + dims[:, None] * stride_wp
            if MAX_AT >= 0:
                pooled = tl.maximum(tl.max(tl.where(older, keys, -float("inf")), 0), newest)
                x_low, x_high = add_product(
                    x_low, x_high, pooled.to(kind), line + MAX_AT * DIM * stride_wp, held, stride_we, HALF, WIDTH
                )
            if MIN_AT >= 0:
                pooled = tl.minimum(tl.min(tl.where(older, keys, float("inf")), 0), newest)
                x_low, x_high = add_product(
                    x_low, x_high, pooled.to(kind), line + MIN_AT * DIM * stride_wp, held, stride_we, HALF, WIDTH
                )
            if AVG_AT >= 0:
                pooled = (tl.sum(keys, 0) + newest) / BLOCK_SIZE
                x_low, x_high = add_product(
                    x_low, x_high, pooled.to(kind), line + AVG_AT * DIM * stride_wp, held, stride_we, HALF, WIDTH
                )
        position = (block * BLOCK_SIZE + offset).to(tl.float32)
        x_low, x_high = branch_end(
            x_low, x_high, compressed_ptr, norm_ptr, freq_ptr, position, scaling, HALF, WIDTH, EPS
        )
        out = compressed_ptr + b * stride_cb + h * stride_ch + block * stride_cn
        tl.store(out + low * stride_ce, x_low.to(result), mask=in_low)
        tl.store(out + high * stride_ce, x_high.to(result), mask=in_high)


@without_gradients
def update_compressed_keys(
    k: Tensor, rows: RowLengths, recent: Tensor, branch: Branch, kinds: Sequence[str], **others: Any
) -> None:
    """The op on checked arguments; float64 runs in the torch backend."""
    if not {k.dtype, recent.dtype, branch.weight.dtype} <= set(DTYPES):
        return NotImplemented
    update(k=k, lengths=rows.tensor, recent=recent, kinds=list(kinds), **branch._asdict(), **others)
    return None


@custom_op(
    "update_compressed_keys(Tensor k, Tensor lengths, Tensor(a!) recent, Tensor(b!) compressed, Tensor weight, "
    "int block_size, str[] kinds, Tensor? norm_weight, Tensor? inv_freq, float attention_scaling, "
    "int position_offset) -> ()",
    lambda *_: None,
    mutates=("recent", "compressed"),
)
def update(
    k: Tensor,
    lengths: Tensor,
    recent: Tensor,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    kinds: Sequence[str],
    norm_weight: Tensor | None,
    inv_freq: Tensor | None,
    attention_scaling: float,
    position_offset: int,
) -> None:
    """Launch the kernel. Nothing waits for the device, and the launch does not depend on values there."""
    (batch, kv_heads, dim), width = k.shape, weight.shape[2]
    if not k.numel():
        return
    half = -(-width // 2)
    at = [list(kinds).index(kind) if kind in kinds else -1 for kind in ("max", "min", "avg")]
    norm_weight, inv_freq = (None if x is None else x.contiguous() for x in (norm_weight, inv_freq))
    update_kernel[(kv_heads, batch)](
        k, lengths.contiguous(), recent, compressed, weight, norm_weight, inv_freq,
        *k.stride(), *recent.stride(), *compressed.stride(), *weight.stride(),
        recent.shape[2], compressed.shape[2], attention_scaling, position_offset, *at,
        BLOCK_SIZE=block_size, ROWS=padded(block_size), DIM=dim, PADDED_DIM=padded(dim),
        CHUNK=min(CHUNK, padded(dim)), WIDTH=width, HALF=half, PADDED_HALF=padded(half), EPS=NORM_EPS,
        num_warps=THREADS // gpu_of(k.device).warp_size,
    )  # fmt: skip
