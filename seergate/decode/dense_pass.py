"""A forward pass that attends densely whatever the method: it verifies drafts and rectifies keys and values.

Shape suffixes: B batch, S new tokens, T all tokens, H query heads, K KV heads, G = H / K, R = G * S, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from seergate.cache.layer import GatedLayer
from seergate.cache.ordinary import show
from seergate.decode.step import DenseAttention, attend_to_all, make_step
from seergate.hf.call import pick_up
from seergate.methods.base import Step

MOST_FOLDED = 64
"""A chunk of at most this many tokens is attended to with `newest_tokens_attention`; a longer one is a prompt, and the
model's own attention is made for those."""


def attend_densely(
    layer: GatedLayer,
    dense: DenseAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of the plain model in a gated layer. The method sees the new tokens, and decides nothing.

    Args:
        layer: its cache.
        dense: the attention that the model would have used.
        module, query, key, value, attention_mask: as transformers calls an attention function; query is
            ``[B, H, S, D]``.

    Returns:
        Output ``[B, S, H, D]`` and what else ``dense`` returns.

    Raises:
        SeergateError: if the plain model used this cache in between.
    """
    appended = pick_up(layer)
    assert layer.state is not None
    step = make_step(layer, appended, query, kwargs)
    show(layer.state, step)
    new = query.shape[2]
    foldable = new <= MOST_FOLDED and appended.aligned and step.sinks is None and step.softcap is None
    if new > 1 and not foldable:
        return dense(module, query, key, value, attention_mask, **kwargs)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        output = attend_to_all(step)[:, None] if new == 1 else newest_tokens_attention(step)
        return output.to(value.dtype), None


def newest_tokens_attention(step: Step) -> Tensor:
    """Dense causal attention of the newest tokens of each row, none of them padding: ``[B, S, H, D]``.

    The query heads of a group and the new tokens become rows of one matrix per KV head, so that keys and values are
    read once and never repeated. (The stock implementations repeat them for each query head, which on a CPU takes ten
    times as long as the attention.)

    Args:
        step: without attention sinks and cap on the scores.
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
