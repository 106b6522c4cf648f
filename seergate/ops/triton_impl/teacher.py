"""Attention with block targets, and block targets alone, in Triton. Kernels: `teacher_kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seergate.ops.teacher import AttentionWithTargets
from seergate.ops.torch_impl import teacher as torch_impl
from seergate.ops.triton_impl import packs, teacher_kernels
from seergate.ops.triton_impl.distill_launch import (
    BLOCK_SIZES,
    MAX_HEAD_DIM,
    TeacherLaunch,
    padded,
    precision,
    teacher_launch,
)
from seergate.ops.triton_impl.example import Example, Work, meta
from seergate.ops.triton_impl.gpus import gpu_of

SCRATCH_BYTES = 64 * 2**20
"""What `attention_kernel` may use of device memory at a time, if that is enough to fill the device: about a cache."""

MAX_SCRATCH_BYTES = 256 * 2**20
"""Filling the device may take more than `SCRATCH_BYTES`; beyond this, targets take two passes, without scratch."""


class Teacher:
    """The teacher's side of one pack.

    Args:
        q, k, block_size, sm_scale, sinks, softcap: as in `seergate.ops.block_targets`.
        v: values, if the attention's output is wanted.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        block_size: int,
        sm_scale: float,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> None:
        self.gpu = gpu_of(q.device)
        self.q, self.k = _rows(q.detach()), _rows(k.detach())
        self.v = None if v is None else _rows(v.detach())
        self.kv_heads, self.dim = k.shape[1:]
        self.group = q.shape[1] // self.kv_heads
        self.block_size, self.softcap = block_size, softcap
        # The kernels want a positive scale: a negative one turns the queries round, and instead of 0 a number that
        # makes every score 0 in fp32.
        if sm_scale < 0:
            self.q = -self.q
        self.scale = max(abs(sm_scale), 1e-30)
        self.sinks = None if sinks is None else sinks.detach().contiguous()

    def launch(self, *, output: bool = False) -> TeacherLaunch:
        """Tile and warps of the kernel."""
        v_dim = self.v.shape[-1] if output and self.v is not None else 0
        return teacher_launch(self.group, self.dim, v_dim, self.q.dtype, self.gpu)

    def attend(self, tiles: packs.Tiles, out: Tensor | None, lse: Tensor, targets: Tensor | None) -> None:
        """Fill ``lse [T, H]`` and, where given, ``out`` and the past cells of ``targets [rows, Hkv, width]``.

        Args:
            tiles: of ``launch(output=...).rows`` rows.
            out: ``[T, H, dv]``.
            lse: contiguous, fp32.
            targets: fp32, by buffer row; its width covers every candidate block.
        """
        launch = self.launch(output=out is not None)
        width = 0 if targets is None else targets.shape[-1]
        tile = launch.rows * launch.pack
        at_once = max(SCRATCH_BYTES // max(1, width * tile * 4), self.gpu.processors) // self.kv_heads
        table = tiles.table.split(max(1, at_once)) if width else [tiles.table]
        scratch = lse.new_empty(width * tile * min(len(tiles), max(1, at_once)) * self.kv_heads)
        v = self.k if self.v is None else self.v
        constants = attention_constants(
            launch, self.group, self.block_size, self.dim, v.shape[-1],
            sinks=self.sinks is not None, softcap=self.softcap is not None, output=out is not None,
            targets=targets is not None, precision=precision(self.q.dtype, self.gpu),
        )  # fmt: skip
        for part in table:
            for turn in range(0, self.group if len(part) else 0, launch.pack):
                teacher_kernels.attention_kernel[(len(part) * self.kv_heads,)](
                    self.q, self.k, v, lse if self.sinks is None else self.sinks, part,
                    lse if out is None else out, lse, lse if targets is None else targets, scratch,
                    len(part), self.kv_heads, width,
                    *self.q.stride()[:2], *self.k.stride()[:2], *v.stride()[:2],
                    *((0, 0) if out is None else out.stride()[:2]),
                    *((0, 0) if targets is None else targets.stride()[:2]),
                    self.scale, self.softcap or 1.0, turn,
                    LATER_TURN=turn > 0, **constants, num_warps=launch.num_warps, num_stages=launch.num_stages,
                )  # fmt: skip

    def log_targets(self, tiles: packs.Tiles, targets: Tensor, lse: Tensor, *, known: bool) -> None:
        """Fill the past cells of ``targets [rows, Hkv, width]``; unless it is ``known``, ``lse [T, H]`` too.

        An unknown ``lse`` is found in the same pass, or, where that pass would need much scratch, in one before it.
        """
        if not known:
            launch = self.launch()
            if targets.shape[-1] * launch.rows * launch.pack * 4 * self.gpu.processors <= MAX_SCRATCH_BYTES:
                self.attend(tiles, None, lse, targets)
                return
            self.attend(tiles, None, lse, None)
        self.maxima(tiles, lse, targets)

    def maxima(self, tiles: packs.Tiles, lse: Tensor, targets: Tensor) -> None:
        """Fill the past cells of ``targets [rows, Hkv, width]`` for these tiles, given ``lse [T, H]``."""
        launch = self.launch()
        constants = maxima_constants(
            launch, self.group, self.block_size, self.dim,
            softcap=self.softcap is not None, precision=precision(self.q.dtype, self.gpu),
        )  # fmt: skip
        for turn in range(0, self.group if len(tiles) else 0, launch.pack):
            teacher_kernels.maxima_kernel[(len(tiles) * self.kv_heads,)](
                self.q, self.k, lse, tiles.table, targets, len(tiles), self.kv_heads,
                *self.q.stride()[:2], *self.k.stride()[:2], *targets.stride()[:2],
                self.scale, self.softcap or 1.0, turn,
                LATER_TURN=turn > 0, **constants, num_warps=launch.num_warps, num_stages=launch.num_stages,
            )  # fmt: skip


def attention_constants(
    launch: TeacherLaunch,
    group: int,
    block_size: int,
    dim: int,
    v_dim: int,
    *,
    sinks: bool,
    softcap: bool,
    output: bool,
    targets: bool,
    precision: str,
) -> dict[str, int | bool | str]:
    """Compile-time arguments of `attention_kernel`."""
    return {
        "GROUP": group, "PACK": launch.pack, "ROWS": launch.rows, "KEYS": launch.keys, "COLUMNS": 16,
        "BLOCK_SIZE": block_size, "DIM": dim, "PADDED_DIM": padded(dim), "V_DIM": v_dim, "PADDED_V_DIM": padded(v_dim),
        "HAS_SINKS": sinks, "HAS_CAP": softcap, "TWO_LOOPS": launch.two_loops, "OUTPUT": output, "TARGETS": targets,
        "PRECISION": precision,
    }  # fmt: skip


def maxima_constants(
    launch: TeacherLaunch, group: int, block_size: int, dim: int, *, softcap: bool, precision: str
) -> dict[str, int | bool | str]:
    """Compile-time arguments of `maxima_kernel`."""
    return {
        "GROUP": group, "PACK": launch.pack, "ROWS": launch.rows, "KEYS": launch.keys, "BLOCK_SIZE": block_size,
        "DIM": dim, "PADDED_DIM": padded(dim), "HAS_CAP": softcap, "PRECISION": precision,
    }  # fmt: skip


def runs_here(q: Tensor, block_size: int, *others: Tensor) -> bool:
    """Whether the kernels do this; what they do not do is left to the torch backend."""
    return block_size in BLOCK_SIZES and all(x.shape[-1] <= MAX_HEAD_DIM.get(x.dtype, 0) for x in (q, *others))


@torch.no_grad()
def attention_with_block_targets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    sm_scale: float,
    *,
    sinks: Tensor | None,
    softcap: float | None,
) -> AttentionWithTargets:
    """See `seergate.ops.attention_with_block_targets`."""
    if not runs_here(q, block_size, v):
        return torch_impl.attention_with_block_targets(
            q, k, v, cu_seqlens, block_size, sm_scale, sinks=sinks, softcap=softcap
        )
    out = q.new_empty(*q.shape[:2], v.shape[-1], dtype=v.dtype)
    lse, targets = _run(Teacher(q, k, v, block_size, sm_scale, sinks, softcap), cu_seqlens, out)
    return AttentionWithTargets(out, lse, targets)


