"""`gate_kl` in torch: chunks of rows, gradients in the forward.

Per row, with ``u`` the log targets before normalisation and ``a`` the gate's logits over past blocks:
``log p = u - logsumexp(u)``, ``log pi = a - logsumexp(a)``, ``KL = sum p (log p - log pi)``, ``dKL/da = pi - p``.

Shape suffixes: see `seergate.ops.torch_impl.teacher`; E gate dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seergate.ops.attention import Pack
from seergate.ops.gate_kl import GateKLStats, LossOptions, counted_rows, refuse_second_order
from seergate.ops.torch_impl.teacher import MASKED, Teacher, in_pack, segments, wide_dtype


def gate_kl(
    pack: Pack, qg: Tensor, kg: Tensor, block_size: int, gate_scale: float, options: LossOptions
) -> tuple[Tensor, GateKLStats]:
    """The public op, once its arguments are checked."""
    teacher = Teacher(pack, block_size, wide_dtype(pack.q, pack.k, qg, kg), options.lse, options.sink_blocks)
    return with_gradients(_Run(teacher, qg, kg, segments(pack.cu_seqlens), gate_scale, options), qg, kg)


def counted(
    spans: list[tuple[int, int]], block_size: int, kv_heads: int, options: LossOptions
) -> tuple[int, list[range], list[float]]:
    """How many rows count in all; by segment, which, and the weight of a row and KV head in the loss."""
    row_start, reduction, _, *which, _ = options
    lengths = [end - start for start, end in spans]
    rows = counted_rows(lengths, block_size, row_start, *which)
    total, weights = row_weights(lengths, rows, row_start, block_size, kv_heads, reduction)
    return total, rows, weights


def row_weights(
    lengths: list[int], rows: list[range], row_start: float, block_size: int, kv_heads: int, reduction: str
) -> tuple[int, list[float]]:
    """How many rows count in all; by segment, the weight of a row and KV head in the loss."""
    counted = sum(map(len, rows))
    if reduction == "row_mean":
        return counted, [1.0 / (kv_heads * max(counted, 1))] * len(lengths)
    filled = sum(length > 0 for length in lengths)
    widest = max(-(-length // block_size) for length in lengths)
    return counted, [
        1.0 / (filled * kv_heads * (length - int(length * row_start)) * widest) if length else 0.0
        for length in lengths
    ]


Outcome = tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]
"""Loss, the three tensors of `GateKLStats`, gradients of queries and keys where they are wanted."""


class GradientsInForward(torch.autograd.Function):
    """Computes the gradients along with the loss; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, qg: Tensor, kg: Tensor, run: Callable[[bool, bool], Outcome], want_dqg: bool, want_dkg: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        loss, stats, dqg, dkg = run(want_dqg, want_dkg)
        ctx.save_for_backward(dqg, dkg)
        ctx.mark_non_differentiable(*stats)
        ctx.set_materialize_grads(False)
        return loss, *stats

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        dqg, dkg = ctx.saved_tensors
        # grad_loss stays on the device: no value is read. Being 0-dim it does not widen a bf16 gradient.
        scaled = (None if grad is None or grad_loss is None else grad * grad_loss for grad in (dqg, dkg))
        return *scaled, None, None, None


def with_gradients(run: Callable[[bool, bool], Outcome], queries: Tensor, keys: Tensor) -> tuple[Tensor, GateKLStats]:
    """The loss and its statistics, with gradients to the queries and keys that want them."""
    wanted = torch.is_grad_enabled()
    want_dq, want_dk = wanted and queries.requires_grad, wanted and keys.requires_grad
    loss, *stats = GradientsInForward.apply(queries, keys, run, want_dq, want_dk)
    return loss, GateKLStats(*stats)


