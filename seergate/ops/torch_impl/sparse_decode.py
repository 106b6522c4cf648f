"""`sparse_decode` in torch: gather the selected tokens, then dense attention with the group as query axis.

Shape suffixes: B batch, H query heads, K KV heads, G query heads per KV head, D head dimension, P = B * K pairs of a
row and a KV head, X selected blocks, C tokens of a block, S gathered tokens of a pair.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

GATHER_BYTES_CPU = 2**20
"""How much each thread gathers at a time. A buffer that stays in a core's cache, and is written again and again, costs
less than the memory traffic and the fresh pages of a large one."""


@torch.no_grad()
def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    lengths: Tensor,
    block_size: int,
    sm_scale: float,
    *,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
) -> Tensor:
    """See `seergate.ops.sparse_decode`."""
    (batch, heads, dim), kv_heads, page = q.shape, k.shape[1], k.shape[2]
    capacity = page if page_table is None else page * page_table.shape[1]
    pairs, group, on_cpu = batch * kv_heads, heads // kv_heads, q.device.type == "cpu"
    out_PGD = q.new_zeros(pairs, group, v.shape[-1])
    starts_BKX = indices.long() * block_size
    used_BKX = (lengths[:, None, None] - starts_BKX).clamp(0, block_size).masked_fill(starts_BKX < 0, 0)
    counts_P = used_BKX.sum(-1).flatten()  # readable tokens of each pair: the first ones of its blocks, which ascend
    low, width = 0, indices.shape[-1] * block_size
    if on_cpu and pairs:  # elsewhere the host must not wait for the values
        low, width = (int(n) for n in counts_P.aminmax())
    if not pairs or not width:
        return out_PGD.view(batch, heads, -1)

    uniform = low == width
    if uniform and page % block_size == 0 and k.is_contiguous() and v.is_contiguous():
        # Whole blocks are rows of a matrix; the tail of the last one is sliced off.
        blocks_BKX, per_page = indices[..., : -(-width // block_size)].long(), page // block_size
        pages_BKX, blocks_BKX = _places(blocks_BKX, per_page, page_table)
        heads_K1 = torch.arange(kv_heads, device=q.device)[:, None]
        index_PX = ((pages_BKX * kv_heads + heads_K1) * per_page + blocks_BKX).flatten(0, 1)
        sources = [(x.view(-1, block_size * x.shape[-1]), index_PX) for x in (k, v)]
    else:
        # Places beyond a pair's tokens read its first token, so that nothing unselected is ever touched.
        offsets_C = torch.arange(block_size, device=q.device)
        tokens_BKXC = starts_BKX[..., None] + offsets_C
        tokens_BKXC = torch.where(offsets_C < used_BKX[..., None], tokens_BKXC, starts_BKX[..., :1, None])
        tokens_BKS = tokens_BKXC.flatten(2)[..., :width].clamp(0, capacity - 1)
        sources = [_token_rows(x, tokens_BKS, page_table) for x in (k, v)]
    mask_PS = None if uniform else torch.arange(width, device=q.device) < counts_P[:, None]

    q_PGD = q.reshape(pairs, group, dim)
    sinks_PG = None if sinks is None else sinks.reshape(kv_heads, group).repeat(batch, 1)
    # Narrow types go to the fused kernel, which is fast for them on every CPU; matrix products of them are not.
    plain = sinks is None and softcap is None
    fused = plain and not (on_cpu and q.dtype in (torch.float32, torch.float64))
    limit = GATHER_BYTES_CPU * torch.get_num_threads() // k.element_size() if on_cpu else pairs * width * dim
    step = min(pairs, max(1, limit // (width * dim)))
    for lo in range(0, pairs, step):
        some = slice(lo, min(lo + step, pairs))
        k_PSD, v_PSD = (
            _Gather(rows, index[some], x.shape[-1], width) for (rows, index), x in zip(sources, (k, v), strict=True)
        )
        mask_P1S = None if mask_PS is None else mask_PS[some, None]
        if fused:
            mask = None if mask_P1S is None else mask_P1S[None]
            out_PGD[some] = F.scaled_dot_product_attention(
                q_PGD[None, some], k_PSD.all()[None], v_PSD.all()[None], attn_mask=mask, scale=sm_scale
            )[0]
        else:
            sink = None if sinks_PG is None else sinks_PG[some]
            out_PGD[some] = _attend(q_PGD[some], k_PSD, v_PSD, mask_P1S, sm_scale, sink, softcap, limit)
    if low == 0:
        out_PGD = out_PGD.masked_fill(counts_P[:, None, None] == 0, 0)
    return out_PGD.view(batch, heads, -1)


def _places(units_BKX: Tensor, per_page: int, page_table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where blocks or tokens of a row lie: the first index into the cache, and which one of its page each is.

    Args:
        units_BKX: numbered from the row's first.
        per_page: how many of them a page holds.
        page_table: as in `seergate.ops.sparse_decode`.
    """
    if page_table is None:
        return torch.arange(len(units_BKX), device=units_BKX.device)[:, None, None], units_BKX
    pages_BKX = units_BKX // per_page
    return page_table.long().gather(1, pages_BKX.flatten(1)).view_as(pages_BKX), units_BKX % per_page


