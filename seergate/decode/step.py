"""Attention of a gated layer: dense in prefill, driven by the method in decode steps.

Shape suffixes: B batch, S new tokens, T key tokens, H query heads, K KV heads, G = H / K, R = G * S, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from seergate.cache.forward import ForwardContext, ForwardMode
from seergate.cache.layer import GatedLayer
from seergate.decode.stats import DecodeStats, StepRecord
from seergate.decode.trace import Trace
from seergate.errors import SeergateError
from seergate.inference_mode import outside_inference_mode
from seergate.methods.base import AttentionOutput, Step
from seergate.methods.evicting import CompressingMethod, CompressingState
from seergate.methods.scoring import attend_and_weigh, log_probabilities
from seergate.methods.selecting import PerHeadSelection, SelectingMethod, on_device
from seergate.ops import Selection

MAX_GROUPED_TOKENS = 64
"""Dense passes over at most this many tokens use `newest_tokens_attention`; longer ones call the model's attention."""

Selected = Selection | PerHeadSelection | None
"""The blocks that a layer reads; ``None`` for all."""
DenseAttention = Callable[..., tuple[Tensor, Tensor | None]]


class Observer(Protocol):
    """What `gated_attention` reads from the handle. Every uncompiled decode step of a layer ends in
    `DecodeStats.record`, which a subclass (`Handle.count_with`) may override to see each selection. With
    ``measure_recall``, the share of dense attention's probability that falls on the blocks read is computed too.
    """

    stats_: DecodeStats
    measure_recall: bool
    trace: Trace | None


def check_continuation(layer: GatedLayer, mode: ForwardMode, new: int) -> None:
    """Raise `SeergateError` if the method cannot take ``new`` tokens after those that the cache layer holds."""
    if layer.is_initialized and layer.state is None:
        raise SeergateError(
            "this cache was used by the plain model in between, or a pass failed, so the method has not seen all of "
            "its tokens; start a new one"
        )
    is_prompt = not mode.dense and mode.decoded < new and not layer.reading
    if is_prompt and isinstance(layer.method, CompressingMethod) and any(layer.rows.total):
        raise SeergateError(
            f"the evicting method {layer.method.name!r} takes one prompt, then token by token; pass the whole "
            "conversation with a new cache" + ("" if layer.method.chunked_prefill else ", without prefill_chunk_size")
        )