class Sums:
    """The loss, and KL and recall by head, summed in float64 over up to millions of rows."""

    def __init__(self, kv_heads: int, budgets: int, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.kl_K = torch.zeros(kv_heads, dtype=torch.float64, device=device)
        self.recall_IK = torch.zeros(budgets, kv_heads, dtype=torch.float64, device=device)

    def add(self, kl: Tensor, weight: float, head: int) -> None:
        """Add the KL of some rows of a head."""
        self.kl_K[head] += kl
        self.loss += weight * kl

    def outcome(self, rows: int, dtype: torch.dtype, dq: Tensor | None, dk: Tensor | None) -> Outcome:
        """The loss, the means over ``rows``, and the gradients."""
        count = torch.full((), rows, device=self.loss.device)
        kl_K, recall_IK = ((x / max(rows, 1)).to(dtype) for x in (self.kl_K, self.recall_IK))
        return self.loss.to(dtype), (kl_K, count, recall_IK), dq, dk


class _Run:
    """One evaluation of the loss. Row weights are plain numbers, so segment borders must be known on the host."""

    def __init__(
        self,
        teacher: Teacher,
        qg_TKE: Tensor,
        kg_MKE: Tensor,
        spans: list[tuple[int, int]],
        gate_scale: float,
        options: LossOptions,
    ) -> None:
        self.teacher, self.spans, self.gate_scale = teacher, spans, gate_scale
        self.qg_TKE, self.kg_MKE = qg_TKE.detach(), kg_MKE.detach()
        always = 1 + teacher.sink_blocks
        self.past_blocks = [budget // teacher.block_size - always for budget in options.recall_budgets]
        self.rows, rows, self.weights = counted(spans, teacher.block_size, teacher.kv_heads, options)
        self.plans = [teacher.chunks(some) for some in rows]

    def __call__(self, want_dqg: bool, want_dkg: bool) -> Outcome:
        teacher, kv_heads = self.teacher, self.teacher.kv_heads
        dtype, device = teacher.dtype, self.qg_TKE.device
        self.dqg_TKE = torch.zeros_like(self.qg_TKE, memory_format=torch.contiguous_format) if want_dqg else None
        shape = (kv_heads, self.kg_MKE.shape[0], self.kg_MKE.shape[2])
        self.dkg_KME = torch.zeros(shape, dtype=dtype, device=device) if want_dkg else None
        self.sums = Sums(kv_heads, len(self.past_blocks), device)
        scratch = teacher.scratch(self.plans)
        block = 0  # where the segment's entries of kg start
        for (start, stop), plan, weight in zip(self.spans, self.plans, self.weights, strict=True):
            for head in range(kv_heads if plan else 0):
                kl = self._segment_head(start, stop, block, plan, weight, head, scratch)
                self.sums.add(kl, weight, head)
            block += -(-(stop - start) // teacher.block_size)
        dkg = None if self.dkg_KME is None else self.dkg_KME.transpose(0, 1).to(self.kg_MKE.dtype)
        return self.sums.outcome(self.rows, dtype, self.dqg_TKE, dkg)

    def _segment_head(
        self, start: int, stop: int, block: int, plan: list[range], weight: float, head: int, scratch: Tensor
    ) -> Tensor:
        """KL of one segment and KV head, summed over its rows (float64); adds to the gradients."""
        teacher, factor = self.teacher, weight * self.gate_scale
        keys_SD = teacher.head_keys(start, stop, head)
        first, blocks = block + teacher.sink_blocks, plan[-1][-1] // teacher.block_size  # candidates of the last row
        kg_ME = self.kg_MKE[first : block + blocks, head].to(teacher.dtype).contiguous()
        total = torch.zeros((), dtype=torch.float64, device=keys_SD.device)
        for rows in plan:
            u_NR = teacher.log_targets(keys_SD, start, rows, head, scratch)
            count, here = len(u_NR), in_pack(start, rows)
            qg_RE = self.qg_TKE[here, head].to(teacher.dtype)
            logits_NR = (kg_ME[:count] @ qg_RE.T).mul_(self.gate_scale)
            logits_NR.masked_fill_(teacher.not_past(rows), MASKED)
            log_p_NR, log_pi_NR = u_NR.log_softmax(0), logits_NR.log_softmax(0)
            p_NR = log_p_NR.exp()
            total += ((log_p_NR - log_pi_NR) * p_NR).sum(dtype=torch.float64)
            if self.past_blocks:
                self._add_recall(log_pi_NR, p_NR, head)
            if self.dqg_TKE is None and self.dkg_KME is None:
                continue
            delta_NR = log_pi_NR.exp_().sub_(p_NR)
            if self.dqg_TKE is not None:
                self.dqg_TKE[here, head] = (delta_NR.T @ kg_ME[:count]).mul_(factor)
            if self.dkg_KME is not None:
                self.dkg_KME[head, first : first + count].addmm_(delta_NR, qg_RE, alpha=factor)
        return total

    def _add_recall(self, log_pi_NR: Tensor, p_NR: Tensor, head: int) -> None:
        """Teacher's share in the gate's best blocks, at every budget from one top-k."""
        most = min(max(self.past_blocks), len(p_NR))
        if most <= 0:
            return
        best_RX = log_pi_NR.T.contiguous().topk(most, dim=1).indices
        mass_RX = p_NR.T.gather(1, best_RX).cumsum(1)
        for i, wanted in enumerate(self.past_blocks):
            if wanted > 0:
                self.sums.recall_IK[i, head] += mass_RX[:, min(wanted, most) - 1].sum(dtype=torch.float64)
