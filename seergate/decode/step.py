"""The registered attention function, and what it does in a gated layer: dense prefill, method-driven decode.

Shape suffixes: B batch, S query tokens, T key tokens, H query heads, K KV heads, G = H / K, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from seergate import ops
from seergate.cache.layer import GatedLayer
from seergate.cache.ordinary import ordinary_tensors, show
from seergate.decode.stats import DecodeStats
from seergate.errors import SeergateError
from seergate.hf.call import Appended, pick_up
from seergate.hf.rope import modeling_module
from seergate.methods.base import FixedStep, Step
from seergate.methods.evicting import CompressingState
from seergate.methods.scoring import log_probabilities
from seergate.methods.selecting import SelectingMethod, SelectingState
from seergate.ops import Selection

ATTENTION_NAME = "seergate"
CALL_KEYWORD = "seergate_call"
VERIFIED_TOKENS = 32
"""At most so many drafted tokens are verified at once (assisted decoding), each decoded as if it had come alone; more
are read densely. Outside of `generate`, a chunk of at most this many tokens is taken for drafted ones once decoding
has begun, or the cache has been cropped; a longer one is a new prompt, and dense."""

DenseAttention = Callable[..., tuple[Tensor, Tensor | None]]


def seergate_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in a module whose configuration names ``"seergate"``.

    The module's pre-hook has put a callable into the keyword arguments that knows the cache layer, the method and the
    dense implementation; all the work is there.

    Args:
        query: ``[B, H, S, D]``. key, value: ``[B, K, T, D]``.

    Returns:
        Output ``[B, S, H, D]`` and attention weights or ``None``.
    """
    call: Callable[..., tuple[Tensor, Tensor | None]] = kwargs.pop(CALL_KEYWORD)
    return call(module, query, key, value, attention_mask, **kwargs)


def register() -> None:
    """Make the name known to transformers; done when something is first attached, never at import."""
    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ATTENTION_NAME, seergate_attention)


def dense_function(implementation: str) -> DenseAttention:
    """The attention that the model would have used, as a function of the module and its inputs.

    Some implementations look their own name up in the module's configuration, so they are shown it while they run.
    """

    def dense(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        eager = getattr(modeling_module(module), "eager_attention_forward", None)
        own: Any = module.config  # this module's private copy
        named, own._attn_implementation_internal = own._attn_implementation_internal, implementation
        try:
            return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)(module, *args, **kwargs)
        finally:
            own._attn_implementation_internal = named

    return dense


