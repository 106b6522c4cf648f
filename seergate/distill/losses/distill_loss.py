"""Base class of the gates' distillation losses on a pack."""

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

    from seergate.models.packed_forward import TeacherCall

PUBLISHED_SCALE = 10.0
"""Factor of the published code's loss (``gate_loss_scale``); it makes gradient clipping start at smaller gradients."""


@dataclass(frozen=True)
class DistillOutput:
    """Loss and statistics of the gates on one pack.

    Attributes:
        loss: scalar; ``.backward()`` adds the gates' gradients. If the loss or a gradient is not finite, the loss is
            NaN and ``.backward()`` adds zeros.
        kl_per_layer: ``[layers]``, mean KL in nats per row and KV head for every reduction. For Fast KVzip, it is per
            token and KV head; for TRIM-KV, it is the loss on the model's output, repeated for all layers.
        recall: ``[budgets, layers, KV heads]``, mean share of the teacher's mass on past blocks that is in the gate's
            best blocks; for retention gates see `ops.retention_kl`.
        tokens: number of tokens of the pack.
        rows: scalar, number of rows that KL and recall are means over.
        recall_rows: scalar, number of rows that recall is a mean over, if it is another.
    """

    loss: Tensor
    kl_per_layer: Tensor
    recall: Tensor
    tokens: int
    rows: Tensor
    recall_rows: Tensor | None = None


@dataclass(frozen=True)
class DistillSpec:
    """Gates and the options of their distillation loss.

    Attributes:
        bank: gates of the model, on its device (`seergate.models.families.check_gates`).
        row_start, reduction: see `ops.gate_kl`. Losses of layers are averaged for ``"row_mean"``; for ``"published"``
            they are summed and multiplied by `PUBLISHED_SCALE`.
        recall_budgets: token budgets for which recall is reported.
        target: see `ops.scorer_kl`.
        target_budget: for ``trim_kv``, the maximum number of tokens of a KV head.
        row_stride, row_shift: see `ops.gate_kl`.
    """

    bank: Gates
    row_start: float = 0.5
    reduction: str = "row_mean"
    recall_budgets: tuple[int, ...] = ()
    target: str = "max"
    target_budget: int | None = None
    row_stride: int = 1
    row_shift: int = 0


class DistillLoss(ABC):
    """The loss of gates on one pack, accumulated layer by layer in the frozen model's forward pass.

    Attributes:
        gate_of: layer that a gate learns from -> layer of that gate, in ascending order.
        losses, stats: loss and statistics of each of these layers so far.
        gradients: gradients of the gates' parameters so far.
    """

    def __init__(self, spec: DistillSpec, model: PreTrainedModel, cu_seqlens: Tensor) -> None:
        if len(cu_seqlens) > 2 and (reason := families.why_one_sequence(families.text_config(model))):
            raise SeergateError(f"{reason}; its packs must hold one sequence each")
        self.spec, self.bank, self.model = spec, spec.bank, model
        self.cu_seqlens = cu_seqlens  # in host memory, where ops read it without synchronising
        self.tokens = int(cu_seqlens[-1])
        self.segments = [(a, b) for a, b in pairwise(cu_seqlens.tolist()) if b > a]
        self.gate_of = {layer: layer for layer in self.bank.geometry.layers}
        self.wants_gradients = torch.is_grad_enabled()  # as the caller set it; the model runs without a graph
        self.losses: list[Tensor] = []
        self.stats: list[GateKLStats] = []
        self.gradients: dict[nn.Parameter, Tensor] = {}

    @abstractmethod
    def learn(self, call: TeacherCall, lse_TH: Tensor) -> None:
        """Add the loss of one layer of `gate_of`; ``lse_TH`` is the log-sum-exp of its attention scores."""

    def result(self) -> DistillOutput:
        """Return the result after the forward pass."""
        home = self.losses[0].device
        readers = [len(list(group)) for _, group in groupby(self.gate_of.values())]  # layers of each gate
        kls = torch.stack([stats.kl_per_head.float().mean().to(home) for stats in self.stats])
        recalls = torch.stack([stats.recall.float().to(home) for stats in self.stats], dim=1)
        kl_per_layer = torch.stack([part.mean() for part in kls.split(readers)])
        recall = torch.stack([part.mean(1) for part in recalls.split(readers, dim=1)], dim=1)
        share = 1.0 / len(self.losses) if self.spec.reduction == "row_mean" else PUBLISHED_SCALE
        return DistillOutput(self.total(share), kl_per_layer, recall, self.tokens, self.stats[0].rows.to(home))

    def trainable(self, gates: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of gates that get gradients; empty if gradients are disabled."""
        return [p for p in gates.parameters() if p.requires_grad and self.wants_gradients]

    def add(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        """Add a loss, and its gradients for ``parameters`` from its autograd graph."""
        if parameters:
            self.gradients |= dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
        self.losses.append(loss.detach())

    def total(self, share: float) -> Tensor:
        """Return the sum of the layers' losses times ``share``, connected to the stored gradients."""
        home = self.losses[0].device  # layers may be on several devices
        total = torch.stack([loss.float().to(home) for loss in self.losses]).sum() * share
        parameters = list(self.gradients)
        stored = [self.gradients[p] * share for p in parameters]
        finite = torch.stack([total.isfinite(), *(x.isfinite().all().to(home) for x in stored)]).all()
        total = torch.where(finite, total, torch.nan)
        if parameters:
            # Computed on the device, without synchronising.
            stored = [torch.where(finite.to(x.device), x, torch.zeros_like(x)) for x in stored]
            total = StoredGradients.apply(total, len(stored), *stored, *parameters)
        return total


class StoredGradients(torch.autograd.Function):
    """Connects a scalar to gradients that are known already; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *tensors: Tensor) -> Tensor:
        """Return ``value``; ``tensors`` are ``count`` gradients, then their parameters."""
        ctx.save_for_backward(*tensors[:count])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the scaled gradients for the parameters, and ``None`` for all other inputs."""
        if torch.is_grad_enabled():
            raise RuntimeError("distill_loss has no second derivative; call backward without create_graph")
        stored = ctx.saved_tensors
        return (None, None, *(None for _ in stored), *(gradient * scale for gradient in stored))


def positions_of(cu_seqlens: Tensor) -> Tensor:
    """Return the position of each token of a pack in its sequence, int64 ``[T]``."""
    return torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])
