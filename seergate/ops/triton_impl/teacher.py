"""`attention_with_block_targets` and the teacher's side of `gate_kl` in Triton. Kernels: `teacher_kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seergate.inference_mode import without_gradients
from seergate.ops.attention import AttentionWithTargets, Pack
from seergate.ops.triton_impl import packs, teacher_kernels
from seergate.ops.triton_impl.gpus import gpu_of
from seergate.ops.triton_impl.launch import TeacherLaunch, padded, precision, teacher_launch

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MAX_HEAD_DIM = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
"""Maximum width of vectors by dtype; wider ones and other dtypes run in the torch backend."""

SCRATCH_BYTES = 256 * 2**20
"""Device memory for the scratch of a launch of `attention_kernel`: two programs per processor at 32k tokens in blocks
of 16."""


class Teacher:
    """The teacher's side of the loss, for one pack.

    Args:
        v: values, if the attention's output is wanted.
        window: as in `seergate.ops.packed_attention`; not together with targets.
    """

    def __init__(self, pack: Pack, block_size: int, v: Tensor | None = None, window: int | None = None) -> None:
        q, k, _, sm_scale, sinks, softcap = pack
        self.gpu = gpu_of(q.device)
        self.q, self.k = rows_in_one_piece(q.detach()), rows_in_one_piece(k.detach())
        self.v = None if v is None else rows_in_one_piece(v.detach())
        self.kv_heads, self.dim = k.shape[1:]
        self.group = q.shape[1] // self.kv_heads
        self.block_size, self.scale, self.softcap, self.window = block_size, sm_scale, softcap, window
        self.sinks = None if sinks is None else sinks.detach().contiguous()

    def launch(self, *, output: bool = False) -> TeacherLaunch:
        """Launch parameters of the kernels."""
        v_dim = self.v.shape[-1] if output and self.v is not None else 0
        return teacher_launch(self.group, self.dim, v_dim, self.q.dtype, self.gpu)

    def constants(self, launch: TeacherLaunch) -> dict[str, int | bool | str]:
        """Compile-time arguments and launch options that both kernels share."""
        return {
            "GROUP": self.group, "PACK": launch.pack, "ROWS": launch.rows, "KEYS": launch.keys,
            "BLOCK_SIZE": self.block_size, "DIM": self.dim, "PADDED_DIM": padded(self.dim),
            "HAS_CAP": self.softcap is not None, "PRECISION": precision(self.q.dtype, self.gpu),
            "num_warps": launch.num_warps, "num_stages": launch.num_stages,
        }  # fmt: skip

    def attend(
        self, spans: Sequence[tuple[int, int]], out: Tensor | None, lse: Tensor, targets: Tensor | None = None
    ) -> None:
        """Fill ``lse`` and, if given, ``out`` and the past blocks of ``targets``, for a pack with segments ``spans``.

        Args:
            out: ``[T, H, dv]``.
            lse: ``[T, H]``, contiguous, fp32.
            targets: ``[T, Hkv, width]``, fp32; ``width`` covers every candidate block.
        """
        launch = self.launch(output=out is not None)
        whole = packs.row_tiles(packs.whole_segments(spans), launch.rows, packed=True)
        (tiles,) = packs.to_device([whole], lse.device)
        width = 0 if targets is None else targets.shape[-1]
        tile = launch.rows * launch.pack
        at_once = max(SCRATCH_BYTES // max(1, width * tile * 4), self.gpu.processors) // self.kv_heads
        table = tiles.table.split(max(1, at_once)) if width else [tiles.table]
        scratch = lse.new_empty(width * tile * min(len(tiles), max(1, at_once)) * self.kv_heads)
        v = self.k if self.v is None else self.v
        for part in table:
            for turn in range(0, self.group if len(part) else 0, launch.pack):
                teacher_kernels.attention_kernel[(len(part) * self.kv_heads,)](
                    self.q, self.k, v, lse if self.sinks is None else self.sinks, part,
                    lse if out is None else out, lse, lse if targets is None else targets, scratch,
                    len(part), self.kv_heads, width,
                    *self.q.stride()[:2], *self.k.stride()[:2], *v.stride()[:2],
                    *((0, 0) if out is None else out.stride()[:2]),
                    *((0, 0) if targets is None else targets.stride()[:2]),
                    self.scale, self.softcap or 1.0, turn, LATER_TURN=turn > 0, COLUMNS=16,
                    V_DIM=v.shape[-1], PADDED_V_DIM=padded(v.shape[-1]), HAS_SINKS=self.sinks is not None,
                    TWO_LOOPS=launch.two_loops and not self.window, OUTPUT=out is not None,
                    TARGETS=targets is not None, WINDOW=self.window or 0,
                    **self.constants(launch),
                )  # fmt: skip

    def maxima(self, tiles: packs.Tiles, lse: Tensor, targets: Tensor, step: int) -> None:
        """Fill the past blocks of ``targets [rows, Hkv, width]``, given ``lse [T, H]``; a tile's rows are ``step``
        tokens apart.
        """
        launch = self.launch()
        for turn in range(0, self.group if len(tiles) else 0, launch.pack):
            teacher_kernels.maxima_kernel[(len(tiles) * self.kv_heads,)](
                self.q, self.k, lse, tiles.table, targets, len(tiles), self.kv_heads,
                *self.q.stride()[:2], *self.k.stride()[:2], *targets.stride()[:2],
                self.scale, self.softcap or 1.0, turn, LATER_TURN=turn > 0, STEP=step,
                **self.constants(launch),
            )  # fmt: skip


def runs_here(q: Tensor, block_size: int, *others: Tensor) -> bool:
    """True if the kernels support these sizes and dtypes; if not, the torch backend runs."""
    return block_size in BLOCK_SIZES and all(x.shape[-1] <= MAX_HEAD_DIM.get(x.dtype, 0) for x in (q, *others))


@without_gradients
def attention_with_block_targets(pack: Pack, v: Tensor, block_size: int) -> AttentionWithTargets:
    """The op on checked arguments."""
    q = pack.q
    if not runs_here(q, block_size, v):
        return NotImplemented
    teacher = Teacher(pack, block_size, v)
    spans = packs.segments(pack.cu_seqlens, len(q))
    widest = max(-(-(end - start) // block_size) for start, end in spans)
    out = q.new_empty(*q.shape[:2], v.shape[-1], dtype=v.dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    targets = torch.full((q.shape[0], teacher.kv_heads, widest), -torch.inf, dtype=torch.float32, device=q.device)
    teacher.attend(spans, out, lse, targets)
    return AttentionWithTargets(out, lse, targets)


def rows_in_one_piece(x: Tensor) -> Tensor:
    """``x`` with its last dimension contiguous, copied only if it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
