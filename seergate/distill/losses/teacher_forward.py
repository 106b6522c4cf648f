"""Computes the gates' loss and gradients in one forward pass of the frozen model.

In each gated layer, the teacher's targets, the gate's loss and the gradients of the gate's parameters are computed at
once, and all intermediate tensors are freed. So peak memory is that of one layer, and linear in the pack's length. The
model runs without its LM head and without an autograd graph. Gates that are trained end to end need its output and a
second pass with a graph (`seergate.distill.losses.retention_loss`).

Shape suffixes: T tokens of the pack, H query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from seergate.config import SCORERS, class_of
from seergate.distill.losses.distill_loss import DistillLoss, DistillOutput, DistillSpec, positions_of
from seergate.distill.losses.retention_loss import StudentLoss
from seergate.gates.bank import Gates
from seergate.models import families
from seergate.models.packed_forward import TeacherCall, intercepted_attention
from seergate.ops.arguments import check_cu_seqlens
from seergate.ops.host_memory import copied


def distill_step(
    bank: Gates, model: PreTrainedModel, input_ids: Tensor, cu_seqlens: Tensor | None = None, **options: Any
) -> DistillOutput:
    """Run the frozen model on one pack and compute the gates' distillation loss and gradients.

    Args:
        model: the frozen model, in eval mode; otherwise `SeergateError` is raised.
        input_ids: ``[1, T]`` or ``[T]``; `ValueError` is raised for another shape.
        cu_seqlens: int32 ``[n + 1]``, the offset of each sequence, then ``T``; one sequence if ``None``.
        **options: the other fields of `DistillSpec`.
    """
    return distill_steps([DistillSpec(bank, **options)], model, input_ids, cu_seqlens)[0]


def distill_steps(
    specs: Sequence[DistillSpec], model: PreTrainedModel, input_ids: Tensor, cu_seqlens: Tensor | None = None
) -> list[DistillOutput]:
    """Run `distill_step` for several gates in one forward pass; each result is the same as for the gates alone."""
    if input_ids.ndim == 1:
        input_ids = input_ids[None]
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; a pack is [1, T]")
    families.check_eval_mode(model)
    total = input_ids.shape[1]
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, total], dtype=torch.int32)
    cu_seqlens = cu_seqlens.cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    check_cu_seqlens(cu_seqlens, total)

    distill_losses: list[DistillLoss] = [
        class_of(SCORERS[spec.bank.config.scorer].loss)(spec, model, cu_seqlens) for spec in specs
    ]
    students = [each for each in distill_losses if isinstance(each, StudentLoss)]
    gated = {layer for each in distill_losses for layer in each.gate_of}

    def attend(call: TeacherCall) -> Tensor:
        """Compute a layer's attention over the pack, ``[1, T, H, D]``, and the losses of its gates, if any."""
        output_THD, lse_TH = call.attention(cu_seqlens)
        for each in distill_losses:
            if call.layer in each.gate_of:
                each.learn(call, lse_TH)
        return output_THD[None]

    # With disk offload, the model is on the meta device, so the gates' device is used.
    device = next(specs[0].bank.parameters()).device if model.device.type == "meta" else model.device
    ids, positions = copied(input_ids, device), copied(positions_of(cu_seqlens), device)[None]
    with intercepted_attention(model, gated, attend), torch.no_grad():
        if students:
            rows = torch.cat([each.counted for each in students]).unique()
            output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=copied(rows, device))
        else:
            families.decoder_of(model)(input_ids=ids, position_ids=positions, use_cache=False)
    for each in students:
        each.compare(ids, positions, output.logits[0].to(device)[torch.isin(rows, each.counted).to(device)])
    return [each.result() for each in distill_losses]
