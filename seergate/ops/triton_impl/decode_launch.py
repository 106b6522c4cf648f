"""Launch parameters of decoding: pure functions of shapes and of a `Gpu`. Chosen by reasoning, not yet measured on
one.

Decoding reads much and computes little, so all that counts is bytes in flight: enough programs to fill the processors,
and in each enough stages to cover the latency of memory. None of the choices depends on a value that lies on the
device, so a CUDA graph that was captured once stays right.

``python -m seergate.ops.triton_impl.decode_launch`` prints the choices for the benchmark's grid.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from seergate.ops.triton_impl.gpus import GPUS, Gpu

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
    """How `decode_kernel` runs: tokens per turn of its loop, programs that share a row's tokens, warps, stages."""

    tile: int
    splits: int
    num_warps: int
    num_stages: int


def padded(size: int, least: int = 16) -> int:
    """Next power of two, at least ``least``."""
    return max(least, 1 << (size - 1).bit_length())


def decode_launch(pairs: int, tokens: int, head_dim: int, value_dim: int, element_size: int, gpu: Gpu) -> DecodeLaunch:
    """For attention of one token per row.

    Args:
        pairs: rows times KV heads.
        tokens: the most that a pair may read: capacity, or selected blocks times block size.
        head_dim, value_dim: of keys and values.
        element_size: bytes of a number.
        gpu: where it runs.
    """
    row = (padded(head_dim) + padded(value_dim)) * element_size
    tile, num_warps = min(64, 1 << (max(16, STAGE_BYTES // row).bit_length() - 1)), 4
    if element_size == 4:  # no tensor cores: operands of larger tiles, or of fewer threads, do not fit in registers
        tile, num_warps = 16, 256 // gpu.warp_size
    buffers = gpu.shared_memory // PROGRAMS_PER_PROCESSOR // (tile * row)
    stages = 1 + max(1, min(MAX_BUFFERS, buffers))  # Triton keeps one buffer less than stages
    return DecodeLaunch(tile, decode_splits(pairs, -(-tokens // tile), gpu.processors), num_warps, stages)


def decode_splits(pairs: int, tiles: int, processors: int) -> int:
    """Programs that share the tokens of one pair: the fewest that occupy (nearly) every processor.

    Never so many that a program has fewer than `MIN_TILES` tiles, if all of a pair's ``tiles`` are used.
    """
    if pairs < 1 or tiles < 1:
        return 1
    fill = math.ceil(FILLED * processors / pairs)
    return max(1, min(fill, tiles // MIN_TILES, MAX_SPLITS))


def select_warps(width: int) -> int:
    """Warps of `select_kernel` for this padded number of blocks.

    Its 32 sums are short and follow on each other. Within one warp they need no barrier: up to 512 blocks, 16 a
    thread, one is enough. With 16 warps, registers would spill.
    """
    return max(1, min(8, width // 512))


def table(gpu: Gpu) -> str:
    """The choices for the benchmark's grid: 64 query and 8 KV heads, head dimension 128, bf16, blocks of 64 tokens."""
    lines = ["batch  length  sparsity   tile  splits  programs  tiles/program  warps  stages"]
    for batch in (1, 4, 8, 16):
        for length in (8192, 32768, 65536, 131072):
            for sparsity in (0.0, 0.5, 0.7, 0.8, 0.9):
                tokens = math.ceil(length * (1 - sparsity) / 64) * 64
                tile, splits, warps, stages = decode_launch(8 * batch, tokens, 128, 128, 2, gpu)
                turns = math.ceil(math.ceil(tokens / tile) / splits)
                lines.append(
                    f"{batch:5} {length:7} {sparsity:9.1f} {tile:6} {splits:7} {8 * batch * splits:9} {turns:14} "
                    f"{warps:6} {stages:7}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    for known in GPUS:
        print(f"{known.name} ({known.target})\n{table(known)}\n")