@torch.no_grad()
def block_targets(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    sm_scale: float,
    *,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """See `seergate.ops.block_targets`."""
    if not runs_here(q, block_size):
        return torch_impl.block_targets(q, k, cu_seqlens, block_size, sm_scale, sinks=sinks, softcap=softcap)
    _, targets = _run(Teacher(q, k, None, block_size, sm_scale, sinks, softcap), cu_seqlens, None)
    log_sum = targets.logsumexp(-1, keepdim=True)
    return targets.sub_(log_sum.masked_fill(log_sum.isneginf(), 0.0)).exp_()  # rows without a past block: exp(-inf)


def _run(teacher: Teacher, cu_seqlens: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and log targets of the whole pack; fills ``out``."""
    q, spans = teacher.q, packs.segments(cu_seqlens, len(teacher.q))
    widest = max(-(-(end - start) // teacher.block_size) for start, end in spans)
    pieces = [packs.Piece(start, 0, start, end, 1.0) for start, end in spans]
    (tiles,) = packs.to_device(
        [packs.row_tiles(pieces, teacher.launch(output=out is not None).rows, packed=True)], q.device
    )
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    targets = torch.full((q.shape[0], teacher.kv_heads, widest), -torch.inf, dtype=torch.float32, device=q.device)
    teacher.attend(tiles, out, lse, targets)
    return lse, targets


def _rows(x: Tensor) -> Tensor:
    """``x`` with its last dimension contiguous, copied only if it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


SHIPPED: tuple[tuple[torch.dtype, int, int, int, dict[str, Any]], ...] = (
    # dtype, head dimension, block size, group, sinks and cap
    (torch.bfloat16, 128, 64, 4, {}),
    (torch.bfloat16, 128, 16, 5, {}),  # two heads a tile, three turns
    (torch.bfloat16, 128, 8, 8, {}),
    (torch.float16, 128, 32, 7, {}),
    (torch.bfloat16, 128, 128, 2, {}),
    (torch.float16, 128, 256, 1, {}),
    (torch.bfloat16, 64, 64, 8, {"sinks": True}),
    (torch.bfloat16, 96, 64, 1, {}),
    (torch.bfloat16, 256, 16, 2, {"softcap": 50.0}),
    (torch.bfloat16, 256, 128, 8, {}),
    (torch.float32, 128, 64, 4, {}),
)
"""What is compiled ahead of time: every head dimension, block size and dtype, every way to pack a group."""


def examples() -> Iterator[Example]:
    """Calls on meta tensors that launch what ships."""
    tokens, kv_heads = 4096, 8
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    for dtype, dim, block_size, group, extras in SHIPPED:
        heads = kv_heads * group
        q = meta(tokens, heads, dim, dtype=dtype)
        k = meta(tokens, kv_heads, dim, dtype=dtype)
        sinks = meta(heads, dtype=dtype) if "sinks" in extras else None
        softcap = extras.get("softcap")
        name = f"{str(dtype).removeprefix('torch.')} d{dim} b{block_size} g{group}"
        product = tokens * tokens * heads * dim  # half of the square, two operations
        inputs = (heads + kv_heads) * tokens * dim * dtype.itemsize
        targets = tokens * kv_heads * tokens / block_size * 2  # bytes: half of the cells, four each
        products = ("attention_kernel", "maxima_kernel") if dtype != torch.float32 else ()
        turns = tokens / 2 / teacher_launch(group, dim, dim, dtype, gpu_of(q.device)).keys
        yield Example(
            f"attention_with_block_targets {name}",
            partial(
                attention_with_block_targets, q, k, k, cu_seqlens, block_size, dim**-0.5, sinks=sinks, softcap=softcap
            ),
            {"attention_kernel": Work(2 * inputs + targets, 2 * product, turns, dtype == torch.float32)},
            products[:1],
            ("attention_kernel",),
        )
        yield Example(
            f"block targets from lse {name}",
            partial(_from_lse, q, k, cu_seqlens, block_size, sinks, softcap),
            {"maxima_kernel": Work(inputs + targets, product, turns, dtype == torch.float32)},
            products[1:],
            ("maxima_kernel",),
        )


def _from_lse(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, block_size: int, sinks: Tensor | None, softcap: float | None
) -> None:
    """What `gate_kl` does when the log-sum-exp is known: an example."""
    teacher = Teacher(q, k, None, block_size, 1.0, sinks, softcap)
    pieces = [packs.Piece(start, 0, start, end, 1.0) for start, end in packs.segments(cu_seqlens, len(q))]
    (tiles,) = packs.to_device([packs.row_tiles(pieces, teacher.launch().rows, packed=True)], q.device)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    width = -(-q.shape[0] // block_size)
    teacher.log_targets(tiles, lse.new_empty(q.shape[0], teacher.kv_heads, width), lse, known=True)
