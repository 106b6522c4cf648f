"""Attention of a gated layer: dense in prefill, driven by the method in decode steps.

Shape suffixes: B batch, S new tokens, T key tokens, H query heads, K KV heads, G = H / K, R = G * S, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from seergate.cache.forward import ForwardContext
from seergate.cache.layer import GatedLayer
from seergate.decode.trace import Trace
from seergate.errors import SeergateError
from seergate.inference_mode import outside_inference_mode
from seergate.methods.base import Step
from seergate.methods.evicting import AttentionOutput, CompressingState
from seergate.methods.scoring import attend_and_weigh, log_probabilities
from seergate.methods.selecting import PerHeadSelection, SelectingMethod, on_device
from seergate.ops import Selection
from seergate.stats import DecodeStats, StepRecord

MOST_FOLDED = 64
"""Dense passes over at most this many tokens use `newest_tokens_attention`; longer ones are prompts, for which the
model's own attention is made."""

DenseAttention = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass
class GatedAttention:
    """Attention of one call, after its new tokens have joined the cache. ``dense`` is the model's own attention; with
    ``measure_recall``, the share of its probability on the blocks read is computed too.
    """

    context: ForwardContext
    layer: GatedLayer
    dense: DenseAttention
    stats: DecodeStats
    measure_recall: bool
    trace: Trace | None

    @outside_inference_mode
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output ``[B, S, H, D]`` and attention weights or ``None``; arguments as in `seergate_attention`."""
        layer, state = self.layer, self.layer.state
        if state is None:
            raise SeergateError(
                "this cache was used by the plain model in between, so the method has not seen all of its tokens; "
                "start a new one"
            )
        step = make_step(layer, self.context, query, kwargs)
        new, decoded = query.shape[2], self.context.mode.decoded
        state.append(step)
        if self.context.mode.dense:
            if new > 1 and not (new <= MOST_FOLDED and self.context.valid is None and _foldable(step)):
                return self.dense(module, query, key, value, attention_mask, **kwargs)
            with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
                if new > 1:
                    return newest_tokens_attention(step).to(value.dtype), None
                return layer.storage.attend(step, None, layer.block_size).output[:, None].to(value.dtype), None
        if self.context.on_host:
            layer.expect_compiled(self.stats)
        if decoded == new:
            return self._decode_each(state, step, new).to(value.dtype), None
        self.stats.saw_prompt(layer.layer, layer.nbytes, layer.row_bytes)
        if isinstance(state, CompressingState) and any(start != 0 for start in step.starts):
            raise SeergateError(
                f"the evicting method {layer.method.name!r} takes a prompt in one piece, then token by token; "
                "pass the whole conversation with a new cache"
            )
        output, weights = self.dense(module, query, key, value, attention_mask, **kwargs)
        if isinstance(state, CompressingState):
            self._evict(state, step)
        if not decoded:
            return output, weights
        # The first drafts of assisted decoding come along with the prompt.
        drafts = self._decode_each(state, step, decoded)
        return torch.cat((output[:, : new - decoded], drafts.to(output.dtype)), dim=1), weights

    def _decode_each(self, state: Any, step: Step, count: int) -> Tensor:
        """Decode the newest ``count`` tokens one after another: ``[B, count, H, D]``."""
        with torch.no_grad(), torch.autocast(step.q_BHSD.device.type, enabled=False):
            steps = [step] if step.q_BHSD.shape[2] == 1 else list(_tokens(step, count))
            chosen = zip(steps, self._choose(state, steps), strict=True)
            outputs = [self._decode(state, part, selection) for part, selection in chosen]
            return outputs[0][:, None] if len(outputs) == 1 else torch.stack(outputs, dim=1)

    def _choose(self, state: Any, steps: list[Step]) -> Sequence[Selection | PerHeadSelection | None]:
        """The selection of each token, by this layer or its anchor; ``None`` to read all blocks."""
        layer, method, anchor = self.layer, self.layer.method, self.layer.anchor
        if not isinstance(method, SelectingMethod):
            return [None] * len(steps)
        if anchor is None:
            found = [method.select(state, step) for step in steps]
            if layer.last_reader != layer.layer:
                layer.chosen = found
            return found
        found = [on_device(selection, layer.device) for selection in anchor.chosen]
        if layer.layer == anchor.last_reader:
            anchor.chosen = []
        return found

    def _decode(self, state: Any, step: Step, selection: Selection | PerHeadSelection | None) -> Tensor:
        layer, method, size = self.layer, self.layer.method, self.layer.block_size
        attended: AttentionOutput | None = None
        if isinstance(state, CompressingState):
            if state.reads_all_keys:
                output, step.p_BKGT = attend_and_weigh(step)
                attended = AttentionOutput(output)
            state.observe_attention(step)
            attended = state.attend(step) or attended
        if attended is None:
            attended = layer.storage.attend(step, selection, size)
        if not self.context.on_host:
            self.stats.record_compiled(layer.layer, step, selection)
            return attended.output
        recall: Tensor | None = None
        if self.measure_recall and isinstance(method, SelectingMethod):
            whole = torch.ones(len(step.starts), device=step.lengths.device)
            recall = whole if selection is None else recall_of(block_probabilities(step, size), selection)
        seen = [
            total - held + end
            for total, held, end in zip(layer.rows.total, layer.rows.resident, step.ends, strict=True)
        ]
        record = StepRecord(
            layer.layer, step, state, seen, selection, attended, size, layer.nbytes, layer.row_bytes, recall
        )
        self.stats.record(record)
        if self.trace is not None:
            self.trace.record(record)
        if isinstance(state, CompressingState):
            self._evict(state, step)
        return attended.output

    def _evict(self, state: CompressingState, step: Step) -> None:
        eviction = state.select_kept(step)
        if eviction is not None:
            self.stats.evicted(self.layer.layer, step, eviction)
            self.layer.evict(eviction)


def _tokens(step: Step, count: int) -> Iterator[Step]:
    """Yield the step of each of the newest ``count`` tokens, without the tokens after it."""
    new = step.counts[0]  # without padding; the same in all rows
    for i in range(new - count, new):
        at = slice(i, i + 1)
        yield replace(
            step,
            q_pre_BHSD=step.q_pre_BHSD[:, :, at],
            k_pre_BKSD=step.k_pre_BKSD[:, :, at],
            q_BHSD=step.q_BHSD[:, :, at],
            k_BKSD=step.k_BKSD[:, :, at],
            starts=[start + i for start in step.starts],
            counts=[1] * len(step.starts),
            hidden=None,
            lengths=step.lengths - (new - 1 - i),
        )


def make_step(layer: GatedLayer, context: ForwardContext, query: Tensor, kwargs: dict[str, Any]) -> Step:
    """Build the `Step` for the tokens that have just joined the cache, from ``query [B, H, S, D]`` and ``kwargs`` of
    the attention function.
    """
    scaling = kwargs.get("scaling")
    return layer.storage.step(
        q_pre_BHSD=context.q_pre.to(layer.dtype),
        k_pre_BKSD=context.k_pre.to(layer.dtype),
        q_BHSD=context.compact(query).to(layer.dtype),
        k_BKSD=context.k,
        starts=context.starts,
        counts=context.counts,
        lengths=context.rows.tensor,
        rows=context.rows,
        sm_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sinks=kwargs.get("s_aux"),
        softcap=kwargs.get("softcap"),
        offsets=layer.rows.offsets if context.on_host else None,
        hidden=context.hidden_states,
        decoded=context.mode.decoded,
    )


def _foldable(step: Step) -> bool:
    """True if `newest_tokens_attention` can compute a step."""
    in_one_place = step.stored[2] is None and step.keys_BKCD.device == step.q_BHSD.device
    return in_one_place and step.sinks is None and step.softcap is None


def newest_tokens_attention(step: Step) -> Tensor:
    """Dense causal attention of the newest tokens of each row, none of them padding: ``[B, S, H, D]``. The step must
    have neither attention sinks nor a softcap.

    The query heads of a group and the new tokens become rows of one matrix per KV head, so that keys and values are
    read once and never repeated. (The stock implementations repeat them for each query head, which on a CPU takes ten
    times as long as the attention.)
    """
    keys, values = step.keys_BKCD[:, :, : step.max_length], step.values_BKCD[:, :, : step.max_length]
    new, group = step.q_BHSD.shape[2], step.q_BHSD.shape[1] // keys.shape[1]
    rows_BKGSD = step.q_BHSD.unflatten(1, (-1, group))
    places = torch.arange(keys.shape[2], device=keys.device)
    ends_BS = step.lengths[:, None] - new + 1 + torch.arange(new, device=keys.device)
    if len(set(step.ends)) == 1:
        ends_BS = ends_BS[:1]
    visible_BST = places < ends_BS[..., None]
    output_BKRD = scaled_dot_product_attention(
        rows_BKGSD.flatten(2, 3),
        keys,
        values,
        attn_mask=visible_BST.repeat(1, group, 1)[:, None],
        scale=step.sm_scale,
    )
    return output_BKRD.unflatten(2, (group, new)).flatten(1, 2).transpose(1, 2)


def block_probabilities(step: Step, block_size: int) -> Tensor:
    """Dense attention's probability of each block, for each query head: ``[B, K, G, N]``."""
    probabilities = log_probabilities(step).exp()
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)  # without the share of an attention sink
    missing = -probabilities.shape[-1] % block_size
    return nn.functional.pad(probabilities, (0, missing)).unflatten(-1, (-1, block_size)).sum(-1)


def recall_of(blocks_BKGN: Tensor, selection: Selection | PerHeadSelection) -> Tensor:
    """Share of the probability ``[B, K, G, N]`` that falls on the selected blocks, mean over query heads: ``[B]``."""
    indices = selection.heads.indices if isinstance(selection, PerHeadSelection) else selection.indices
    chosen = indices.unflatten(1, (blocks_BKGN.shape[1], -1)).expand(-1, -1, blocks_BKGN.shape[2], -1)
    read = blocks_BKGN.gather(-1, chosen.clamp(min=0).long()) * (chosen >= 0)
    return read.sum(-1).flatten(1).mean(1)
