"""One forward of the frozen model that leaves the gates' loss and gradients behind (design: gradients in the forward).

In each gated layer the teacher's targets, the gate's loss and the gradients of that gate's parameters are computed on
the spot, and everything else of the layer is freed: peak memory is one layer's, and linear in the length of the pack.
The model runs without its LM head and without a graph.

Shape suffixes: T tokens of the pack, B = 1, S = T, H query heads, K KV heads, D head dimension, E gate dimension, N
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from seergate import ops
from seergate.config import check_target
from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.gates.scorer import Scorer
from seergate.hf.teacher_pass import TeacherCall, intercepted_attention
from seergate.models import families
from seergate.ops.checks import check_cu_seqlens
from seergate.ops.gate_kl import counted_rows
from seergate.ops.host_memory import copied

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TILE = 2048
"""Rows of the query branch at a time. Its intermediate results are several times its output; they are made again for
the gradients instead of being kept for the whole pack."""

PUBLISHED_SCALE = 10.0
"""The published code multiplies its loss by it (``gate_loss_scale``): clipping begins at gradients so much smaller."""


@dataclass(frozen=True)
class DistillOutput:
    """What one pack says about the gates.

    Attributes:
        loss: scalar; ``.backward()`` adds the gates' gradients. NaN if it or a gradient is not finite; then it adds
            zeros.
        kl_per_layer: ``[layers]``, mean KL in nats per row and KV head, whatever the reduction.
        recall: ``[budgets, layers, KV heads]``, mean share of the teacher's mass on past blocks that the gate's best
            blocks hold.
        rows: how many rows counted in each segment-wise mean, all segments together.
    """

    loss: Tensor
    kl_per_layer: Tensor
    recall: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Lesson:
    """Gates, and what of a pack they learn from.

    Attributes:
        bank: the gates; on the model's device.
        row_start, reduction: see `ops.gate_kl`. ``"row_mean"`` is averaged over layers, ``"published"`` summed and
            multiplied by `PUBLISHED_SCALE`.
        recall_budgets: token budgets to report recall at.
        target, target_budget: see `ops.scorer_kl`.
    """

    bank: Gates
    row_start: float = 0.5
    reduction: str = "row_mean"
    recall_budgets: tuple[int, ...] = ()
    target: str = "max"
    target_budget: int | None = None


def distill_step(
    bank: Gates,
    model: PreTrainedModel,
    input_ids: Tensor,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> DistillOutput:
    """Run the frozen model over one pack and compare its attention with the gates'.

    Args:
        bank: the gates.
        model: the frozen model. Dropout must be off (``model.eval()``).
        input_ids: ``[1, T]`` or ``[T]``.
        cu_seqlens: int32 ``[n + 1]``; one sequence if ``None``.
        **options: the other fields of `Lesson`.

    Raises:
        SeergateError: if the gates do not fit the model.
        ValueError: for malformed packs.
    """
    return distill_steps([Lesson(bank, **options)], model, input_ids, cu_seqlens)[0]


def distill_steps(
    lessons: Sequence[Lesson], model: PreTrainedModel, input_ids: Tensor, cu_seqlens: Tensor | None = None
) -> list[DistillOutput]:
    """`distill_step` of several gates in one forward of the frozen model; each result is that of the gates alone."""
    if input_ids.ndim == 1:
        input_ids = input_ids[None]
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; a pack is [1, T]")
    if model.training:
        raise SeergateError("the base model is in training mode; call model.eval() first")
    total = input_ids.shape[1]
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, total], dtype=torch.int32)
    cu_seqlens = cu_seqlens.cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    check_cu_seqlens(cu_seqlens, total)

    learning = [PackDistillation(lesson, model, cu_seqlens) for lesson in lessons]
    gated = {layer: attention for each in learning for layer, attention in each.gated.items()}

    def attend(call: TeacherCall) -> Tensor:
        """Compute a layer's attention over the pack, ``[1, T, H, D]``, and the losses of its gates if it has any."""
        q, k, v = (x[0].transpose(0, 1) for x in (call.query_BHSD, call.key_BKSD, call.value_BKSD))
        output_THD, lse_TH = ops.packed_attention(
            q, k, v, cu_seqlens, call.sm_scale, window=call.window, sinks=call.sinks, softcap=call.softcap
        )
        for each in learning:
            if call.layer in each.gated:
                each.learn(call, lse_TH)
        return output_THD[None]

    # A model whose first layers wait on disk is nowhere until they are fetched to where the gates are.
    device = next(lessons[0].bank.parameters()).device if model.device.type == "meta" else model.device
    positions = learning[0].places(device).positions[None]
    with intercepted_attention(model, gated, attend), torch.no_grad():
        families.decoder_of(model)(input_ids=copied(input_ids, device), position_ids=positions, use_cache=False)
    return [each.result() for each in learning]


