"""`dense_decode` in torch: the fused kernel on packed heads, or plain matrix products where it lacks something.

Shape suffixes: B rows, S tokens of the cache, K KV heads, G query heads per KV head, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.ops.one_node import one_node
from seergate.ops.paging import unpaged


@torch.no_grad()
def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    sm_scale: float,
    *,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
) -> Tensor:
    """The public op, once its arguments are checked."""
    if lengths is not None and lengths.device.type == "cpu" and len(lengths):
        return _by_row(q, k, v, lengths, sm_scale, sinks, softcap, page_table)
    mask_B11S = None
    if page_table is not None:
        k, v = unpaged(k, page_table), unpaged(v, page_table)
    if lengths is not None:
        mask_B11S = (torch.arange(k.shape[2], device=k.device) < lengths[:, None])[:, None, None]
        held = mask_B11S.transpose(-1, -2)
        k, v = k.masked_fill(~held, 0), v.masked_fill(~held, 0)  # NaN beyond a row's length must not spread
    return _attend(q, k, v, mask_B11S, sm_scale, sinks, softcap)


def _attend(
    q_BHD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask_B11S: Tensor | None,
    sm_scale: float,
    sinks_H: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attention of each group to its KV head, ``[B, H, D]``. With sinks or a softcap, keys and values of a narrower
    type are copied to fp32.
    """
    q_BKGD = q_BHD.unflatten(1, (k_BKSD.shape[1], -1))
    if sinks_H is None and softcap is None:
        found = F.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=mask_B11S, scale=sm_scale)
        return found.flatten(1, 2)
    wide = torch.promote_types(q_BKGD.dtype, torch.float32)
    scores_BKGS = (q_BKGD.to(wide) * sm_scale) @ k_BKSD.to(wide).transpose(-1, -2)
    if softcap is not None:
        scores_BKGS = softcap * torch.tanh(scores_BKGS / softcap)
    if mask_B11S is not None:
        scores_BKGS = scores_BKGS.masked_fill(~mask_B11S, -torch.inf)
    if sinks_H is not None:
        sink_BKG1 = sinks_H.to(wide).view(k_BKSD.shape[1], -1, 1).expand(*scores_BKGS.shape[:-1], 1)
        probs_BKGS = torch.cat((scores_BKGS, sink_BKG1), -1).softmax(-1)[..., :-1]
    else:
        probs_BKGS = scores_BKGS.softmax(-1)
    return (probs_BKGS @ v_BKSD.to(wide)).to(q_BHD.dtype).flatten(1, 2)


def _row(x: Tensor, row: int, length: int, page_table: Tensor | None) -> Tensor:
    """The first tokens of one row, ``[1, K, length, D]``; of a paged cache a copy, which lives for one attention."""
    if page_table is None:
        return x[row : row + 1, :, :length]
    return unpaged(x, page_table[row : row + 1, : -(-length // x.shape[2])])[:, :, :length]


# One node of a compiled graph, in which the lengths can be read.
@one_node(
    "dense_decode_by_row(Tensor q, Tensor k, Tensor v, Tensor lengths, float sm_scale, Tensor? sinks, float? softcap, "
    "Tensor? page_table) -> Tensor",
    lambda q, k, v, *_: q.new_empty(*q.shape[:2], v.shape[-1]),
)
def _by_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    sm_scale: float,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
) -> Tensor:
    """Row by row: a mask would make the kernel read what it hides, and clearing NaN would copy the cache."""
    rows = [
        _attend(q[i : i + 1], _row(k, i, n, page_table), _row(v, i, n, page_table), None, sm_scale, sinks, softcap)
        for i, n in enumerate(lengths.tolist())
    ]
    return torch.cat(rows)
