"""Launch parameters of every kernel: pure functions of shapes and of a `Gpu`.

Chosen by reasoning and by what the compiler says about registers and shared memory; not yet measured on a GPU. None
depends on a value that lies on the device, so a CUDA graph that was captured once stays right.

Decoding reads much and computes little, so all that counts is bytes in flight: enough programs to fill the processors,
and in each enough stages to cover the latency of memory. Distillation computes: its tiles are what the matrix units
and the registers take.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from seergate.ops.triton_impl.gpus import Gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that the kernels take; float64 is left to the torch backend."""

STAGE_BYTES = 32 << 10
"""Keys and values of one turn of the loop, at most."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that run at the same time on a processor; one issues loads while the other computes."""

MIN_TILES = 2
"""A split of a single tile has nothing to load ahead, and costs the merge as much as any other."""

MAX_BUFFERS = 4
"""Tiles on their way at most. On an H200, bandwidth times latency is about 29 KB for each processor; this gives 32 KB
in the worst case (fp32, head dimension 64), and 96 KB with head dimension 128 in 16 bits."""

FILLED = 0.95
"""The share of the processors that must have a program: 128 programs on 132 processors need no further split."""

MAX_SPLITS = 64
"""More would make the merge, which reads every partial result, the slow part."""


class DecodeLaunch(NamedTuple):
    """Launch of `decode_kernel`: tokens per turn of its loop, programs that share a row's tokens, warps, stages."""

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
        tokens: the most that a pair may read: capacity, or selected blocks times block size.
        head_dim, value_dim: of keys and values.
        element_size: bytes of a number.
    """
    row = (padded(head_dim) + padded(value_dim)) * element_size
    tile, num_warps = min(64, 1 << (max(16, STAGE_BYTES // row).bit_length() - 1)), 4
    if element_size == 4:  # no tensor cores: operands of larger tiles, or of fewer threads, do not fit in registers
        tile, num_warps = 16, 256 // gpu.warp_size
    buffers = gpu.shared_memory // PROGRAMS_PER_PROCESSOR // (tile * row)
    stages = 1 + max(1, min(MAX_BUFFERS, buffers))  # Triton keeps one buffer less than stages
    return DecodeLaunch(tile, decode_splits(pairs, -(-tokens // tile), gpu.processors), num_warps, stages)


def decode_splits(pairs: int, tiles: int, processors: int) -> int:
    """Programs that share the tokens, or blocks, of one pair: the fewest that occupy (nearly) every processor.

    Never so many that a program has fewer than `MIN_TILES` tiles, if all of a pair's ``tiles`` are used.
    """
    if pairs < 1 or tiles < 1:
        return 1
    fill = math.ceil(FILLED * processors / pairs)
    return max(1, min(fill, tiles // MIN_TILES, MAX_SPLITS))


def select_warps(width: int) -> int:
    """Warps of `select_kernel` for this padded number of blocks.

    Its 32 sums are short and follow on each other. Within one warp they need no barrier: up to 512 blocks, 16 a
    thread, one is enough.
    """
    return max(1, min(16, width // 512))


TURN_COST = 0.1
"""Assumed cost of one more turn through a group, as a share of the products: partial targets are written and read once
more."""


class TeacherLaunch(NamedTuple):
    """Tile of the teacher's kernels: ``rows`` tokens times ``pack`` heads, against ``keys`` keys; warps and stages.

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
    """Heads of a group that share a tile: a power of two.

    Padding the group to a power of two wastes products (5 heads: 3 of 8); several turns over fewer heads re-read the
    partial targets. The cheaper of the two; the larger pack if equal.
    """

    def cost(pack: int) -> float:
        turns = -(-group // pack)
        return round(turns * pack / group + TURN_COST * (turns - 1), 6)

    return min((64, 32, 16, 8, 4, 2, 1), key=cost)


def precision(dtype: torch.dtype, gpu: Gpu) -> str:
    """``input_precision`` of the products. fp32 as three tf32 products where there are such, else as it is."""
    return "tf32x3" if dtype == torch.float32 and gpu.backend == "cuda" else "ieee"


def teacher_launch(group: int, dim: int, v_dim: int, dtype: torch.dtype, gpu: Gpu) -> TeacherLaunch:
    """Launch parameters of `attention_kernel` (``v_dim`` 0 without output) and `maxima_kernel`."""
    pack = heads_per_tile(group)
    widest = max(padded(dim), padded(v_dim) if v_dim else 0)
    two_loops = False
    if dtype == torch.float32:
        tile, keys, num_warps, num_stages = 16, 32 if v_dim else 64, 4, 1
    elif widest <= 128:
        # With three stages a tile is loaded while the one before it is computed; with two, the loop waits for its own.
        tile, keys, num_warps, num_stages = 128, 64, 8, 2 if gpu.backend == "hip" else 3
        # The A100 and its relatives run out of registers, and so does sm_120. With the output's products in two loops,
        # NVIDIA's compiler gives up overlapping them (warning C7515).
        two_loops = gpu.backend == "hip" or (not v_dim and 90 <= int(gpu.arch) < 120)
    else:  # with 32 keys, sm_90 runs out of registers
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
    else:  # of 64 rows, products of warp groups would wait for each other
        rows, columns, num_warps, num_stages = 32, 32, 4, 3
    if gpu.backend == "hip":
        num_warps //= 2  # of 64 threads
    return GateLaunch(rows, columns, num_warps, num_stages)


def recall_launch(width: int, rows: int, gpu: Gpu) -> tuple[int, int]:
    """Rows at a time (of a tile of ``rows``) and warps of `recall_kernel`, which holds ``width`` blocks of each.

    Eight numbers a thread, or more in very long rows: with 16 in short ones, NVIDIA's compiler runs out of predicates.
    """
    per_warp = 8 * gpu.warp_size
    return max(1, min(rows, 4 * per_warp // width)), min(max(width // per_warp, 4), 16)
