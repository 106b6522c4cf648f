"""`gate_kl`: the gate's distillation loss and its gradients, in memory that grows linearly with the pack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seergate.checks import check, is_int, is_number
from seergate.config import check_rows
from seergate.ops.attention import check_pack
from seergate.ops.backend import implementation
from seergate.ops.checks import check_block_size, check_scale, check_tensor, readable

REDUCTIONS = ("row_mean", "published")


class GateKLStats(NamedTuple):
    """Statistics of one `gate_kl` for the training log: detached tensors on the inputs' device.

    A row is counted if it has at least one strictly past block after the first ``sink_blocks`` and its index in its
    segment of length ``L`` is at least ``int(L * row_start)``, whatever the reduction. Of a segment's rows with these
    properties every ``row_stride``-th is counted, from number ``row_shift % row_stride`` on.

    Attributes:
        kl_per_head: ``[Hkv]``, mean KL in nats over the counted rows; 0 without any.
        rows: int64 scalar, how many rows were counted (per head).
        recall: ``[len(recall_budgets), Hkv]``, mean over the counted rows of the teacher's share (`block_targets`) in
            the gate's best ``budget // block_size - 1 - sink_blocks`` blocks; 0 without any row.
    """

    kl_per_head: Tensor
    rows: Tensor
    recall: Tensor


RowRule = tuple[float, int, int, int]
"""The rule for the rows that count: ``row_start``, ``sink_blocks``, ``row_stride`` and ``row_shift`` of `gate_kl`."""


class LossOptions(NamedTuple):
    """Arguments that the losses share, checked; see `gate_kl`."""

    row_start: float
    reduction: str
    recall_budgets: tuple[int, ...]
    sink_blocks: int
    row_stride: int
    row_shift: int
    lse: Tensor | None

    @property
    def row_rule(self) -> RowRule:
        """The rule for the rows that count."""
        return self.row_start, self.sink_blocks, self.row_stride, self.row_shift


def gate_kl(
    q: Tensor,
    k: Tensor,
    qg: Tensor,
    kg: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    *,
    row_start: float = 0.0,
    sm_scale: float | None = None,
    gate_scale: float | None = None,
    reduction: str = "row_mean",
    recall_budgets: tuple[int, ...] = (),
    sink_blocks: int = 0,
    row_stride: int = 1,
    row_shift: int = 0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, GateKLStats]:
    """KL divergence from the teacher's block distribution to the gate's.

    Per row ``t`` and KV head, over the strictly past blocks ``j``: ``KL = sum_j p_j (log p_j - log pi_j)`` with ``p``
    the `block_targets` and ``pi = softmax_j(gate_scale * qg_t . kg_j)``. All in log domain, fp32 or wider. The
    gradients with respect to ``qg`` and ``kg`` are computed in the forward, where they are needed; the backward only
    scales them. Nothing of size rows x blocks outlives a chunk of rows. No gradient flows to ``q`` and ``k``: the
    teacher is frozen.

    On GPUs, gates in fp32 that are wider than 128 are multiplied in bf16, for which there are registers; sums, the
    softmax and the results are fp32.

    Args:
        q: ``[T, H, d]`` packed queries as the attention sees them (after RoPE).
        k: ``[T, Hkv, d]`` packed keys, likewise.
        qg: ``[T, Hkv, dg]`` the gate's queries; only those of `counted_rows` are read.
        kg: ``[sum NB_i, Hkv, dg]`` the gate's keys; segment i of length ``L_i`` has ``NB_i = ceil(L_i / block_size)``
            of them. The last one is never a candidate, so its value does not matter.
        cu_seqlens: int32 ``[n + 1]``, segment borders; segments may be empty. In host memory it costs no device
            synchronisation.
        block_size: tokens per block; blocks are counted from each segment's start.
        row_start: of a segment of length ``L``, rows from ``int(L * row_start)`` on count; in [0, 1).
        sm_scale: factor on ``q . k``; ``1 / sqrt(d)`` if ``None``.
        gate_scale: factor on ``qg . kg``; ``1 / sqrt(dg)`` if ``None``.
        reduction: ``"row_mean"``: mean over every counted (row, KV head), see `GateKLStats`; comparable across
            packings. ``"published"``: per segment, the sum of its KL divided by ``Hkv * rows * NBmax``, where ``rows``
            also counts rows without a past block and ``NBmax`` is the block count of the pack's longest segment; then
            the mean over the segments that are not empty (in the published code an empty one would make it NaN).
        recall_budgets: token budgets, the current block and the sink blocks included, at which to measure recall.
        sink_blocks: the first blocks of each segment, which decoding always reads: they are left out of both
            distributions, and the target is normalised over the others.
        row_stride, row_shift: count every ``row_stride``-th row, see `GateKLStats`; neighbours are nearly alike.
        sinks: ``[H]`` attention-sink logits of the teacher (GPT-OSS).
        softcap: cap on the teacher's scores (Gemma 2).
        lse: ``[T, H]``, what `packed_attention` returns beside the output: the natural
            log of each softmax's denominator (scale, cap and sink included). Saves computing it.

    Returns:
        The loss, a scalar in fp32 (float64 if any of q, qg, kg is), and `GateKLStats`. Without a counted row the loss
        and its gradients are 0.
    """
    pack = check_pack(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_block_size(block_size)
    tokens, kv_heads = k.shape[:2]
    check_tensor("qg", qg, (tokens, kv_heads, "dg"), on=("q", q))
    blocks: int | str = "sum NB_i"
    if readable(cu_seqlens):
        blocks = int((cu_seqlens.diff() + block_size - 1).div(block_size, rounding_mode="floor").sum())
    check_tensor("kg", kg, (blocks, kv_heads, qg.shape[-1]), on=("q", q))
    gate_scale = check_scale("gate_scale", gate_scale, qg.shape[-1])
    options = check_loss(q, block_size, row_start, reduction, recall_budgets, lse, sink_blocks, row_stride, row_shift)
    return implementation("gate_kl", q.device)(
        pack=pack, qg=qg, kg=kg, block_size=block_size, gate_scale=gate_scale, options=options
    )


def check_loss(
    q: Tensor,
    block_size: int,
    row_start: float,
    reduction: str,
    recall_budgets: Sequence[int],
    lse: Tensor | None,
    sink_blocks: int = 0,
    row_stride: int = 1,
    row_shift: int = 0,
) -> LossOptions:
    """Check the arguments that the losses share."""
    if lse is not None:
        check_tensor("lse", lse, q.shape[:2], on=("q", q))
    check("row_start", row_start, is_number(row_start) and 0 <= row_start < 1, "at least 0 and less than 1")
    check("reduction", reduction, reduction in REDUCTIONS, f"one of {', '.join(REDUCTIONS)}")
    check_rows(reduction, sink_blocks, row_stride)
    check("row_shift", row_shift, is_int(row_shift) and row_shift >= 0, "an integer of at least 0")
    budgets = tuple(recall_budgets) if isinstance(recall_budgets, Sequence) else (0,)
    if not all(is_int(budget) and budget >= block_size for budget in budgets):
        raise ValueError(
            f"recall_budgets is {recall_budgets!r}; each must be an integer of at least block_size ({block_size})"
        )
    return LossOptions(row_start, reduction, budgets, sink_blocks, row_stride, row_shift, lse)


def counted_rows(
    lengths: Sequence[int], block_size: int, row_start: float, sink_blocks: int, row_stride: int, row_shift: int
) -> list[range]:
    """By segment, the rows that count, see `GateKLStats`; `gate_kl` reads ``qg`` of these only."""
    least = (1 + sink_blocks) * block_size
    rows = [range(min(max(int(length * row_start), least), length), length) for length in lengths]
    return [some[row_shift % row_stride :: row_stride] for some in rows]


def refuse_second_order() -> None:
    """Refuse a second derivative, in the backward: the saved gradients are constants, so it would be zero."""
    if torch.is_grad_enabled():
        raise RuntimeError("gate_kl has no second derivative; call backward without create_graph")
