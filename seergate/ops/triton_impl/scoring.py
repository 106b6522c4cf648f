"""`score_blocks` in Triton: one launch from the query to the scores of a row's complete blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from seergate.ops.backend import one_node
from seergate.ops.compression import Branch
from seergate.ops.gate_math import NORM_EPS
from seergate.ops.triton_impl.gpus import gpu_of
from seergate.ops.triton_impl.kernel_math import add_product, branch_end
from seergate.ops.triton_impl.launch import decode_splits, padded

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CHUNK = 128
"""Numbers of the query, and blocks, per turn of the loops; half as many where a gate is wider than 128."""

THREADS = 256


@triton.jit
def score_kernel(  # type: ignore[no-untyped-def]
    q_ptr, lengths_ptr, compressed_ptr, weight_ptr, norm_ptr, freq_ptr, scores_ptr,
    stride_qb, stride_qh, stride_qd, stride_cb, stride_ch, stride_cn, stride_ce,
    stride_wh, stride_wg, stride_wd, stride_we,
    blocks, span, scaling, scale,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, CHUNK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """``span`` blocks of one row and KV head. Grid: spans, KV heads, batch.

    Each program projects the query anew: what others have read of the weights lies in the second-level cache, and a
    launch of its own for the query would add to every layer of a step. Rows shorter than the capacity cost programs
    that read nothing.

    ``q [B, Hkv * GROUP, d]``, ``lengths [B]``, ``compressed [B, Hkv, blocks, E]``, ``weight [Hkv, GROUP, d, E]``,
    ``norm [E]`` or None, ``freq [E / 2]`` or None; ``scores [B, Hkv, blocks]``, 0 for blocks that are not complete.
    """
    first = tl.program_id(0) * span
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    complete = tl.minimum(length // BLOCK_SIZE, blocks)
    scores_ptr += (b * tl.num_programs(1) + h) * blocks
    low = tl.arange(0, PADDED_HALF)
    x_low = tl.zeros([PADDED_HALF], tl.float32)
    x_high = tl.zeros([PADDED_HALF], tl.float32)
    if first < complete:
        q_ptr += b * stride_qb + h * GROUP * stride_qh
        weight_ptr += h * stride_wh
        for begin in range(0, GROUP * DIM, CHUNK):
            index = begin + tl.arange(0, CHUNK)
            held = index < GROUP * DIM
            head, dim = index // DIM, index % DIM
            query = tl.load(q_ptr + head * stride_qh + dim * stride_qd, mask=held, other=0.0)
            lines = weight_ptr + (head * stride_wg + dim * stride_wd)[:, None]
            x_low, x_high = add_product(x_low, x_high, query, lines, held, stride_we, HALF, WIDTH)
        position = (length - 1).to(tl.float32)
        x_low, x_high = branch_end(
            x_low, x_high, compressed_ptr, norm_ptr, freq_ptr, position, scaling, HALF, WIDTH, EPS
        )
        x_low, x_high = x_low * scale, x_high * scale
    compressed_ptr += b * stride_cb + h * stride_ch
    for begin in range(first, tl.minimum(first + span, blocks), CHUNK):
        block = begin + tl.arange(0, CHUNK)
        known = block < complete
        keys = compressed_ptr + block[:, None] * stride_cn
        k_low = tl.load(keys + low * stride_ce, mask=known[:, None] & (low < HALF), other=0.0).to(tl.float32)
        high = low + HALF
        k_high = tl.load(keys + high * stride_ce, mask=known[:, None] & (high < WIDTH), other=0.0).to(tl.float32)
        score = tl.sum(k_low * x_low, 1) + tl.sum(k_high * x_high, 1)
        tl.store(scores_ptr + block, tl.where(known, score, 0.0), mask=block < blocks)


@torch.no_grad()
def score_blocks(q: Tensor, lengths: Tensor, compressed: Tensor, branch: Branch, block_size: int) -> Tensor:
    """The op on checked arguments; float64 is left to the torch backend."""
    if not {q.dtype, branch.weight.dtype} <= set(DTYPES):
        return NotImplemented
    weight, *end = branch.detached()
    return score(q, lengths, compressed, weight, block_size, *end)


@one_node(
    "score_blocks(Tensor q, Tensor lengths, Tensor compressed, Tensor weight, int block_size, Tensor? norm_weight, "
    "Tensor? inv_freq, float attention_scaling) -> Tensor",
    lambda q, lengths, compressed, *_: compressed.new_empty(compressed.shape[:3], dtype=torch.float32),
)
def score(
    q: Tensor,
    lengths: Tensor,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    norm_weight: Tensor | None,
    inv_freq: Tensor | None,
    attention_scaling: float,
) -> Tensor:
    """Launch the kernel. Nothing waits for the device, and the launch depends on no value there."""
    batch, kv_heads, blocks, width = compressed.shape
    group, dim = weight.shape[1:3]
    scores = torch.empty(batch, kv_heads, blocks, dtype=torch.float32, device=q.device)
    if not scores.numel():
        return scores
    gpu, half, tiles = gpu_of(q.device), -(-width // 2), -(-blocks // CHUNK)
    span = CHUNK * -(-tiles // decode_splits(batch * kv_heads, tiles, gpu.processors))
    norm_weight, inv_freq = (None if x is None else x.contiguous() for x in (norm_weight, inv_freq))
    score_kernel[(-(-blocks // span), kv_heads, batch)](
        q, lengths.contiguous(), compressed, weight, norm_weight, inv_freq, scores,
        *q.stride(), *compressed.stride(), *weight.stride(), blocks, span, attention_scaling, width**-0.5,
        BLOCK_SIZE=block_size, GROUP=group, DIM=dim, WIDTH=width, HALF=half, PADDED_HALF=padded(half),
        CHUNK=CHUNK // 2 if width > 128 else CHUNK, EPS=NORM_EPS, num_warps=THREADS // gpu.warp_size,
    )  # fmt: skip
    return scores
