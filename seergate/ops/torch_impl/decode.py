"""`sparse_decode` and `dense_decode` in torch, with the query group as query axis.

`sparse_decode` gathers the selected tokens first. `dense_decode` is PyTorch's fused kernel, or plain matrix products
with sinks or a softcap, which the kernel lacks.

Shape suffixes: B rows, H query heads, K KV heads, G query heads per KV head, D head dimension, P = B * K pairs of a
row and a KV head, X selected blocks, C tokens of a block, S tokens of the cache or gathered tokens of a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.ops.arguments import readable
from seergate.ops.backend import one_node
from seergate.ops.decode import DecodeInputs
from seergate.ops.paging import has_rows_of, rows_of, unpaged

GATHER_BYTES_CPU = 2**21
"""Bytes that each thread gathers at a time. Reusing a buffer that fits in a core's cache is faster than filling a
large one, which costs memory traffic and page faults."""


@torch.no_grad()
def sparse_decode(
    inputs: DecodeInputs, indices: Tensor, counts: Tensor | None, lengths: Tensor, block_size: int
) -> Tensor:
    """The op on checked arguments; ``counts`` is not needed."""
    q, k, v, sm_scale, sinks, softcap, page_table = inputs
    (batch, heads, dim), kv_heads = q.shape, k.shape[1]
    pairs, group, seen = batch * kv_heads, heads // kv_heads, readable(q)
    # Readable tokens of each block. As blocks ascend, the gathered tokens of a pair have its padding at the end.
    starts_BKX = indices.long() * block_size
    used_BKX = (lengths[:, None, None] - starts_BKX).clamp_(0, block_size).masked_fill_(starts_BKX < 0, 0)
    counts_P = used_BKX.sum(-1).flatten()
    low, width = 0, indices.shape[-1] * block_size
    if seen and pairs:  # else the host must not wait for the values
        low, width = (int(n) for n in counts_P.aminmax())
    if not pairs or not width:
        return q.new_zeros(batch, heads, v.shape[-1])
    columns = -(-width // block_size)
    places_BKX = (indices.long() * (used_BKX > 0))[..., :columns]  # padding reads block 0
    unit = block_size
    if not (has_rows_of(k, unit) and has_rows_of(v, unit)):
        unit = 1
        tokens_BKXC = places_BKX[..., None] * block_size + torch.arange(block_size, device=q.device)
        capacity = k.shape[2] if page_table is None else k.shape[2] * page_table.shape[1]
        places_BKX = tokens_BKXC.flatten(2).clamp(max=capacity - 1)
        k, v = (x if has_rows_of(x, 1) else x.contiguous() for x in (k, v))
    sources = [rows_of(x, unit, places_BKX, page_table) for x in (k, v)]
    hidden_PS = None if low == width else torch.arange(width, device=q.device) >= counts_P[:, None]

    q_PGD = q.reshape(pairs, group, dim)
    sinks_PG = None if sinks is None else sinks.reshape(kv_heads, group).repeat(batch, 1)
    # The fused kernel is fast for 16-bit types on every CPU; matrix products of them are not.
    on_cpu = q.device.type == "cpu"
    fused = sinks is None and softcap is None and not (on_cpu and q.dtype in (torch.float32, torch.float64))
    each = columns * block_size * max(dim, v.shape[-1])
    some = pairs
    if seen:
        some = min(pairs, max(1, GATHER_BYTES_CPU * torch.get_num_threads() // (each * k.element_size())))
    rooms = [k.new_empty(some * each) if seen else None for _ in range(1 + fused)]  # unfused: keys and values share it
    out_PGD = q.new_empty(pairs, group, v.shape[-1])
    for lo in range(0, pairs, some):
        part = slice(lo, min(lo + some, pairs))
        hidden_P1S = None if hidden_PS is None else hidden_PS[part, None]
        k_PSD = _gather(sources[0], part, dim, width, rooms[0])
        if fused:
            v_PSD = _clear(_gather(sources[1], part, v.shape[-1], width, rooms[1]), hidden_P1S, low)
            k_PSD, shown_P1S = _clear(k_PSD, hidden_P1S, low), None if hidden_P1S is None else ~hidden_P1S
            out_PGD[part] = F.scaled_dot_product_attention(q_PGD[part], k_PSD, v_PSD, shown_P1S, scale=sm_scale)
            continue
        sink_PG = None if sinks_PG is None else sinks_PG[part]
        probs_PGS = _probabilities(q_PGD[part], k_PSD, hidden_P1S, sm_scale, sink_PG, softcap)
        v_PSD = _clear(_gather(sources[1], part, v.shape[-1], width, rooms[0]), hidden_P1S, low)
        out_PGD[part] = probs_PGS @ v_PSD.to(probs_PGS.dtype)
    if low == 0:
        out_PGD = out_PGD.masked_fill(counts_P[:, None, None] == 0, 0)
    return out_PGD.view(batch, heads, -1)


def _gather(source: tuple[Tensor, Tensor], part: slice, dim: int, width: int, room: Tensor | None) -> Tensor:
    """Gather the selected tokens ``[P, S, D]`` of some pairs, into the buffer ``room`` if given."""
    rows, index_PX = source[0], source[1][part]
    index = index_PX.flatten()
    if room is None:
        gathered = rows.index_select(0, index)
    else:
        there = room[: len(index) * rows.shape[1]].view(len(index), -1)
        gathered = torch.index_select(rows, 0, index, out=there)
    return gathered.view(len(index_PX), -1, dim)[:, :width]


def _clear(x_PSD: Tensor, hidden_P1S: Tensor | None, low: int) -> Tensor:
    """Zero the hidden tokens, since zero times NaN is NaN. The first ``low`` tokens of a pair are never hidden."""
    if hidden_P1S is not None:
        x_PSD[:, low:].masked_fill_(hidden_P1S[:, 0, low:, None], 0)
    return x_PSD


def _probabilities(
    q_PGD: Tensor,
    k_PSD: Tensor,
    hidden_P1S: Tensor | None,
    sm_scale: float,
    sinks_PG: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Softmax of each pair's group over its tokens, ``[P, G, S]``, in fp32 or wider; P may be several dimensions."""
    wide = torch.promote_types(q_PGD.dtype, torch.float32)
    scores_PGS = (q_PGD.to(wide) * sm_scale) @ k_PSD.to(wide).transpose(-1, -2)
    if softcap is not None:
        scores_PGS.div_(softcap).tanh_().mul_(softcap)
    if hidden_P1S is not None:
        scores_PGS.masked_fill_(hidden_P1S, -torch.inf)
    if sinks_PG is None:
        return scores_PGS.softmax(-1)
    sinks_PG1 = sinks_PG.to(wide).expand(scores_PGS.shape[:-1])[..., None]
    return torch.cat((scores_PGS, sinks_PG1), dim=-1).softmax(-1)[..., :-1]


