"""Launch parameters of every kernel: pure functions of shapes and of a `Gpu`.

They follow from reasoning and from the compiler's reports on registers and shared memory; they have not been measured
on a GPU. None depends on values on the device, so a captured CUDA graph stays valid.

Decoding is memory-bound, so what counts is bytes in flight: enough programs to fill the processors, and enough stages
in each to cover the memory latency. Distillation is compute-bound: its tiles fit the matrix units and the registers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from seergate.ops.triton_impl.gpus import Gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that the kernels support; float64 runs in the torch backend."""

STAGE_BYTES = 32 << 10
"""Maximum bytes of keys and values per iteration of the loop."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that run concurrently on a processor: one issues loads while the other computes."""

MIN_TILES = 2
"""Minimum tiles of a split: with a single tile there is nothing to prefetch, and the merge costs the same."""

MAX_BUFFERS = 4
"""Maximum tiles in flight. On an H200, bandwidth times latency is about 29 KB per processor; this gives 32 KB in the
worst case (fp32, head dimension 64), and 96 KB for head dimension 128 in 16 bits."""

FILLED = 0.95
"""Share of the processors that must have a program: 128 programs on 132 processors need no further split."""

MAX_SPLITS = 64
"""Maximum splits: with more, the merge, which reads all partial results, would dominate."""


class DecodeLaunch(NamedTuple):
    """Launch of `decode_kernel`: tokens per iteration, programs that share a row's tokens, warps, stages."""

    tile: int
    splits: int
    num_warps: int
    num_stages: int


def padded(size: int, least: int = 16) -> int:
    """Next power of two, at least ``least``."""
    return max(least, 1 << (size - 1).bit_length())


def decode_launch(pairs: int, tokens: int, head_dim: int, value_dim: int, element_size: int, gpu: Gpu) -> DecodeLaunch:
    """Launch parameters for attention of one token per row.

    Args:
        pairs: rows times KV heads.
        tokens: maximum tokens that a pair reads: capacity, or selected blocks times block size.
        head_dim, value_dim: dimensions of keys and values.
        element_size: bytes of a number.
        gpu: the GPU to launch on.
    """
    row = (padded(head_dim) + padded(value_dim)) * element_size
    tile, num_warps = min(64, 1 << (max(16, STAGE_BYTES // row).bit_length() - 1)), 4
    if element_size == 4:  # no tensor cores: with larger tiles or fewer threads, operands exceed the registers
        tile, num_warps = 16, 256 // gpu.warp_size
    buffers = gpu.shared_memory // PROGRAMS_PER_PROCESSOR // (tile * row)
    stages = 1 + max(1, min(MAX_BUFFERS, buffers))  # Triton has one buffer fewer than stages
    return DecodeLaunch(tile, decode_splits(pairs, -(-tokens // tile), gpu.processors), num_warps, stages)


def decode_splits(pairs: int, tiles: int, processors: int) -> int:
    """Programs that share the tokens, or blocks, of a pair: the fewest that occupy (nearly) all processors.

    Each has at least `MIN_TILES` of the pair's ``tiles``, if all of them are used.
    """
    if pairs < 1 or tiles < 1:
        return 1
    fill = math.ceil(FILLED * processors / pairs)
    return max(1, min(fill, tiles // MIN_TILES, MAX_SPLITS))


def select_warps(width: int) -> int:
    """Warps of `select_kernel` for this padded number of blocks.

    Its 32 short sums, one after the other, need no barrier in a single warp, enough for 512 blocks (16 a thread).
    """
    return max(1, min(16, width // 512))


TURN_COST = 0.1
"""Cost of one more pass over a group's heads, relative to the products: partial targets are written and read again."""


class TeacherLaunch(NamedTuple):
    """Tile of the teacher's kernels, ``rows`` tokens times ``pack`` heads against ``keys`` keys; warps and stages.

    ``two_loops``: see `teacher_kernels.attention_kernel`.
    """

    rows: int
    pack: int
    keys: int
    num_warps: int
    num_stages: int
    two_loops: bool


class GateLaunch(NamedTuple):
    """Tile of the gate's kernels: ``rows`` tokens against ``columns`` blocks; warps and stages."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def heads_per_tile(group: int) -> int:
    """Number of heads of a group that share a tile: a power of two.

    Padding the group to a power of two wastes products (5 heads: 3 of 8); several passes over fewer heads re-read the
    partial targets. Returns the cheaper choice, the larger pack if equal.
    """

    def cost(pack: int) -> float:
        turns = -(-group // pack)
        return round(turns * pack / group + TURN_COST * (turns - 1), 6)

    return min((64, 32, 16, 8, 4, 2, 1), key=cost)


def precision(dtype: torch.dtype, gpu: Gpu) -> str:
    """``input_precision`` of the products: for fp32 on NVIDIA GPUs three tf32 products, else plain."""
    return "tf32x3" if dtype == torch.float32 and gpu.backend == "cuda" else "ieee"


def teacher_launch(group: int, dim: int, v_dim: int, dtype: torch.dtype, gpu: Gpu) -> TeacherLaunch:
    """Launch parameters of `attention_kernel` (``v_dim`` 0 without output) and `maxima_kernel`."""
    pack = heads_per_tile(group)
    widest = max(padded(dim), padded(v_dim) if v_dim else 0)
    two_loops = False
    if dtype == torch.float32:
        tile, keys, num_warps, num_stages = 16, 32 if v_dim else 64, 4, 1
    elif widest <= 128:
        # With three stages a tile is loaded while the previous one is computed; with two, the loop waits for its load.
        # Three exceed the 99 KiB of sm_86, sm_89 and sm_120.
        roomy = gpu.backend == "cuda" and gpu.shared_memory > 110 << 10
        tile, keys, num_warps, num_stages = 128, 64, 8, 3 if roomy else 2
        # Two loops exceed the registers of sm_8x and sm_120. With the products of the output in two loops, NVIDIA's
        # compiler does not overlap them (warning C7515).
        two_loops = gpu.backend == "hip" or (not v_dim and 90 <= int(gpu.arch) < 120)
    else:  # 32 keys exceed the registers of sm_90
        tile, keys, num_warps, num_stages = 64, 16, 8, 3
    if gpu.backend == "hip":
        num_warps //= 2  # of 64 threads
    return TeacherLaunch(max(1, tile // pack), pack, keys, num_warps, num_stages, two_loops)


def gate_launch(gate_dim: int, dtype: torch.dtype, gpu: Gpu) -> GateLaunch:
    """Launch parameters of `rows_kernel` and `columns_kernel`."""
    if dtype == torch.float32:
        rows, columns, num_warps, num_stages = 16, 32, 4, 1
    elif padded(gate_dim) > 128:
        rows, columns, num_warps, num_stages = 32, 32, 4, 1
    elif gpu.backend == "hip":
        rows, columns, num_warps, num_stages = 64, 32, 8, 2
    else:  # with 64 rows, products of warp groups would wait for each other
        rows, columns, num_warps, num_stages = 32, 32, 4, 3
    if gpu.backend == "hip":
        num_warps //= 2  # of 64 threads
    return GateLaunch(rows, columns, num_warps, num_stages)


def recall_launch(width: int, rows: int, gpu: Gpu) -> tuple[int, int]:
    """Rows per program (of a tile of ``rows``) and warps of `recall_kernel`, which holds ``width`` blocks of each row.

    A thread has eight numbers, more only in very long rows: with 16, NVIDIA's compiler runs out of predicates.
    """
    per_warp = 8 * gpu.warp_size
    return max(1, min(rows, 4 * per_warp // width)), min(max(width // per_warp, 4), 16)
