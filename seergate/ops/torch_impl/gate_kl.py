"""`gate_kl` in torch: works on chunks of rows and computes gradients in the forward.

Per row, with ``u`` the log targets before normalisation and ``a`` the gate's logits over past blocks:
``log p = u - logsumexp(u)``, ``log pi = a - logsumexp(a)``, ``KL = sum p (log p - log pi)``, ``dKL/da = pi - p``.

Shape suffixes: see `seergate.ops.torch_impl.teacher`; E gate dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seergate.ops.attention import Pack
from seergate.ops.losses import GateKLStats, LossOptions, counted_rows
from seergate.ops.torch_impl.teacher import MASKED, Teacher, compute_dtype, in_pack


def gate_kl(
    pack: Pack, qg: Tensor, kg: Tensor, block_size: int, gate_scale: float, options: LossOptions, lse: Tensor | None
) -> tuple[Tensor, GateKLStats]:
    """The op on checked arguments."""
    dtype, sink_blocks = compute_dtype(pack.q, pack.k, qg, kg), options.sink_blocks
    teacher = Teacher(pack, block_size, dtype, lse, sink_blocks)
    total, counted, weights = rows_and_weights(teacher.spans, block_size, teacher.kv_heads, options)
    plans = [teacher.chunks(rows) for rows in counted]
    past_blocks = [budget // block_size - 1 - sink_blocks for budget in options.recall_budgets]
    qg_TKE, kg_MKE = qg.detach(), kg.detach()

    def run(want_dqg: bool, want_dkg: bool) -> Outcome:
        device, kv_heads = qg.device, teacher.kv_heads
        dqg_TKE = torch.zeros_like(qg_TKE, memory_format=torch.contiguous_format) if want_dqg else None
        shape = kv_heads, kg_MKE.shape[0], kg_MKE.shape[2]
        dkg_KME = torch.zeros(shape, dtype=dtype, device=device) if want_dkg else None
        sums, scratch = Sums(kv_heads, len(past_blocks), device), teacher.scratch(plans)
        entry = 0  # index in kg of the segment's first key
        for (start, stop), plan, weight in zip(teacher.spans, plans, weights, strict=True):
            factor = weight * gate_scale
            for head in range(kv_heads if plan else 0):
                keys_SD = teacher.head_keys(start, stop, head)
                first, blocks = entry + sink_blocks, plan[-1][-1] // block_size  # candidates of the last row
                kg_ME = kg_MKE[first : entry + blocks, head].to(dtype).contiguous()
                kl = torch.zeros((), dtype=torch.float64, device=device)
                for rows in plan:
                    u_NR = teacher.log_targets(keys_SD, start, rows, head, scratch)
                    count, here = len(u_NR), in_pack(start, rows)
                    qg_RE = qg_TKE[here, head].to(dtype)
                    logits_NR = (kg_ME[:count] @ qg_RE.T).mul_(gate_scale)
                    logits_NR.masked_fill_(teacher.not_past(rows), MASKED)
                    log_p_NR, log_pi_NR = u_NR.log_softmax(0), logits_NR.log_softmax(0)
                    p_NR = log_p_NR.exp()
                    kl += ((log_p_NR - log_pi_NR) * p_NR).sum(dtype=torch.float64)
                    add_recall(sums.recall_IK[:, head], past_blocks, logits_NR, p_NR)
                    if dqg_TKE is None and dkg_KME is None:
                        continue
                    delta_NR = log_pi_NR.exp_().sub_(p_NR)
                    if dqg_TKE is not None:
                        dqg_TKE[here, head] = (delta_NR.T @ kg_ME[:count]).mul_(factor)
                    if dkg_KME is not None:
                        dkg_KME[head, first : first + count].addmm_(delta_NR, qg_RE, alpha=factor)
                sums.add(kl, weight, head)
            entry += -(-(stop - start) // block_size)
        dkg = None if dkg_KME is None else dkg_KME.transpose(0, 1).to(kg.dtype)
        return sums.outcome(total, dtype, dqg_TKE, dkg)

    return with_gradients(run, qg, kg)


def rows_and_weights(
    spans: Sequence[tuple[int, int]], block_size: int, kv_heads: int, options: LossOptions
) -> tuple[int, list[range], list[float]]:
    """Number of counted rows; per segment, its counted rows and the weight of a row and KV head in the loss."""
    lengths, row_start = [end - start for start, end in spans], options.row_start
    rule = options.sink_blocks, options.row_stride, options.row_shift
    rows = counted_rows(lengths, block_size, row_start, *rule)
    counted = sum(map(len, rows))
    if options.reduction == "row_mean":
        return counted, rows, [1.0 / (kv_heads * max(counted, 1))] * len(lengths)
    filled = sum(length > 0 for length in lengths)
    widest = max(-(-length // block_size) for length in lengths)
    rest = (length - int(length * row_start) for length in lengths)
    return counted, rows, [1.0 / (filled * kv_heads * count * widest) if count else 0.0 for count in rest]


Outcome = tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]
"""Loss, the three tensors of `GateKLStats`, and the gradients of queries and keys, ``None`` if not wanted."""


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
        if torch.is_grad_enabled():  # it would be 0, as the saved gradients are constants
            raise RuntimeError("gate_kl has no second derivative; call backward without create_graph")
        dqg, dkg = ctx.saved_tensors
        # grad_loss stays on the device: no value is read. As a 0-dim tensor it does not widen a bf16 gradient.
        scaled = (None if grad is None or grad_loss is None else grad * grad_loss for grad in (dqg, dkg))
        return *scaled, None, None, None


def with_gradients(run: Callable[[bool, bool], Outcome], queries: Tensor, keys: Tensor) -> tuple[Tensor, GateKLStats]:
    """Loss and statistics from ``run``, with gradients to queries and keys that require them."""
    grad_enabled = torch.is_grad_enabled()
    want_dq, want_dk = grad_enabled and queries.requires_grad, grad_enabled and keys.requires_grad
    loss, *stats = GradientsInForward.apply(queries, keys, run, want_dq, want_dk)
    return loss, GateKLStats(*stats)


class Sums:
    """Sums of the loss, and of KL and recall per head, in float64 over up to millions of rows."""

    def __init__(self, kv_heads: int, budgets: int, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.kl_K = torch.zeros(kv_heads, dtype=torch.float64, device=device)
        self.recall_IK = torch.zeros(budgets, kv_heads, dtype=torch.float64, device=device)

    def add(self, kl: Tensor, weight: float, head: int) -> None:
        """Add the KL of some rows of a head, with their weight in the loss."""
        self.kl_K[head] += kl
        self.loss += weight * kl

    def outcome(self, rows: int, dtype: torch.dtype, dq: Tensor | None, dk: Tensor | None) -> Outcome:
        """The loss, the means over ``rows``, and the gradients."""
        count = torch.full((), rows, device=self.loss.device)
        kl_K, recall_IK = ((x / max(rows, 1)).to(dtype) for x in (self.kl_K, self.recall_IK))
        return self.loss.to(dtype), (kl_K, count, recall_IK), dq, dk


def add_recall(recall_I: Tensor, past_blocks: list[int], logits_NR: Tensor, p_NR: Tensor) -> None:
    """Add the teacher's probability in the gate's best ``past_blocks`` blocks, summed over rows. Ties go to the lower
    index, as in decoding.
    """
    most = min(max(past_blocks, default=0), len(p_NR))
    if most <= 0:
        return
    best_RX = logits_NR.T.contiguous().sort(dim=1, descending=True, stable=True).indices[:, :most]
    mass_RX = p_NR.T.gather(1, best_RX).cumsum(1)
    for recall, block_count in zip(recall_I, past_blocks, strict=True):
        if block_count > 0:
            recall += mass_RX[:, min(block_count, most) - 1].sum(dtype=torch.float64)