@torch.no_grad()
def dense_decode(inputs: DecodeInputs, lengths: Tensor | None) -> Tensor:
    """The op on checked arguments."""
    if lengths is not None and lengths.device.type == "cpu" and len(lengths):
        return _by_row(*inputs, lengths)
    k, v, page_table, mask_B11S = inputs.k, inputs.v, inputs.page_table, None
    if page_table is not None:
        k, v = unpaged(k, page_table), unpaged(v, page_table)
    if lengths is not None:
        mask_B11S = (torch.arange(k.shape[2], device=k.device) < lengths[:, None])[:, None, None]
        held = mask_B11S.transpose(-1, -2)
        k, v = k.masked_fill(~held, 0), v.masked_fill(~held, 0)  # NaN beyond a row's length must not spread
    return _attend(inputs._replace(k=k, v=v), mask_B11S)


def _attend(inputs: DecodeInputs, mask_B11S: Tensor | None = None) -> Tensor:
    """Attention to a contiguous cache, ``[B, H, D]``; 16-bit caches are copied to fp32 with sinks or a softcap."""
    q_BHD, k_BKSD, v_BKSD, sm_scale, sinks_H, softcap, _ = inputs
    q_BKGD = q_BHD.unflatten(1, (k_BKSD.shape[1], -1))
    if sinks_H is None and softcap is None:
        found = F.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=mask_B11S, scale=sm_scale)
        return found.flatten(1, 2)
    hidden_B11S = None if mask_B11S is None else ~mask_B11S
    sinks_KG = None if sinks_H is None else sinks_H.view(k_BKSD.shape[1], -1)
    probs_BKGS = _probabilities(q_BKGD, k_BKSD, hidden_B11S, sm_scale, sinks_KG, softcap)
    return (probs_BKGS @ v_BKSD.to(probs_BKGS.dtype)).to(q_BHD.dtype).flatten(1, 2)


def _row(x: Tensor, row: int, length: int, page_table: Tensor | None) -> Tensor:
    """The first tokens of one row, ``[1, K, length, D]``; a temporary copy if the cache is paged."""
    if page_table is None:
        return x[row : row + 1, :, :length]
    return unpaged(x, page_table[row : row + 1, : -(-length // x.shape[2])])[:, :, :length]


# One node of a compiled graph, so that it can read the lengths.
@one_node(
    "dense_decode_by_row(Tensor q, Tensor k, Tensor v, float sm_scale, Tensor? sinks, float? softcap, "
    "Tensor? page_table, Tensor lengths) -> Tensor",
    lambda q, k, v, *_: q.new_empty(*q.shape[:2], v.shape[-1]),
)
def _by_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
    lengths: Tensor,
) -> Tensor:
    """Attend row by row: with a mask, the kernel would read masked keys, and zeroing NaN would copy the cache."""
    outputs = []
    for row, length in enumerate(lengths.tolist()):
        k_1KSD, v_1KSD = (_row(x, row, length, page_table) for x in (k, v))
        outputs.append(_attend(DecodeInputs(q[row : row + 1], k_1KSD, v_1KSD, sm_scale, sinks, softcap, None)))
    return torch.cat(outputs)
