"""The base class of the distillation losses of gates on a pack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.models import families
from seergate.ops import GateKLStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from seergate.hf.teacher_pass import TeacherCall

PUBLISHED_SCALE = 10.0
"""Factor of the published code's loss (``gate_loss_scale``), by which gradient clipping begins at smaller gradients.
"""


@dataclass(frozen=True)
class DistillOutput:
    """Loss and statistics of the gates on one pack.

    Attributes:
        loss: scalar; ``.backward()`` adds the gates' gradients. NaN if it or a gradient is not finite; then it adds
            zeros.
        kl_per_layer: ``[layers]``, mean KL in nats per row and KV head, whatever the reduction; of Fast KVzip's gates
            per token and KV head; of TRIM-KV's, which learn from the model's output, their loss, for all layers.
        recall: ``[budgets, layers, KV heads]``, mean share of the teacher's mass on past blocks that the gate's best
            blocks hold; of retention gates see `ops.retention_kl`.
        tokens: tokens of the pack.
        far: ``[layers, 3 + 2 * budgets]``, see `seergate.hf.far.far_sums`; with ``DistillSpec.far``.
    """

    loss: Tensor
    kl_per_layer: Tensor
    recall: Tensor
    tokens: int
    far: Tensor | None = None


@dataclass(frozen=True)
class DistillSpec:
    """Gates and the options of their distillation loss.

    Attributes:
        bank: the gates; on the model's device, and for this model (`seergate.models.families.check_gates`).
        row_start, reduction: see `ops.gate_kl`. ``"row_mean"`` is averaged over layers, ``"published"`` summed and
            multiplied by `PUBLISHED_SCALE`.
        recall_budgets: token budgets to report recall at.
        target, target_budget: see `ops.scorer_kl`.
        row_stride, row_shift: see `ops.gate_kl`.
        far: whether gates of blocks are compared outside the first block and the newest one, too.
    """

    bank: Gates
    row_start: float = 0.5
    reduction: str = "row_mean"
    recall_budgets: tuple[int, ...] = ()
    target: str = "max"
    target_budget: int | None = None
    row_stride: int = 1
    row_shift: int = 0
    far: bool = False


class DistillLoss(ABC):
    """The loss of gates on one pack, accumulated layer by layer in the frozen model's forward.

    Attributes:
        gate_of: each layer that a gate learns from -> the layer of that gate; ascending.
        losses, stats: loss and statistics of each of these layers so far.
        gradients: gradients of the gates' parameters.
    """

    def __init__(self, spec: DistillSpec, model: PreTrainedModel, cu_seqlens: Tensor) -> None:
        if len(cu_seqlens) > 2 and (reason := families.why_one_sequence(families.text_config(model))):
            raise SeergateError(f"{reason}; its packs must hold one sequence each")
        self.spec, self.bank, self.model = spec, spec.bank, model
        self.cu_seqlens = cu_seqlens  # in host memory, where ops read it for free
        self.tokens = int(cu_seqlens[-1])
        self.segments = [(a, b) for a, b in pairwise(cu_seqlens.tolist()) if b > a]
        self.gate_of = {layer: layer for layer in self.bank.geometry.layers}
        self.wants_gradients = torch.is_grad_enabled()  # the caller's wish; the model itself runs without a graph
        self.losses: list[Tensor] = []
        self.stats: list[GateKLStats] = []
        self.far: list[Tensor] = []
        self.gradients: dict[nn.Parameter, Tensor] = {}

    @abstractmethod
    def learn(self, call: TeacherCall, lse_TH: Tensor) -> None:
        """Process one of the layers of `gate_of` during the frozen model's forward."""

    def result(self) -> DistillOutput:
        """The result, once the forward pass has ended."""
        home = self.losses[0].device
        readers = [len(list(group)) for _, group in groupby(self.gate_of.values())]  # layers of each gate
        kls = torch.stack([stats.kl_per_head.float().mean().to(home) for stats in self.stats])
        recalls = torch.stack([stats.recall.float().to(home) for stats in self.stats], dim=1)
        kl_per_layer = torch.stack([part.mean() for part in kls.split(readers)])
        recall = torch.stack([part.mean(1) for part in recalls.split(readers, dim=1)], dim=1)
        share = 1.0 / len(self.losses) if self.spec.reduction == "row_mean" else PUBLISHED_SCALE
        sums = [sums.to(home) for sums in self.far]
        far = torch.stack([part.sum(0) for part in torch.stack(sums).split(readers)]) if sums else None
        return DistillOutput(self.total(share), kl_per_layer, recall, self.tokens, far)

    def trainable(self, gates: nn.Module) -> list[nn.Parameter]:
        """The parameters of gates that get gradients: none if the caller wants none."""
        return [p for p in gates.parameters() if p.requires_grad and self.wants_gradients]

    def add(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        """Add a loss that has a graph, and its gradients."""
        if parameters:
            self.gradients |= dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        self.losses.append(loss.detach())

    def total(self, share: float) -> Tensor:
        """The losses of all layers as one, times ``share``, with the gradients tied to it."""
        home = self.losses[0].device  # the layers of a split model report from several devices
        total = torch.stack([loss.float().to(home) for loss in self.losses]).sum() * share
        parameters = list(self.gradients)
        stored = [self.gradients[p] * share for p in parameters]
        finite = torch.stack([total.isfinite(), *(x.isfinite().all().to(home) for x in stored)]).all()
        total = torch.where(finite, total, torch.nan)
        if parameters:
            # Decided on the device: nobody waits for it.
            stored = [torch.where(finite.to(x.device), x, torch.zeros_like(x)) for x in stored]
            total = StoredGradients.apply(total, len(stored), *stored, *parameters)
        return total


class StoredGradients(torch.autograd.Function):
    """Returns a scalar whose gradients are known already; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *tensors: Tensor) -> Tensor:
        """``tensors``: ``count`` gradients, then the parameters they belong to."""
        ctx.save_for_backward(*tensors[:count])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients for the parameters; none for the stored gradients themselves."""
        stored = ctx.saved_tensors
        return (None, None, *(None for _ in stored), *(gradient * scale for gradient in stored))
