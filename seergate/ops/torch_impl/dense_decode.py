"""`dense_decode` in torch: the fused kernel on packed heads, or plain matrix products where it lacks something.

Shape suffixes: B rows, S tokens of the cache, K KV heads, G query heads per KV head, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.ops.checks import readable
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
    """See `seergate.ops.dense_decode`."""
    q_BKGD = q.unflatten(1, (k.shape[1], -1))
    mask_B11S = None
    plain = sinks is None and softcap is None
    if plain and lengths is not None and readable(lengths):
        # Row by row: a mask would make the kernel read what it hides, and clearing NaN would copy the cache.
        rows = [
            F.scaled_dot_product_attention(
                q_BKGD[i : i + 1], _row(k, i, n, page_table), _row(v, i, n, page_table), scale=sm_scale
            )
            for i, n in enumerate(lengths.tolist())
        ]
        return torch.cat(rows).flatten(1, 2)
    if page_table is not None:
        k, v = unpaged(k, page_table), unpaged(v, page_table)
        if lengths is not None and readable(lengths):
            longest = int(lengths.max()) if len(lengths) else 0
            k, v = k[:, :, :longest], v[:, :, :longest]
    if lengths is not None:
        mask_B11S = (torch.arange(k.shape[2], device=k.device) < lengths[:, None])[:, None, None]
        held = mask_B11S.transpose(-1, -2)
        k, v = k.masked_fill(~held, 0), v.masked_fill(~held, 0)  # NaN beyond a row's length must not spread
    if plain:
        return F.scaled_dot_product_attention(q_BKGD, k, v, attn_mask=mask_B11S, scale=sm_scale).flatten(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores_BKGS = (q_BKGD.to(wide) * sm_scale) @ k.to(wide).transpose(-1, -2)
    if softcap is not None:
        scores_BKGS = softcap * torch.tanh(scores_BKGS / softcap)
    if mask_B11S is not None:
        scores_BKGS = scores_BKGS.masked_fill(~mask_B11S, -torch.inf)
    if sinks is not None:
        sink_BKG1 = sinks.to(wide).view(1, k.shape[1], -1, 1).expand(*scores_BKGS.shape[:-1], 1)
        probs_BKGS = torch.cat((scores_BKGS, sink_BKG1), -1).softmax(-1)[..., :-1]
    else:
        probs_BKGS = scores_BKGS.softmax(-1)
    return (probs_BKGS @ v.to(wide)).flatten(1, 2).to(q.dtype)


def _row(x: Tensor, row: int, length: int, page_table: Tensor | None) -> Tensor:
    """The first tokens of one row, ``[1, K, length, D]``; of a paged cache a copy, which lives for one attention."""
    if page_table is None:
        return x[row : row + 1, :, :length]
    return unpaged(x, page_table[row : row + 1, : -(-length // x.shape[2])])[:, :, :length]