def _token_rows(x: Tensor, tokens_BKS: Tensor, page_table: Tensor | None) -> tuple[Tensor, Tensor]:
    """A matrix with one token of one head per row, and the rows ``[P, S]`` that hold these tokens.

    A view of ``x`` where its layout allows: also for a slice of a buffer, and for heads last (``[B, S, K, D]``
    transposed).
    """
    dim = x.shape[-1]
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    if x.stride(-1) != 1 or any(stride % dim for stride in strides):
        x = x.contiguous()
        strides = list(x.stride()[:3])
    per_row, per_head, per_token = (stride // dim for stride in strides)
    batch, kv_heads, capacity = x.shape[:3]
    count = 1 + (batch - 1) * per_row + (kv_heads - 1) * per_head + (capacity - 1) * per_token
    rows_BKS, tokens_BKS = _places(tokens_BKS, capacity, page_table)
    heads_K1 = torch.arange(kv_heads, device=x.device)[:, None] * per_head
    index_BKS = tokens_BKS * per_token + heads_K1 + rows_BKS * per_row
    return x.as_strided((count, dim), (dim, 1)), index_BKS.flatten(0, 1)


class _Gather:
    """The selected tokens ``[P, S, D]`` of some pairs: rows ``index_PX`` of a matrix, of one or more tokens each."""

    def __init__(self, rows: Tensor, index_PX: Tensor, dim: int, width: int) -> None:
        self.rows, self.index_PX, self.dim, self.width = rows, index_PX, dim, width

    def all(self) -> Tensor:
        """All of them."""
        gathered = self.rows.index_select(0, self.index_PX.flatten())
        return gathered.view(len(self.index_PX), -1, self.dim)[:, : self.width]

    def parts(self, limit: int) -> Iterator[tuple[slice, Tensor]]:
        """A range of tokens at a time, about ``limit`` numbers, each in the memory of the one before."""
        pairs, columns = self.index_PX.shape
        per_row = self.rows.shape[1] // self.dim
        some = min(columns, max(1, limit // (pairs * self.rows.shape[1])))
        buffer = self.rows.new_empty(pairs * some, self.rows.shape[1])
        for lo in range(0, columns, some):
            index = self.index_PX[:, lo : lo + some].flatten()
            gathered = torch.index_select(self.rows, 0, index, out=buffer[: len(index)]).view(pairs, -1, self.dim)
            tokens = slice(lo * per_row, min((lo + some) * per_row, self.width))
            yield tokens, gathered[:, : tokens.stop - tokens.start]


def _attend(
    q_PGD: Tensor,
    k_PSD: _Gather,
    v_PSD: _Gather,
    mask_P1S: Tensor | None,
    sm_scale: float,
    sinks_PG: Tensor | None,
    softcap: float | None,
    limit: int,
) -> Tensor:
    """Attention of each pair's group to its selected tokens, ``[P, G, Dv]``: scores, softmax, mean of the values."""
    dtype = torch.promote_types(q_PGD.dtype, torch.float32)
    scaled_PGD = q_PGD.to(dtype) * sm_scale
    scores_PGS = scaled_PGD.new_empty(*q_PGD.shape[:2], k_PSD.width)
    for tokens, keys in k_PSD.parts(limit):
        scores_PGS[..., tokens] = scaled_PGD @ keys.to(dtype).transpose(1, 2)
    if softcap is not None:
        scores_PGS.div_(softcap).tanh_().mul_(softcap)
    if mask_P1S is not None:
        scores_PGS.masked_fill_(~mask_P1S, -torch.inf)
    if sinks_PG is not None:
        scores_PGS = torch.cat((scores_PGS, sinks_PG[..., None].to(dtype)), dim=-1)
    probs_PGS = scores_PGS.softmax(-1)
    out_PGD = scaled_PGD.new_zeros(*q_PGD.shape[:2], v_PSD.dim)
    for tokens, values in v_PSD.parts(limit):
        out_PGD.baddbmm_(probs_PGS[..., tokens], values.to(dtype))
    return out_PGD.to(q_PGD.dtype)