def attend(
    layer: GatedLayer,
    stats: DecodeStats,
    measure_recall: bool,
    dense: DenseAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention in a gated layer, after its new tokens joined the cache.

    Several query tokens (a prompt, or a chunk of one) attend densely and exactly as in the plain model; a query token
    that is being decoded attends to what the method selects.
    """
    appended, state = pick_up(layer), layer.state
    assert state is not None
    step = make_step(layer, appended, query, kwargs)
    if isinstance(step, FixedStep):
        state.append(step)
        return _decode_fixed(layer, state, step, stats)[:, None].to(value.dtype), None
    show(state, step)
    layer.settle(stats)
    new = query.shape[2]
    layer.decoded = _to_decode(layer, appended, new)
    if layer.decoded < new:
        layer.decoding = layer.decoded > 0
        stats.saw_prompt(layer.layer, layer.nbytes, layer.row_bytes)
        if isinstance(state, CompressingState) and any(start != 0 for start in step.starts):
            raise SeergateError(
                f"the evicting method {layer.method.name!r} takes a prompt in one piece, then token by token; "
                "pass the whole conversation with a new cache"
            )
        output, weights = dense(module, query, key, value, attention_mask, **kwargs)
        if isinstance(state, CompressingState):
            _evict(layer, state, step, stats)
        if not layer.decoded:
            return output, weights
        # The first drafts of assisted decoding come along with the prompt.
        drafts = _decode_each(layer, state, step, layer.decoded, stats, measure_recall)
        return torch.cat((output[:, : new - layer.decoded], drafts.to(output.dtype)), dim=1), weights
    layer.decoding = True
    return _decode_each(layer, state, step, new, stats, measure_recall).to(value.dtype), None


def _to_decode(layer: GatedLayer, appended: Appended, new: int) -> int:
    """How many of the new tokens, the last ones, are decoded; those before them are (part of) a prompt."""
    if new == 1:
        return 1
    if isinstance(layer.state, CompressingState):
        return 0
    if appended.drafted is None:
        return new if layer.decoding and new <= VERIFIED_TOKENS and appended.aligned else 0
    same = len(set(appended.counts)) == 1 and appended.counts[0] >= appended.drafted
    return appended.drafted if same and appended.drafted <= VERIFIED_TOKENS else 0


@ordinary_tensors
def _decode_each(
    layer: GatedLayer, state: Any, step: Step, count: int, stats: DecodeStats, measure_recall: bool
) -> Tensor:
    """Decode the newest ``count`` tokens one after another: ``[B, count, H, D]``."""
    with torch.no_grad(), torch.autocast(step.q_BHSD.device.type, enabled=False):
        outputs = [_decode(layer, state, part, stats, measure_recall) for part in _tokens(step, count)]
    return torch.stack(outputs, dim=1)


def _tokens(step: Step, count: int) -> Iterator[Step]:
    """The step of each of the newest ``count`` tokens, as if those after it had not come yet."""
    if step.q_BHSD.shape[2] == 1:
        yield step
        return
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
            lengths=step.lengths - (new - 1 - i),
        )


def _decode(layer: GatedLayer, state: Any, step: Step, stats: DecodeStats, measure_recall: bool) -> Tensor:
    method = layer.method
    selection: Selection | None = None
    score_bytes = [0] * len(step.starts)
    output: Tensor | None = None
    if isinstance(method, SelectingMethod):
        selection = method.select(state, step)
        if selection is not None and isinstance(state, SelectingState):
            # A row that reads all its blocks is scored only beside longer ones; what it counts must not depend on it.
            score_bytes = [
                0 if method.covers(end) or end <= method.rule.dense_up_to else count
                for count, end in zip(state.score_bytes(step), step.ends, strict=True)
            ]
            output = layer.attend_to(step, selection.indices)
        if measure_recall:
            stats.record_recall(layer.layer, _recall(step, selection, layer.block_size))
    elif isinstance(state, CompressingState):
        output, score_bytes = state.attend(step), state.score_bytes(step)
    if output is None:
        output = attend_to_all(step)
    fetched = layer.take_fetched(step, everything=selection is None)
    if fetched is not None:
        stats.record_fetched(layer.layer, fetched)
    read = state.tokens_read(step) if isinstance(state, CompressingState) else step.ends
    seen = [total - held + end for total, held, end in zip(layer.row_seen, layer.row_lengths, step.ends, strict=True)]
    held = layer.nbytes, layer.row_bytes
    stats.record(layer.layer, step, seen, read, selection, layer.block_size, score_bytes, *held)
    stats.remembers(layer.layer, state.nbytes)
    if isinstance(state, CompressingState):
        _evict(layer, state, step, stats)
    return output


def _decode_fixed(layer: GatedLayer, state: Any, step: FixedStep, stats: DecodeStats) -> Tensor:
    """A decode step that is the same operations whatever the rows' lengths."""
    with torch.no_grad(), torch.autocast(step.q_BHSD.device.type, enabled=False):
        method, selection, score_bytes = layer.method, None, None
        if isinstance(method, SelectingMethod):
            selection = method.select(state, step)
            if selection is not None:  # as in `_decode`, of the rows' own lengths
                score_bytes = state.bytes_to_score(step.lengths) * (step.lengths > method.covered_tokens)
        stats.record_fixed(layer.layer, step, selection, score_bytes)
        return attend_to_all(step) if selection is None else layer.attend_to(step, selection.indices)


def make_step(layer: GatedLayer, appended: Appended, query: Tensor, kwargs: dict[str, Any]) -> Step:
    """What a method gets to see of the tokens that have just joined the cache.

    Args:
        layer: the cache.
        appended: the tokens.
        query: ``[B, H, S, D]``, after RoPE.
        kwargs: what the model gave its attention function.
    """
    scaling = kwargs.get("scaling")
    return layer.step(
        q_pre_BHSD=appended.q_pre.to(layer.dtype),
        k_pre_BKSD=appended.k_pre.to(layer.dtype),
        q_BHSD=appended.compact(query).to(layer.dtype),
        k_BKSD=appended.k,
        starts=appended.starts,
        counts=appended.counts,
        lengths=layer.lengths.clamp(min=1),  # a row without a real token yet reads a zero; nothing reads its output
        sm_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sinks=kwargs.get("s_aux"),
        softcap=kwargs.get("softcap"),
        offsets=layer.row_offsets,
    )


def attend_to_all(step: Step) -> Tensor:
    """Dense decode with the query group folded into the query axis."""
    length, (keys, values, page_table) = step.max_length, step.stored
    home, paged = keys.device, page_table is not None  # keys of an offloaded cache may be elsewhere than the model
    return ops.dense_decode(
        step.q_BHSD[:, :, 0].to(home),
        keys if paged else keys[:, :, :length],
        values if paged else values[:, :, :length],
        None if len(set(step.ends)) == 1 and not paged else step.lengths.to(home),
        sm_scale=step.sm_scale,
        sinks=None if step.sinks is None else step.sinks.to(home),
        softcap=step.softcap,
        page_table=page_table,
    ).to(step.q_BHSD.device)


@ordinary_tensors
def _evict(layer: GatedLayer, state: CompressingState, step: Step, stats: DecodeStats) -> None:
    eviction = state.keep(step)
    if eviction is not None:
        stats.evicted(layer.layer, step, eviction)
        layer.evict(eviction)


def _recall(step: Step, selection: Selection | None, block_size: int) -> Tensor:
    """Share of dense attention's probability on the tokens read, mean over query heads: ``[B]``."""
    if selection is None:
        return torch.ones(len(step.starts), device=step.lengths.device)
    probabilities = log_probabilities(step).exp()
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)  # an attention sink's share is not a token's
    missing = -probabilities.shape[-1] % block_size
    blocks_BKGN = nn.functional.pad(probabilities, (0, missing)).unflatten(-1, (-1, block_size)).sum(-1)
    taken = selection.indices.clamp(min=0).long()[:, :, None].expand(-1, -1, blocks_BKGN.shape[2], -1)
    read = blocks_BKGN.gather(-1, taken) * (selection.indices >= 0)[:, :, None]
    return read.sum(-1).flatten(1).mean(1)
