"""Launch parameters of the distillation kernels: pure functions of shapes.

Chosen by reasoning and by what the compiler says about registers and shared memory; not yet measured on a GPU.

``python -m seergate.ops.triton_impl.distill_launch`` prints the choices for what `seergate train` meets.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from seergate.ops.triton_impl.gpus import GPUS, Gpu

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MAX_HEAD_DIM = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
"""By dtype. What else there is runs in the torch backend."""

TURN_COST = 0.1
"""What one more turn through a group is taken to cost, as a share of the products: the partial targets are written and
read once more."""


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


def warn_if_too_wide(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Say, once per op, argument and width, that the kernels leave this to the torch backend for its width."""
    for name, x in tensors.items():
        limit = MAX_HEAD_DIM.get(x.dtype)
        if limit is not None and x.shape[-1] > limit:
            _warn(
                f"{op}: {name} is {x.shape[-1]} wide in {x.dtype}; the kernels take {limit} at most, so this runs in "
                "the torch backend, which is slower on a GPU"
            )
            return


@cache
def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def padded(size: int) -> int:
    """Next power of two, at least 16: the smallest extent of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


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
    """For `attention_kernel` (``v_dim`` 0 if it makes no output) and `maxima_kernel`."""
    pack = heads_per_tile(group)
    widest = max(padded(dim), padded(v_dim) if v_dim else 0)
    two_loops = False
    if dtype == torch.float32:
        tile, keys, num_warps, num_stages = 16, 32 if v_dim else 64, 4, 1
    elif widest <= 128:
        tile, keys, num_warps, num_stages = 128, 64, 8, 2
        # The A100 and its relatives run out of registers, and so does sm_120.
        two_loops = gpu.backend == "hip" or 90 <= int(gpu.arch) < 120
    else:  # with 32 keys, sm_90 runs out of registers
        tile, keys, num_warps, num_stages = 64, 16, 8, 3
    if gpu.backend == "hip":
        num_warps //= 2  # of 64 threads
    return TeacherLaunch(max(1, tile // pack), pack, keys, num_warps, num_stages, two_loops)


def gate_launch(gate_dim: int, dtype: torch.dtype, gpu: Gpu) -> GateLaunch:
    """For `rows_kernel` and `columns_kernel`."""
    if dtype == torch.float32:
        rows, columns, num_warps, num_stages = 16, 32, 4, 1
    elif padded(gate_dim) <= 128:
        rows, columns, num_warps, num_stages = 64, 32, 8, 2
    else:
        rows, columns, num_warps, num_stages = 32, 32, 4, 1
    if gpu.backend == "hip":
        num_warps //= 2  # of 64 threads
    return GateLaunch(rows, columns, num_warps, num_stages)


def recall_launch(width: int, rows: int, gpu: Gpu) -> tuple[int, int]:
    """Rows at a time (of a tile of ``rows``) and warps of `recall_kernel`, which holds ``width`` blocks of each.

    Eight numbers a thread, or more in very long rows: with 16 in short ones, NVIDIA's compiler runs out of predicates.
    """
    per_warp = 8 * gpu.warp_size
    return max(1, min(rows, 4 * per_warp // width)), min(max(width // per_warp, 4), 16)


def table(gpu: Gpu) -> str:
    """The choices for head dimension 128: every group of the shipped configurations, the ablation's block sizes."""
    lines = ["teacher, without output", " dtype  group  turns  rows  pack  keys  warps  stages  two loops"]
    for dtype in (torch.bfloat16, torch.float32):
        for group in (1, 2, 4, 5, 6, 7, 8):
            tile = teacher_launch(group, 128, 0, dtype, gpu)
            lines.append(
                f"{dtype.itemsize * 8:3} bit {group:6} {-(-group // tile.pack):6} {tile.rows:5} {tile.pack:5} "
                f"{tile.keys:5} {tile.num_warps:6} {tile.num_stages:7}  {'yes' if tile.two_loops else 'no'}"
            )
    lines += ["gate and recall, 32k tokens", " dtype  block  width  rows  columns  warps  stages  recall rows, warps"]
    for dtype in (torch.bfloat16, torch.float32):
        gate = gate_launch(128, dtype, gpu)
        for block_size in (16, 32, 64, 128):
            width = 32768 // block_size
            turn, warps = recall_launch(width, gate.rows, gpu)
            lines.append(
                f"{dtype.itemsize * 8:3} bit {block_size:6} {width:6} {gate.rows:5} {gate.columns:8} "
                f"{gate.num_warps:6} {gate.num_stages:7} {turn:12}, {warps}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    for known in GPUS:
        print(f"{known.name} ({known.target})\n{table(known)}\n")
