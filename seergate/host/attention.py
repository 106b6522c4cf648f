"""The registered attention function, and what it does in a gated layer: dense prefill, method-driven decode.

Shape suffixes: B batch, S query tokens, T key tokens, H query heads, K KV heads, G = H / K, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from seergate import ops
from seergate.errors import SeergateError
from seergate.host.cache import GatedLayer
from seergate.host.families import modeling_module
from seergate.host.stats import DecodeStats
from seergate.methods.base import EvictingState, SelectingMethod, SelectingState, Step
from seergate.methods.oracle import log_probabilities
from seergate.ops import Selection

ATTENTION_NAME = "seergate"
CALL_KEYWORD = "seergate_call"


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


def dense_function(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that the model would have used in this module."""
    eager = getattr(modeling_module(module), "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)


def attend(
    layer: GatedLayer,
    stats: DecodeStats,
    measure_recall: bool,
    dense: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention in a gated layer, after its new tokens joined the cache.

    Several query tokens (a prompt, or a chunk of one) attend densely and exactly as in the plain model; one query
    token attends to what the method selects.
    """
    step = _step(layer, query, kwargs)
    state = layer.state
    if state is None:
        raise SeergateError(
            "this cache was used by the plain model in between, so the method has not seen all of its tokens; start a "
            "new one"
        )
    state.append(step)
    if query.shape[2] > 1:
        if isinstance(state, EvictingState):
            if any(start != 0 for start in step.starts):
                raise SeergateError(
                    f"the evicting method {layer.method.name!r} takes a prompt in one piece, then token by token; "
                    "pass the whole conversation with a new cache"
                )
            output = dense(module, query, key, value, attention_mask, **kwargs)
            _evict(layer, state, step)
            return output
        return dense(module, query, key, value, attention_mask, **kwargs)
    with torch.no_grad():
        output_BHD = _decode(layer, state, step, stats, measure_recall)
    return output_BHD[:, None].to(query.dtype), None


def _decode(layer: GatedLayer, state: Any, step: Step, stats: DecodeStats, measure_recall: bool) -> Tensor:
    method = layer.method
    selection: Selection | None = None
    score_bytes = 0
    output: Tensor | None = None
    if isinstance(method, SelectingMethod):
        selection = method.select(state, step)
        if selection is not None and isinstance(state, SelectingState):
            score_bytes = state.score_bytes(step)
            output = ops.sparse_decode(
                step.q_BHSD[:, :, 0],
                step.keys_BKCD,
                step.values_BKCD,
                selection.indices,
                step.lengths,
                layer.block_size,
                step.sm_scale,
                sinks=step.sinks,
                softcap=step.softcap,
            )
        if measure_recall:
            stats.record_recall(layer.layer, _recall(step, selection, layer.block_size))
    elif isinstance(state, EvictingState):
        output = state.attend(step)
    if output is None:
        output = _attend_to_all(step)
    stats.record(layer.layer, step, layer.row_seen, selection, layer.block_size, score_bytes, layer.nbytes)
    if isinstance(state, EvictingState):
        _evict(layer, state, step)
    return output


def _step(layer: GatedLayer, query: Tensor, kwargs: dict[str, Any]) -> Step:
    appended, layer.appended = layer.appended, None
    assert appended is not None and layer.keys is not None and layer.values is not None
    scaling = kwargs.get("scaling")
    return Step(
        q_pre_BHSD=appended.q_pre,
        k_pre_BKSD=appended.k_pre,
        q_BHSD=appended.compact(query),
        k_BKSD=appended.k,
        starts=appended.starts,
        counts=appended.counts,
        keys_BKCD=layer.keys,
        values_BKCD=layer.values,
        lengths=layer.lengths,
        sm_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sinks=kwargs.get("s_aux"),
        softcap=kwargs.get("softcap"),
    )


def _attend_to_all(step: Step) -> Tensor:
    """Dense decode with the query group folded into the query axis."""
    length = step.max_length
    return ops.dense_decode(
        step.q_BHSD[:, :, 0],
        step.keys_BKCD[:, :, :length],
        step.values_BKCD[:, :, :length],
        None if len(set(step.ends)) == 1 else step.lengths,
        sm_scale=step.sm_scale,
        sinks=step.sinks,
        softcap=step.softcap,
    )


def _evict(layer: GatedLayer, state: EvictingState, step: Step) -> None:
    kept = state.keep(step)
    if kept is not None:
        layer.keep(*kept)


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
