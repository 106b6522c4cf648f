"""Distillation loss of retention gates: Fast KVzip's learn the attention that tokens receive."""

from __future__ import annotations

import torch
from torch import Tensor

from seergate import ops
from seergate.distill.losses.distill_loss import DistillLoss
from seergate.models.packed_forward import TeacherCall


class ImportanceLoss(DistillLoss):
    """Fast KVzip's loss: `ops.retention_kl`, with the gates' ``block_size`` as the distance."""

    def learn(self, call: TeacherCall, lse_TH: Tensor) -> None:
        gate = self.bank.retention_gate(call.layer)
        parameters = self.trainable(gate)
        with torch.set_grad_enabled(bool(parameters)):
            loss, stats = ops.retention_kl(
                call.query_BHSD[0].transpose(0, 1),
                call.key_BKSD[0].transpose(0, 1),
                gate(call.hidden_BSW)[0].T,
                self.cu_seqlens,
                self.bank.config.block_size,
                row_start=self.spec.row_start,
                sm_scale=call.sm_scale,
                recall_budgets=self.spec.recall_budgets,
                sinks=call.sinks,
                softcap=call.softcap,
                lse=lse_TH,
            )
        if parameters:
            self.gradients |= dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        self.losses.append(loss.detach())
        self.stats.append(stats)
