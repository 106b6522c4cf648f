"""Fast KVzip's gates in the frozen model's forward: each layer's learn the attention that its tokens receive.

Shape suffixes: T tokens of the pack, B = 1, S = T, H query heads, K KV heads, D head dimension, W width of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seergate import ops
from seergate.hf.distill_loss import DistillLoss, LayerwiseLoss
from seergate.hf.teacher_pass import TeacherCall


class ImportanceLoss(LayerwiseLoss):
    """The loss is `ops.retention_kl`, with the gates' ``block_size`` as the distance."""

    def learn(self, call: TeacherCall, lse_TH: Tensor) -> None:
        gate = self.bank.retention_gate(call.layer)
        parameters = [p for p in gate.parameters() if p.requires_grad] if self.wants_gradients else []
        with torch.set_grad_enabled(bool(parameters)):
            loss, stats = compared(gate(call.hidden_BSW), call, lse_TH, self)
        if parameters:
            self.gradients |= dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        self.losses.append(loss.detach())
        self.stats.append(stats)


def compared(
    scores_BKS: Tensor, call: TeacherCall, lse_TH: Tensor, distill_loss: DistillLoss
) -> tuple[Tensor, ops.GateKLStats]:
    """`ops.retention_kl` of some scores, in one layer."""
    return ops.retention_kl(
        call.query_BHSD[0].transpose(0, 1),
        call.key_BKSD[0].transpose(0, 1),
        scores_BKS[0].T,
        distill_loss.cu_seqlens,
        distill_loss.bank.config.block_size,
        row_start=distill_loss.spec.row_start,
        sm_scale=call.sm_scale,
        recall_budgets=distill_loss.spec.recall_budgets,
        sinks=call.sinks,
        softcap=call.softcap,
        lse=lse_TH,
    )
