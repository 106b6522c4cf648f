"""A forward pass that attends densely whatever the method: it verifies drafts and rectifies keys and values.

Shape suffixes: B batch, S new tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seergate.errors import SeergateError
from seergate.host.attention import DenseAttention, attend_to_all, make_step
from seergate.host.cache import GatedLayer


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
    appended, layer.appended = layer.appended, None
    if layer.state is None or appended is None:
        raise SeergateError(
            "this cache was used by the plain model in between, so the method has not seen all of its tokens; start a "
            "new one"
        )
    step = make_step(layer, appended, query, kwargs)
    layer.state.append(step)
    if query.shape[2] > 1:
        return dense(module, query, key, value, attention_mask, **kwargs)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        return attend_to_all(step)[:, None].to(value.dtype), None