class Places(NamedTuple):
    """Indices into a pack, on a device.

    Attributes:
        positions: int64 ``[T]``, of each token in its sequence.
        rows: the rows that count, at most `TILE` at a time.
        entries: int64, the position that each of the gate's keys begins at.
    """

    positions: Tensor
    rows: tuple[Tensor, ...]
    entries: Tensor


class PackDistillation:
    """What a lesson shares between the layers of one pack's forward, and what it has computed so far."""

    def __init__(self, lesson: Lesson, model: PreTrainedModel, cu_seqlens: Tensor) -> None:
        bank = lesson.bank
        modules = families.full_attention_modules(model)
        families.check_gates(model, bank)
        if len(cu_seqlens) > 2 and (reason := families.why_one_sequence(families.text_config(model))):
            raise SeergateError(f"{reason}; its packs must hold one sequence each")
        check_target(lesson.target, lesson.target_budget, bank.config.block_size)
        self.bank, self.model = bank, model
        self.target, self.target_budget = lesson.target, lesson.target_budget
        self.cu_seqlens = cu_seqlens  # in host memory, where ops read it for free
        self.segments = [(a, b) for a, b in pairwise(cu_seqlens.tolist()) if b > a]
        self.options: dict[str, Any] = {
            "row_start": lesson.row_start,
            "reduction": lesson.reduction,
            "recall_budgets": lesson.recall_budgets,
        }
        self.gated = {layer: attention for layer, attention in modules if str(layer) in bank.layers}
        self.wants_gradients = torch.is_grad_enabled()  # the caller's wish; the model itself runs without a graph
        self._places: dict[torch.device, Places] = {}  # of each that a split model has layers on
        self.losses: list[Tensor] = []
        self.stats: list[ops.GateKLStats] = []
        self.gradients: dict[nn.Parameter, Tensor] = {}

    def places(self, device: torch.device) -> Places:
        """The pack's indices, copied to the device once."""
        if device not in self._places:
            size, step = self.bank.config.block_size, self.bank.gate(next(iter(self.gated))).entry_tokens
            positions = torch.cat([torch.arange(b - a) for a, b in self.segments])
            entries = torch.cat([torch.arange(0, b - a, step) for a, b in self.segments])
            rows = copied(counted_rows(self.cu_seqlens, size, self.options["row_start"]), device)
            self._places[device] = Places(copied(positions, device), rows.split(TILE), copied(entries, device))
        return self._places[device]

    def learn(self, call: TeacherCall, lse_TH: Tensor) -> None:
        """Compute the loss of a layer's gate, and its gradients if they are wanted."""
        gate = self.bank.gate(call.layer)
        assert call.q_pre_BHSD is not None and call.k_pre_BKSD is not None
        parameters = [p for p in gate.parameters() if p.requires_grad]
        wants_gradient = self.wants_gradients and bool(parameters)
        positions, tiles, entries = self.places(call.query_BHSD.device)
        with torch.no_grad():
            counted = torch.cat([_queries(gate, call.q_pre_BHSD, positions, rows) for rows in tiles])
            qg_TKE = counted.new_empty(len(positions), *counted.shape[1:])  # no other row is read
            qg_TKE[torch.cat(tiles)] = counted
            del counted
        with torch.set_grad_enabled(wants_gradient):
            qg_TKE.requires_grad_(wants_gradient)
            kg_NKE = self._keys(gate, call.k_pre_BKSD, entries)
            loss, stats = loss_of(gate, self.target, self.target_budget)(
                call.query_BHSD[0].transpose(0, 1),
                call.key_BKSD[0].transpose(0, 1),
                qg_TKE,
                kg_NKE,
                self.cu_seqlens,
                self.bank.config.block_size,
                sm_scale=call.sm_scale,
                sinks=call.sinks,
                softcap=call.softcap,
                lse=lse_TH,
                **self.options,
            )
            if wants_gradient:
                self.gradients.update({p: torch.zeros_like(p) for p in parameters})
                dqg_TKE, dkg_NKE = torch.autograd.grad(loss, (qg_TKE, kg_NKE), materialize_grads=True)
                self._add_gradients(kg_NKE, dkg_NKE, parameters)
                for rows in tiles:
                    self._add_gradients(_queries(gate, call.q_pre_BHSD, positions, rows), dqg_TKE[rows], parameters)
        self.losses.append(loss.detach())
        self.stats.append(stats)

    def _add_gradients(self, output: Tensor, gradient: Tensor, parameters: list[nn.Parameter]) -> None:
        """Continue a gradient from a branch's output to the parameters that made it."""
        if not output.requires_grad:  # a branch without parameters, such as averaged queries
            return
        for parameter, part in zip(
            parameters, torch.autograd.grad(output, parameters, gradient, allow_unused=True), strict=True
        ):
            if part is not None:
                self.gradients[parameter] += part

    def _keys(self, gate: Scorer, k_pre_BKSD: Tensor, entries: Tensor) -> Tensor:
        pooled = torch.cat([gate.pool(k_pre_BKSD[:, :, a:b]) for a, b in self.segments], dim=2)
        return gate.keys(pooled, entries)[0].transpose(0, 1)

    def result(self) -> DistillOutput:
        """The losses of all layers as one, with the gradients tied to it."""
        home = self.losses[0].device  # the layers of a split model report from several devices
        kl_per_layer = torch.stack([stats.kl_per_head.float().mean().to(home) for stats in self.stats])
        total = torch.stack([loss.float().to(home) for loss in self.losses]).sum()
        share = 1.0 / len(self.losses) if self.options["reduction"] == "row_mean" else PUBLISHED_SCALE
        total, parameters = total * share, list(self.gradients)
        stored = [self.gradients[p] * share for p in parameters]
        finite = torch.stack([total.isfinite(), *(x.isfinite().all().to(home) for x in stored)]).all()
        total = torch.where(finite, total, torch.nan)
        if parameters:
            # Decided on the device: nobody waits for it.
            stored = [torch.where(finite.to(x.device), x, torch.zeros_like(x)) for x in stored]
            total = StoredGradients.apply(total, len(stored), *stored, *parameters)
        recall = torch.stack([stats.recall.float().to(home) for stats in self.stats], dim=1)
        return DistillOutput(total, kl_per_layer, recall, self.stats[0].rows)


def loss_of(gate: Scorer, target: str, target_budget: int | None) -> Callable[..., tuple[Tensor, ops.GateKLStats]]:
    """`ops.gate_kl` where it computes this gate's loss, else `ops.scorer_kl` with the same arguments."""
    if gate.fused and target == "max":
        return ops.gate_kl
    options: dict[str, Any] = {"target": target, "target_budget": target_budget, "entry_tokens": gate.entry_tokens}
    return partial(ops.scorer_kl, scores=gate.scores, **options)


def _queries(gate: Scorer, q_BHSD: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """The gate's queries of some of the pack's tokens, ``[S, K, E]``."""
    return gate.queries(q_BHSD[:, :, rows], positions[rows])[0].transpose(0, 1)


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
