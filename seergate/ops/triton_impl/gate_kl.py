"""`gate_kl` in Triton, with gradients computed in the forward. Kernels: `gate_kl_kernels`.

For each chunk of rows, the teacher's log targets are written to a buffer; a kernel over rows computes the loss, the
gradient of ``qg`` and ``pi - p`` from them; a kernel over columns sums ``pi - p`` into the gradient of ``kg``. Nothing
waits for the device if ``cu_seqlens`` is in host memory.

The torch backend runs what the kernels do not support: float64, block sizes not in `BLOCK_SIZES`, heads and gates
wider than `MAX_HEAD_DIM`. Gates that are too wide in fp32 are first cast to bf16.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from seergate.ops.arguments import check_shape
from seergate.ops.attention import Pack
from seergate.ops.host_memory import copied
from seergate.ops.losses import GateKLStats, LossOptions
from seergate.ops.torch_impl import gate_kl as torch_impl
from seergate.ops.triton_impl import gate_kl_kernels, packs
from seergate.ops.triton_impl.launch import gate_launch, padded, precision, recall_launch
from seergate.ops.triton_impl.teacher import MAX_HEAD_DIM, Teacher, rows_in_one_piece, runs_here

CHUNK_BYTES = 64 * 2**20
"""Size of the buffer of log targets: at 32k tokens, enough rows to fill a GPU several times."""

TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def gate_kl(
    pack: Pack, qg: Tensor, kg: Tensor, block_size: int, gate_scale: float, options: LossOptions, lse: Tensor | None
) -> tuple[Tensor, GateKLStats]:
    """The op on checked arguments."""
    narrow = in_registers(qg, kg)
    if not runs_here(pack.q, block_size, *narrow):
        return NotImplemented
    qg, kg = narrow

    def run(want_dqg: bool, want_dkg: bool) -> torch_impl.Outcome:
        return evaluate(pack, qg, kg, block_size, gate_scale, options, lse, want_dqg, want_dkg)

    return torch_impl.with_gradients(run, qg, kg)


def in_registers(*sides: Tensor) -> list[Tensor]:
    """The gate's queries and keys, cast to bf16 if too wide for the kernels in fp32; the cast passes gradients."""
    too_wide = any(x.dtype == torch.float32 and x.shape[-1] > MAX_HEAD_DIM[x.dtype] for x in sides)
    return [x.to(torch.bfloat16) if too_wide and x.dtype == torch.float32 else x for x in sides]