@outside_inference_mode
def gated_attention(
    observer: Observer,
    layer: GatedLayer,
    context: ForwardContext,
    dense: DenseAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one gated layer in one forward pass: store the new tokens, show them to the method, attend.

    Args:
        context: with queries and keys before RoPE.
        dense: the model's own attention; takes the arguments from ``query`` on.
        query: ``[B, H, S, D]``.
        key, value: ``[B, K, S, D]``; those of all slots if the tokens are stored already (``context.rows``).

    Returns:
        Output ``[B, S, H, D]``, and attention weights or ``None``.
    """
    if context.rows is None:
        key, value = layer.store(context, key, value)
    state, mode, new = layer.state, context.mode, query.shape[2]
    assert state is not None
    step = make_step(layer, context, query, kwargs)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        state.append(step)
        if mode.dense and new == 1:
            return layer.storage.attend(step, None, layer.block_size).output[:, None].to(value.dtype), None
        if mode.dense and new <= MAX_GROUPED_TOKENS and context.valid is None and _groupable(step):
            return newest_tokens_attention(step).to(value.dtype), None
        if context.on_host and not mode.dense:
            observer.stats_.expect_compiled(layer)
        if mode.decoded == new:
            return decode_tokens(observer, layer, context, step).to(value.dtype), None
    if mode.dense:
        return dense(query, key, value, attention_mask, **kwargs)
    observer.stats_.saw_prompt(layer)
    output, weights = dense(query, key, value, attention_mask, **kwargs)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        able = isinstance(layer.method, CompressingMethod) and layer.method.chunked_prefill
        layer.reading = able and context.passes is not None and layer.rows.slots < context.passes.prompt_end
        if not layer.reading:
            _evict(layer, step)
        if not mode.decoded:
            return output, weights
        # The first drafts of assisted decoding come along with the prompt.
        drafts = decode_tokens(observer, layer, context, step)
        return torch.cat((output[:, : new - mode.decoded], drafts.to(output.dtype)), dim=1), weights


def decode_tokens(observer: Observer, layer: GatedLayer, context: ForwardContext, step: Step) -> Tensor:
    """Decode the newest ``context.mode.decoded`` tokens one after another: ``[B, count, H, D]``."""
    steps = [step] if step.q_BHSD.shape[2] == 1 else list(_tokens(step, context.mode.decoded))
    chosen = _selections(layer, context, steps)
    outputs = [_decode(observer, layer, context, *each) for each in zip(steps, chosen, strict=True)]
    return outputs[0][:, None] if len(outputs) == 1 else torch.stack(outputs, dim=1)


def _selections(layer: GatedLayer, context: ForwardContext, steps: list[Step]) -> Sequence[Selected]:
    """The selection of each token, by this layer or its anchor."""
    method, passes = layer.method, context.passes
    if not isinstance(method, SelectingMethod):
        return [None] * len(steps)
    assert passes is not None
    if layer.anchor != layer.layer:
        selections = passes.selections[layer.anchor]
        if layer.layer == layer.last_reader:
            del passes.selections[layer.anchor]
        return [on_device(selection, layer.device) for selection in selections]
    state: Any = layer.state
    selections = [method.select(state, step) for step in steps]
    if layer.last_reader != layer.layer:
        passes.selections[layer.layer] = selections
    return selections


def _decode(observer: Observer, layer: GatedLayer, context: ForwardContext, step: Step, selection: Selected) -> Tensor:
    """Attention of one token of each row to what the method selected or kept, ``[B, H, D]``, and its statistics."""
    state, stats, attended = layer.state, observer.stats_, None
    if isinstance(state, CompressingState):
        if state.reads_all_keys:
            output, p_BKGT = attend_and_weigh(step)
            step, attended = replace(step, p_BKGT=p_BKGT), AttentionOutput(output)
        state.observe_attention(step)
        attended = state.attend(step) or attended
    if attended is None:
        attended = layer.storage.attend(step, selection, layer.block_size)
    if not context.on_host:
        stats.record_compiled(layer.layer, step, selection)
        return attended.output
    record = StepRecord(layer, step, selection, attended)
    if observer.measure_recall and isinstance(layer.method, SelectingMethod):
        whole = torch.ones(len(step.starts), device=step.lengths.device)
        record.recall = (
            whole if selection is None else recall_of(block_probabilities(step, layer.block_size), selection)
        )
    stats.record(record)
    if observer.trace is not None:
        observer.trace.record(record)
    _evict(layer, step)
    return attended.output


def _evict(layer: GatedLayer, step: Step) -> None:
    """Evict what the method gives up, if it evicts, after a step or a prompt."""
    if isinstance(layer.state, CompressingState) and (eviction := layer.state.select_kept(step)) is not None:
        layer.evict(eviction)


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
    scaling, q_pre, k_pre, rows = kwargs.get("scaling"), context.q_pre, context.k_pre, context.rows
    assert q_pre is not None and k_pre is not None and rows is not None
    return layer.storage.step(
        q_pre_BHSD=q_pre.to(layer.dtype),
        k_pre_BKSD=k_pre.to(layer.dtype),
        q_BHSD=context.compact(query).to(layer.dtype),
        k_BKSD=context.k,
        starts=context.starts,
        counts=context.counts,
        lengths=rows.tensor,
        rows=rows,
        sm_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sinks=kwargs.get("s_aux"),
        softcap=kwargs.get("softcap"),
        offsets=layer.rows.offsets if context.on_host else None,
        hidden=context.hidden_states,
        decoded=context.mode.decoded,
    )


def _groupable(step: Step) -> bool:
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
        rows_BKGSD.flatten(2, 3), keys, values, attn_mask=visible_BST.repeat(1, group, 1)[:, None], scale=step.sm_scale
    )
    return output_BKRD.unflatten(2, (group, new)).flatten(1, 2).transpose(1, 2)


def block_probabilities(step: Step, block_size: int) -> Tensor:
    """Dense attention's probability of each block, for each query head: ``[B, K, G, N]``."""
    probabilities = log_probabilities(step).exp()
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)  # without the share of an attention sink
    missing = -probabilities.shape[-1] % block_size
    return pad(probabilities, (0, missing)).unflatten(-1, (-1, block_size)).sum(-1)


def recall_of(blocks_BKGN: Tensor, selection: Selection | PerHeadSelection) -> Tensor:
    """Share of the probability ``[B, K, G, N]`` that falls on the selected blocks, mean over query heads: ``[B]``."""
    indices = selection.heads.indices if isinstance(selection, PerHeadSelection) else selection.indices
    chosen = indices.unflatten(1, (blocks_BKGN.shape[1], -1)).expand(-1, -1, blocks_BKGN.shape[2], -1)
    read = blocks_BKGN.gather(-1, chosen.clamp(min=0).long()) * (chosen >= 0)
    return read.sum(-1).flatten(1).mean(1)
