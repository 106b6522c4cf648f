"""Distillation losses of retention gates: layer by layer for Fast KVzip, end to end for TRIM-KV.

Fast KVzip's gates learn the attention that tokens receive, in the frozen model's forward pass.

TRIM-KV's gates learn through the whole model, which runs a second time with tokens that decay by the gates' beta. The
loss is ``KL(frozen || gated) + cross-entropy of the next token + capacity``; the first two are means over rows that
count. The capacity loss of row t is ``max(0, sum over s of beta(s) ** (t - s) - M)``, where M is the maximum number of
tokens of a KV head. It is divided by the length of the row's sequence and averaged over rows, layers and KV heads; the
paper's normalisation could not be confirmed. All three terms have weight 1. In the authors' released configuration,
the capacity loss has weight 1, too, but there is no cross-entropy.

Shape suffixes: T tokens of the pack, B = 1, S = T, R rows that count, V vocabulary, K KV heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from seergate import ops
from seergate.distill.losses.distill_loss import DistillLoss, DistillOutput, DistillSpec
from seergate.models.packed_forward import TeacherCall, intercepted_attention


class ImportanceLoss(DistillLoss):
    """Fast KVzip's loss: `ops.retention_kl`, with the gates' ``block_size`` as the distance."""

    def learn(self, call: TeacherCall, lse_TH: Tensor) -> None:
        gate = self.bank.gate(call.layer)
        parameters = self.trainable(gate)
        with torch.set_grad_enabled(bool(parameters)):
            loss, stats = compared(gate(call.hidden_BSW), call, lse_TH, self)
        self.add(loss, parameters)
        self.stats.append(stats)


def compared(
    scores_BKS: Tensor, call: TeacherCall, lse_TH: Tensor, distill_loss: DistillLoss
) -> tuple[Tensor, ops.GateKLStats]:
    """Return `ops.retention_kl` of one layer's scores: loss and statistics."""
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


class StudentLoss(DistillLoss):
    """TRIM-KV's loss, which compares the output of the gated model with that of the frozen model.

    Attributes:
        counted: indices of the rows of the pack that count, int64, in host memory.
    """

    def __init__(self, spec: DistillSpec, model: PreTrainedModel, cu_seqlens: Tensor) -> None:
        super().__init__(spec, model, cu_seqlens)
        self.counted = torch.cat([torch.arange(a + int((b - a) * spec.row_start), b) for a, b in self.segments])

    def learn(self, call: TeacherCall, lse_TH: Tensor) -> None:
        """Measure the layer's recall; the loss is computed from the model's output."""
        if self.spec.recall_budgets:
            with torch.no_grad():
                beta_BKS = self.bank.gate(call.layer)(call.hidden_BSW).exp()
                self.stats.append(compared(beta_BKS, call, lse_TH, self)[1])

    def compare(self, ids_1T: Tensor, positions_1T: Tensor, logits_RV: Tensor) -> None:
        """Compute the loss and its gradients from the frozen model's inputs and its logits of the rows that count."""
        last = torch.tensor([b - 1 for _, b in self.segments])
        rows, followed = self.counted.to(ids_1T.device), ~torch.isin(self.counted, last).to(ids_1T.device)
        parameters = self.trainable(self.bank)
        with torch.set_grad_enabled(bool(parameters)):
            gated_RV, excess = self._gated_logits(ids_1T, positions_1T, rows)
            log_p_RV, log_q_RV = logits_RV.float().log_softmax(-1), gated_RV.float().log_softmax(-1)
            loss = F.kl_div(log_q_RV, log_p_RV, log_target=True, reduction="batchmean") + excess
            if bool(followed.any()):
                loss = loss + F.nll_loss(log_q_RV[followed], ids_1T[0, rows[followed] + 1])
        self.add(loss, parameters)

    def _gated_logits(self, ids_1T: Tensor, positions_1T: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits ``[R, V]`` of the model with decaying tokens, and the capacity loss."""
        room, lengths = self.spec.target_budget, self.cu_seqlens.diff()
        share_T1 = (1 / lengths.repeat_interleave(lengths))[:, None].to(ids_1T.device)
        excess: list[Tensor] = []
        assert room is not None

        def attend(call: TeacherCall) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (call.query_BHSD, call.key_BKSD, call.value_BKSD))
            has_gate = call.layer in self.gate_of
            log_beta_TK = self.bank.gate(call.layer)(call.hidden_BSW)[0].T if has_gate else k.new_zeros(k.shape[:2])
            out = ops.retained_attention(
                q, k, v, log_beta_TK, self.cu_seqlens, call.sm_scale,
                window=call.window, sinks=call.sinks, softcap=call.softcap,
            )  # fmt: skip
            if has_gate:
                excess.append(((out.held - room).clamp(min=0) * share_T1.to(out.held)).mean().to(ids_1T.device))
            return out.output[None]

        with intercepted_attention(self.model, (), attend):
            output = self.model(input_ids=ids_1T, position_ids=positions_1T, use_cache=False, logits_to_keep=rows)
        return output.logits[0].to(ids_1T.device), torch.stack(excess).mean()

    def result(self) -> DistillOutput:
        layers, heads = len(self.gate_of), self.bank.geometry.num_kv_heads
        (loss,) = self.losses
        recall = loss.new_zeros(0, layers, heads)
        if self.stats:
            recall = torch.stack([stats.recall.float().to(loss.device) for stats in self.stats], dim=1)
        rows, recall_rows = loss.new_full((), len(self.counted)), self.stats[0].rows if self.stats else None
        return DistillOutput(self.total(1.0), loss.expand(layers), recall, self.tokens, rows, recall_rows)
