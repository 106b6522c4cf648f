"""The distillation loss of block scorers, such as the AttnGate: KL from the attention that each block receives.

Shape suffixes: T tokens of the pack, B = 1, S = T, H query heads, K KV heads, D head dimension, E gate dimension, N
blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seergate import ops
from seergate.config import nearest_anchor
from seergate.distill.losses.distill_loss import DistillLoss, DistillSpec, positions_of
from seergate.errors import SeergateError
from seergate.gates.scorer import Scorer
from seergate.models import families
from seergate.models.packed_forward import TeacherCall
from seergate.ops.host_memory import copied
from seergate.ops.losses import counted_rows

TILE, TILE_DEVICE = 2048, 16384
"""Maximum rows per tile of the query branch on a CPU and on a GPU. Its intermediate results are several times as large
as its output; if a pack needs more than one tile, they are recomputed for the gradients. On a GPU, half of a pack of
32k tokens is one tile, since smaller tiles would launch many small kernels."""


def tile_rows(device: torch.device) -> int:
    """Return the maximum rows per tile of the query branch."""
    return TILE if device.type == "cpu" else TILE_DEVICE


class PackIndices(NamedTuple):
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
        self._indices: dict[torch.device, PackIndices] = {}  # one entry per device of a split model

    def indices(self, device: torch.device) -> PackIndices:
        """Return the pack's indices on a device; they are copied once."""
        if device not in self._indices:
            step = self.bank.gate(next(iter(self.bank.geometry.layers))).entry_tokens
            entries = torch.cat([torch.arange(0, b - a, step) for a, b in self.segments])
            ends = [a + step * -(-(b - a) // step) for a, b in self.segments]
            pooled = torch.cat(
                [torch.arange(a, end).clamp(max=b - 1) for (a, b), end in zip(self.segments, ends, strict=True)]
            )
            on_host = positions_of(self.cu_seqlens), self.rows, entries, pooled
            positions, rows, entries, pooled = (copied(x, device) for x in on_host)
            self._indices[device] = PackIndices(positions, rows.split(tile_rows(device)), entries, pooled)
        return self._indices[device]

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
        positions, tiles, entries, pooled = self.indices(call.query_BHSD.device)
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
            kg_NKE.requires_grad_(wants_gradient)  # even if none of its parameters are trained
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
