"""dense_decode: one query token per row against its whole cache, the query group folded into the query axis.

Shape suffixes: B rows, S capacity of the cache, H query heads, K KV heads, G = H / K, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Dense attention of the newest token of each row.

    With the G query heads of a KV head side by side as rows of one small matrix, keys and values are read once per KV
    head instead of once per query head.

    Args:
        q: ``[B, H, D]``.
        k, v: ``[B, K, S, D]``.
        lengths: int ``[B]``, how many of the S entries count; all of them if ``None``. What lies beyond may be
            anything.
        sm_scale: factor on query . key; 1 / sqrt(D) if ``None``.
        sinks: ``[H]`` attention-sink logits, which take part in the softmax and have no value.
        softcap: the scores become ``softcap * tanh(score / softcap)``.

    Returns:
        ``[B, H, D]`` in the dtype of q.

    Raises:
        ValueError: if H is not a multiple of K or the shapes do not belong together.
    """
    if q.ndim != 3 or k.ndim != 4 or v.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; they must be [B, H, D] and [B, K, S, D] with H a multiple of K"
        )
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    q_BKGD = q.unflatten(1, (k.shape[1], -1))
    mask = None
    if lengths is not None:
        mask = (torch.arange(k.shape[2], device=k.device) < lengths[:, None])[:, None]  # [B, 1, S]
        k, v = (x.masked_fill(~mask[..., None], 0) for x in (k, v))  # NaN beyond a row's length must not spread
    if sinks is None and softcap is None:
        packed = None if mask is None else mask[:, :, None]
        return F.scaled_dot_product_attention(q_BKGD, k, v, attn_mask=packed, scale=scale).flatten(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q_BKGD.to(wide) * scale) @ k.to(wide).transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    if sinks is not None:
        logits = sinks.to(wide).view(1, k.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        probabilities = torch.cat((scores, logits), -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ v.to(wide)).flatten(1, 2).to(q.dtype)