@torch.compiler.disable
def evaluate(
    pack: Pack,
    qg: Tensor,
    kg: Tensor,
    block_size: int,
    gate_scale: float,
    options: LossOptions,
    lse: Tensor | None,
    want_dqg: bool,
    want_dkg: bool,
) -> torch_impl.Outcome:
    """Compute the loss, its statistics, and the gradients of qg and kg (``None`` if not wanted)."""
    q, device, kv_heads = pack.q, pack.q.device, pack.k.shape[1]
    sink_blocks, row_stride, recall_budgets = options.sink_blocks, options.row_stride, options.recall_budgets
    spans = packs.segments(pack.cu_seqlens, len(q))
    lengths = [end - start for start, end in spans]
    check_shape("kg", kg, (sum(-(-length // block_size) for length in lengths), *qg.shape[1:]))
    teacher = Teacher(pack, block_size)
    gate = Gate(qg, kg, block_size, gate_scale, teacher, row_stride, want_dqg, want_dkg, len(recall_budgets))
    sizes = teacher.launch().rows, gate.launch.rows, gate.launch.columns
    rows, chunks, tiles, row_weight = cut_up(tuple(spans), block_size, options, kv_heads, sizes, CHUNK_BYTES, device)
    cells = max((chunk.rows * chunk.width for chunk in chunks), default=0) * kv_heads
    buffers = gate.buffers(cells)
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        teacher.attend(spans, None, lse)
    lse = lse.float().contiguous()
    for chunk, (teacher_tiles, row_tiles, column_tiles) in zip(chunks, tiles, strict=True):
        shape = (chunk.rows, kv_heads, chunk.width)
        targets, delta, logits = (x[: chunk.rows * kv_heads * chunk.width].view(shape) for x in buffers)
        teacher.maxima(teacher_tiles, lse, targets, row_stride)
        gate.add_rows(row_tiles, targets, delta, logits)
        for index, budget in enumerate(recall_budgets):
            gate.add_recall(row_tiles, targets, logits, index, max(0, budget // block_size - 1 - sink_blocks))
        gate.add_columns(column_tiles, delta)

    # float64, since these sum over up to millions of rows.
    divisor = max(rows, 1)
    loss = (gate.kl.sum(0, dtype=torch.float64) * row_weight).sum()
    stats = (
        (gate.kl.sum(1, dtype=torch.float64) / divisor).float(),
        torch.full((), rows, dtype=torch.int64, device=device),
        (gate.recall.sum(2, dtype=torch.float64) / divisor).float(),
    )
    return loss.float(), stats, gate.dqg, None if gate.dkg is None else gate.dkg.to(kg.dtype)


@lru_cache(maxsize=4)
def cut_up(
    spans: tuple[tuple[int, int], ...],
    block_size: int,
    options: LossOptions,
    kv_heads: int,
    sizes: tuple[int, int, int],
    chunk_bytes: int,
    device: torch.device,
) -> tuple[int, list[packs.Chunk], list[tuple[packs.Tiles, packs.Tiles, packs.Tiles]], Tensor]:
    """Chunks and tiles of a pack, cached because all layers share them.

    Returns:
        The number of counted rows; the chunks; for each chunk the tiles of the three kernels, on the device; and the
        weight of each row of the pack in the loss, float64 ``[T]`` on the device.
    """
    lengths = [end - start for start, end in spans]
    rows, counted, weights = torch_impl.rows_and_weights(spans, block_size, kv_heads, options)
    pieces = packs.segment_pieces(spans, counted, block_size, weights, sink_blocks=options.sink_blocks)
    chunks = packs.chunks(pieces, block_size, chunk_bytes // (4 * kv_heads))
    parts = [
        part
        for chunk in chunks
        for part in (
            packs.row_tiles(chunk.pieces, sizes[0]),
            packs.row_tiles(chunk.pieces, sizes[1]),
            packs.column_tiles(chunk.pieces, sizes[2], block_size),
        )
    ]
    row_weight = torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    tables = packs.to_device(parts, device) if parts else []
    tiles = list(zip(tables[::3], tables[1::3], tables[2::3], strict=True))
    return rows, chunks, tiles, copied(row_weight, device)


class Gate:
    """The gate's side of the loss: buffers that a call accumulates, and the kernel launches.

    Args:
        qg, kg, block_size, gate_scale, row_stride: as in `seergate.ops.gate_kl`.
        budgets: number of budgets at which recall is measured.
    """

    def __init__(
        self,
        qg: Tensor,
        kg: Tensor,
        block_size: int,
        gate_scale: float,
        teacher: Teacher,
        row_stride: int,
        want_dqg: bool,
        want_dkg: bool,
        budgets: int,
    ) -> None:
        self.qg, self.kg = rows_in_one_piece(qg), rows_in_one_piece(kg)
        self.tokens, self.kv_heads, self.dim = qg.shape
        self.dtype = torch.promote_types(qg.dtype, kg.dtype)
        self.gate_scale, self.budgets = gate_scale, budgets
        self.block_size, self.row_stride, self.gpu = block_size, row_stride, teacher.gpu
        self.launch = gate_launch(self.dim, self.dtype, teacher.gpu)
        self.constants = {
            "BLOCK_SIZE": block_size, "ROWS": self.launch.rows, "COLUMNS": self.launch.columns, "DIM": self.dim,
            "PADDED_DIM": padded(self.dim), "COMPUTE": TRITON_TYPES[self.dtype],
            "PRECISION": precision(self.dtype, teacher.gpu), "STEP": row_stride,
            "num_warps": self.launch.num_warps, "num_stages": self.launch.num_stages,
        }  # fmt: skip
        self.kl = qg.new_zeros(self.kv_heads, self.tokens, dtype=torch.float32)
        self.recall = qg.new_zeros(budgets, self.kv_heads, self.tokens, dtype=torch.float32)
        self.dqg = qg.new_zeros(qg.shape) if want_dqg else None
        self.dkg = kg.new_zeros(kg.shape, dtype=torch.float32) if want_dkg else None

    def buffers(self, cells: int) -> tuple[Tensor, Tensor, Tensor]:
        """Flat buffers of ``cells`` log targets, ``pi - p`` and logits; the last two are dummies if not needed."""
        dummy = self.kl.new_empty(1).expand(cells)
        return (
            self.qg.new_empty(cells, dtype=torch.float32),
            dummy if self.dkg is None else self.qg.new_empty(cells, dtype=self.dtype),
            self.qg.new_empty(cells, dtype=torch.float32) if self.budgets else dummy,
        )

    def add_rows(self, tiles: packs.Tiles, targets: Tensor, delta: Tensor, logits: Tensor) -> None:
        """Add KL and ``dqg`` of these rows; fill ``delta`` and ``logits``."""
        gate_kl_kernels.rows_kernel[(len(tiles) * self.kv_heads,)](
            targets, self.qg, self.kg, tiles.table, tiles.weights, self.kl,
            self.qg if self.dqg is None else self.dqg, delta, logits,
            len(tiles), self.tokens, *targets.stride()[:2], *self.qg.stride()[:2], *self.kg.stride()[:2],
            *((0, 0) if self.dqg is None else self.dqg.stride()[:2]), self.gate_scale,
            WANT_DQG=self.dqg is not None, WANT_DELTA=self.dkg is not None, WANT_LOGITS=self.budgets > 0,
            **self.constants,
        )  # fmt: skip

    def add_columns(self, tiles: packs.Tiles, delta: Tensor) -> None:
        """Add these rows' contribution to ``dkg``."""
        if self.dkg is not None:
            gate_kl_kernels.columns_kernel[(len(tiles) * self.kv_heads,)](
                delta, self.qg, tiles.table, tiles.weights, self.dkg, len(tiles),
                *delta.stride()[:2], *self.qg.stride()[:2], *self.dkg.stride()[:2], self.gate_scale, **self.constants,
            )  # fmt: skip

    def add_recall(self, tiles: packs.Tiles, targets: Tensor, logits: Tensor, index: int, wanted: int) -> None:
        """Recall of these rows at one budget: the teacher's share in the ``wanted`` best past blocks.

        The kernel's rows are as wide as if the pack were a single segment. Packs are about equally full, so a training
        run compiles one kernel for samples of all lengths.
        """
        width = triton.next_power_of_2(max(16, self.tokens // self.block_size))
        turn, num_warps = recall_launch(width, self.launch.rows, self.gpu)
        gate_kl_kernels.recall_kernel[(len(tiles) * (self.launch.rows // turn) * self.kv_heads,)](
            targets, logits, tiles.table, self.recall[index], len(tiles), self.tokens, *targets.stride()[:2], wanted,
            BLOCK_SIZE=self.block_size, ROWS=self.launch.rows, TURN=turn, WIDTH=width, STEP=self.row_stride,
            num_warps=num_warps,
        )  # fmt: skip
