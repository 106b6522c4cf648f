"""Computes the gates' loss and gradients in one forward pass of the frozen model.

In each gated layer, the teacher's targets, the gate's loss and the gradients of the gate's parameters are computed at
once, and all intermediate tensors are freed. So peak memory is that of one layer, and linear in the pack's length. The
model runs without its LM head and without an autograd graph. Gates that are trained end to end need its output and a
second pass with a graph (`seergate.distill.losses.retention_loss`).

Shape suffixes: T tokens of the pack, B = 1, S = T, H query heads, K KV heads, D head dimension, E gate dimension, N
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seergate import ops
from seergate.config import SCORERS, class_of, nearest_anchor
from seergate.distill.losses.distill_loss import DistillLoss, DistillOutput, DistillSpec
from seergate.distill.losses.retention_loss import StudentLoss
from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.gates.scorer import Scorer
from seergate.models import families
from seergate.models.packed_forward import TeacherCall, intercepted_attention
from seergate.ops.arguments import check_cu_seqlens
from seergate.ops.host_memory import copied
from seergate.ops.losses import counted_rows

TILE, TILE_DEVICE = 2048, 16384
"""Maximum rows per tile of the query branch on a CPU and on a GPU. Its intermediate results are several times as large
as its output; if a pack needs more than one tile, they are recomputed for the gradients. On a GPU, half of a pack of
32k tokens is one tile, since smaller tiles would launch many small kernels."""


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
    if model.training:
        raise SeergateError("the base model is in training mode; call model.eval() first")
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


def tile_rows(device: torch.device) -> int:
    """Return the maximum rows per tile of the query branch."""
    return TILE if device.type == "cpu" else TILE_DEVICE


def positions_of(cu_seqlens: Tensor) -> Tensor:
    """Return the position of each token of a pack in its sequence, int64 ``[T]``."""
    return torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])


class Places(NamedTuple):
    """Indices of a pack's tokens, on a device.

    Attributes:
        positions: int64 ``[T]``, position of each token in its sequence.
        rows: indices of the rows that count, in tiles of at most `tile_rows`.
        entries: int64, position in its sequence of the first token of each gate key.
        pooled: int64, indices of the tokens that are pooled, equally many per gate key. The last entry of a sequence
            is padded with the sequence's last token; no row is compared with a padded entry.
    """

    positions: Tensor
    rows: tuple[Tensor, ...]
    entries: Tensor
    pooled: Tensor


class BlockLoss(DistillLoss):
    """Loss of block scorers against the attention that each block receives.

    The gate of an anchor (`DecodeConfig.anchors`) learns from every layer that reads its selection, with the queries
    and keys of its own layer. The mean of these losses equals the loss against the mean target up to a constant.

    Attributes:
        rows: indices of the rows of the pack that count, int64, in host memory.
    """

    def __init__(self, spec: DistillSpec, model: PreTrainedModel, cu_seqlens: Tensor) -> None:
        super().__init__(spec, model, cu_seqlens)
        decode = self.bank.decode_config()
        for layer, _ in families.full_attention_modules(model):
            anchor = nearest_anchor(layer, decode.anchors)
            if layer not in decode.dense_layers and anchor in self.gate_of:
                self.gate_of.setdefault(layer, anchor)
        self.gate_of = dict(sorted(self.gate_of.items()))
        self.last_reader = {gate: layer for layer, gate in self.gate_of.items()}
        self.inputs: tuple[Tensor, Tensor] | None = None  # q and k of the current gate, until its last reader
        config, lengths = self.bank.config, [b - a for a, b in self.segments]
        stride = spec.row_stride, spec.row_shift
        counted = counted_rows(lengths, config.block_size, spec.row_start, config.sink_blocks, *stride)
        parts = zip(self.segments, counted, strict=True)
        self.rows = torch.cat([torch.arange(a + rows.start, a + rows.stop, rows.step) for (a, _), rows in parts])
        self._places: dict[torch.device, Places] = {}  # one entry per device of a split model

    def places(self, device: torch.device) -> Places:
        """Return the pack's indices on a device; they are copied once."""
        if device not in self._places:
            step = self.bank.gate(next(iter(self.bank.geometry.layers))).entry_tokens
            entries = torch.cat([torch.arange(0, b - a, step) for a, b in self.segments])
            ends = [a + step * -(-(b - a) // step) for a, b in self.segments]
            pooled = torch.cat(
                [torch.arange(a, end).clamp(max=b - 1) for (a, b), end in zip(self.segments, ends, strict=True)]
            )
            on_host = positions_of(self.cu_seqlens), self.rows, entries, pooled
            positions, rows, entries, pooled = (copied(x, device) for x in on_host)
            self._places[device] = Places(positions, rows.split(tile_rows(device)), entries, pooled)
        return self._places[device]

    def learn(self, call: TeacherCall, lse_TH: Tensor) -> None:
        """Compute the loss of a layer's gate, and its gradients if they are enabled."""
        source, spec = self.gate_of[call.layer], self.spec
        gate = self.bank.gate(source)
        if source == call.layer:
            assert call.q_pre_BHSD is not None and call.k_pre_BKSD is not None
            self.inputs = call.q_pre_BHSD, call.k_pre_BKSD
        assert self.inputs is not None
        q_pre_BHSD, k_pre_BKSD = self.inputs
        if self.last_reader[source] == call.layer:
            self.inputs = None
        if q_pre_BHSD.device != call.query_BHSD.device:
            raise SeergateError(
                f"layers {source} and {call.layer} lie on different devices; the gate of an anchor learns from layers "
                "on its own device"
            )
        parameters = self.trainable(gate)
        wants_gradient = bool(parameters)
        positions, tiles, entries, pooled = self.places(call.query_BHSD.device)
        with torch.set_grad_enabled(wants_gradient and len(tiles) == 1):
            parts = [_queries(gate, q_pre_BHSD, positions, rows) for rows in tiles]
        with torch.no_grad():
            counted = torch.cat(parts)
            qg_TKE = counted.new_empty(len(positions), *counted.shape[1:])  # only the rows that count are read
            qg_TKE[torch.cat(tiles)] = counted
            stored_queries = parts[0] if parts[0].requires_grad else None
            del counted, parts
        with torch.set_grad_enabled(wants_gradient):
            qg_TKE.requires_grad_(wants_gradient)
            kg_NKE = gate.keys(gate.pool(k_pre_BKSD[:, :, pooled]), entries)[0].transpose(0, 1)
            loss, stats = loss_of(gate, spec.target)(
                call.query_BHSD[0].transpose(0, 1),
                call.key_BKSD[0].transpose(0, 1),
                qg_TKE,
                kg_NKE,
                self.cu_seqlens,
                self.bank.config.block_size,
                row_start=spec.row_start,
                sm_scale=call.sm_scale,
                reduction=spec.reduction,
                recall_budgets=spec.recall_budgets,
                sinks=call.sinks,
                softcap=call.softcap,
                lse=lse_TH,
                sink_blocks=self.bank.config.sink_blocks,
                row_stride=spec.row_stride,
                row_shift=spec.row_shift,
            )
            if wants_gradient:
                self.gradients.update({p: torch.zeros_like(p) for p in parameters if p not in self.gradients})
                dqg_TKE, dkg_NKE = torch.autograd.grad(loss, (qg_TKE, kg_NKE), materialize_grads=True)
                self._add_gradients(kg_NKE, dkg_NKE, parameters)
                for rows in tiles:
                    queries = _queries(gate, q_pre_BHSD, positions, rows) if stored_queries is None else stored_queries
                    self._add_gradients(queries, dqg_TKE[rows], parameters)
        self.losses.append(loss.detach())
        self.stats.append(stats)

    def _add_gradients(self, output: Tensor, gradient: Tensor, parameters: list[nn.Parameter]) -> None:
        """Backpropagate a gradient from a branch's output to the gate's parameters."""
        if not output.requires_grad:  # a branch without parameters, such as averaged queries
            return
        for parameter, part in zip(
            parameters, torch.autograd.grad(output, parameters, gradient, allow_unused=True), strict=True
        ):
            if part is not None:
                self.gradients[parameter] += part


def loss_of(gate: Scorer, target: str) -> Callable[..., tuple[Tensor, ops.GateKLStats]]:
    """Return `ops.gate_kl` if it supports the gate and the target, else `ops.scorer_kl` with the same arguments."""
    if gate.fused and target == "max":
        return ops.gate_kl
    return partial(ops.scorer_kl, scores=gate.scores, entry_tokens=gate.entry_tokens, target=target)


def _queries(gate: Scorer, q_BHSD: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """Return the gate's queries of the pack's tokens ``rows``, ``[S, K, E]``."""
    return gate.queries(q_BHSD[:, :, rows], positions[rows])[0].transpose(0, 1)
