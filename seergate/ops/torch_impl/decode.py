"""`sparse_decode` and `dense_decode` in torch, with the query group as query axis.

`sparse_decode` gathers the selected tokens first. `dense_decode` is PyTorch's fused kernel, or plain matrix products
with sinks or a softcap, which the kernel lacks.

Shape suffixes: B rows, H query heads, K KV heads, G query heads per KV head, D head dimension, P = B * K pairs of a
row and a KV head, X selected blocks, C tokens of a block, S tokens of the cache or gathered tokens of a pair.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.inference_mode import without_gradients
from seergate.ops.arguments import readable
from seergate.ops.custom_op import custom_op
from seergate.ops.decode import DecodeInputs
from seergate.ops.gate_math import wide_dtype
from seergate.ops.paging import index_of, layout_of, unpaged
from seergate.ops.rows import RowLengths

GATHER_BYTES_CPU = 2**23
"""Bytes that each thread gathers at a time, into one buffer that all layers of a step use: memory that the system has
to map again for each layer would take longer than the copy."""


class Readable(NamedTuple):
    """How many of the gathered tokens of each pair of a row and a KV head it reads; padding is at their end.

    Attributes:
        low, width: the fewest and the most tokens of a pair.
        full: whether no index is padding.
        hidden_P1S: which of the first ``width`` gathered tokens are padding; ``None`` if none is.
        tail_PT1: the same from token ``low`` on, before which no pair has padding.
        counts_P: the number of tokens.
    """

    low: int
    width: int
    full: bool
    hidden_P1S: Tensor | None
    tail_PT1: Tensor | None
    counts_P: Tensor

    @classmethod
    def of(cls, counts_P: Tensor, most: int, seen: bool) -> Readable:
        """From the number of tokens of each pair, at most ``most``; ``seen``: whether the host may read them."""
        low, width = (int(n) for n in counts_P.aminmax()) if seen and len(counts_P) else (0, most)
        if low == width:
            return cls(low, width, False, None, None, counts_P)
        hidden_PS = torch.arange(width, device=counts_P.device) >= counts_P[:, None]
        return cls(low, width, False, hidden_PS[:, None], hidden_PS[:, low:, None], counts_P)


def _counted(rows: RowLengths, counts: Tensor, columns: int, block_size: int, seen: bool) -> Readable:
    """Tokens of pairs with ``counts [B, K]`` blocks, the last of which is the row's current block."""
    counts_P = rows.tokens(counts.long(), block_size).clamp_(min=0).flatten()
    full = seen and bool((counts == columns).all())
    return Readable.of(counts_P, columns * block_size, seen)._replace(full=full)


@without_gradients
def sparse_decode(
    inputs: DecodeInputs, indices: Tensor, counts: Tensor | None, rows: RowLengths, block_size: int
) -> Tensor:
    """The op on checked arguments."""
    q, k, v, sm_scale, sinks, softcap, page_table = inputs
    (batch, heads, dim), kv_heads, value_dim = q.shape, k.shape[1], v.shape[-1]
    pairs, group, seen, columns = batch * kv_heads, heads // kv_heads, readable(q), indices.shape[-1]
    if not pairs or not columns:
        return q.new_zeros(batch, heads, value_dim)
    if counts is not None:  # as blocks ascend, the padding of a pair is at the end of its gathered tokens
        of_counts = partial(_counted, rows, counts, columns, block_size, seen)
        reads = rows.once(("readable", block_size), of_counts, counts)
        places_BKX = indices if reads.full else indices.clamp(min=0)  # padding reads block 0
    else:
        starts_BKX = indices.long() * block_size
        used_BKX = (rows.tensor[:, None, None] - starts_BKX).clamp_(0, block_size).masked_fill_(starts_BKX < 0, 0)
        reads = Readable.of(used_BKX.sum(-1).flatten(), columns * block_size, seen)
        places_BKX = indices.long() * (used_BKX > 0)
    low, width = reads.low, reads.width
    if not width:
        return q.new_zeros(batch, heads, value_dim)
    if (needed := -(-width // block_size)) < columns:
        columns, places_BKX = needed, places_BKX[..., :needed]
    k_layout, v_layout = layout_of(k, block_size, rows), layout_of(v, block_size, rows)
    if k_layout is None or v_layout is None:
        tokens_BKXC = places_BKX[..., None].long() * block_size + torch.arange(block_size, device=q.device)
        capacity = k.shape[2] if page_table is None else k.shape[2] * page_table.shape[1]
        places_BKX = tokens_BKXC.flatten(2).clamp(max=capacity - 1)
        k, v = (x if layout_of(x, 1, rows) else x.contiguous() for x in (k, v))
        k_layout, v_layout = layout_of(k, 1, rows), layout_of(v, 1, rows)
        assert k_layout is not None and v_layout is not None
    k_RX, v_RX = k_layout.matrix(k), v_layout.matrix(v)
    v_index = index = index_of(k, k_layout, places_BKX, page_table, rows)
    if v_layout[:3] != k_layout[:3]:
        v_index = index_of(v, v_layout, places_BKX, page_table, rows)

    q_PGD = q.reshape(pairs, group, dim)
    sinks_PG = None if sinks is None else sinks.reshape(kv_heads, group).expand(batch, -1, -1).flatten(0, 1)
    # The fused kernel is fast for 16-bit types on every CPU; matrix products of them are not.
    on_cpu = q.device.type == "cpu"
    fused = sinks is None and softcap is None and not (on_cpu and q.dtype in (torch.float32, torch.float64))
    each = columns * block_size * max(dim, value_dim)
    some = pairs
    if seen:
        some = min(pairs, max(1, GATHER_BYTES_CPU * torch.get_num_threads() // (each * k.element_size())))

    def gathered(rows_RX: Tensor, index: Tensor, size: int, own: bool) -> Tensor:
        """The selected tokens ``[P, S, D]`` of pairs, in a buffer that the next call overwrites, unless ``own``."""
        shape = len(index), rows_RX.shape[1]
        room = None if own or not seen else rows.room(shape, k)
        blocks = torch.index_select(rows_RX, 0, index, out=room)
        count = shape[0] * shape[1] // (columns * block_size * size)
        return blocks.as_strided((count, width, size), (columns * block_size * size, size, 1))

    def attended(first: int) -> Tensor:
        """Attention ``[P, G, D]`` of the pairs from ``first`` on."""

        def part(x: Any, each: int = 1) -> Any:
            return x if x is None or some == pairs else x[first * each : (first + some) * each]

        many = len(index) // pairs
        query, hidden, tail = part(q_PGD), part(reads.hidden_P1S), part(reads.tail_PT1)

        def values() -> Tensor:
            v_PSD = gathered(v_RX, part(v_index, many), value_dim, fused)
            return v_PSD if tail is None else _cleared(v_PSD, tail, low)

        k_PSD = gathered(k_RX, part(index, many), dim, fused)
        if fused:
            shown = None if hidden is None else ~hidden
            k_PSD = k_PSD if tail is None else _cleared(k_PSD, tail, low)
            return F.scaled_dot_product_attention(query, k_PSD, values(), shown, scale=sm_scale)
        probs_PGS = _probabilities(query, k_PSD, hidden, sm_scale, part(sinks_PG), softcap)
        return torch.bmm(probs_PGS, values().to(probs_PGS.dtype))

    outputs = [attended(first) for first in range(0, pairs, some)]
    out_PGD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if low == 0:
        out_PGD = out_PGD.masked_fill(reads.counts_P[:, None, None] == 0, 0)
    return out_PGD.to(q.dtype).view(batch, heads, value_dim)


def _cleared(x_PSD: Tensor, tail_PT1: Tensor, low: int) -> Tensor:
    """Zero the padding, from token ``low`` on, since zero times NaN is NaN."""
    x_PSD[:, low:].masked_fill_(tail_PT1, 0)
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
    wide = wide_dtype(q_PGD.dtype)
    scaled, k_PDS = q_PGD.to(wide) * sm_scale, k_PSD.to(wide).transpose(-1, -2)
    scores_PGS = torch.bmm(scaled, k_PDS) if scaled.ndim == 3 else scaled @ k_PDS
    if softcap is not None:
        scores_PGS.div_(softcap).tanh_().mul_(softcap)
    if hidden_P1S is not None:
        scores_PGS.masked_fill_(hidden_P1S, -torch.inf)
    if sinks_PG is None:
        return scores_PGS.softmax(-1)
    sinks_PG1 = sinks_PG.to(wide).expand(scores_PGS.shape[:-1])[..., None]
    return torch.cat((scores_PGS, sinks_PG1), dim=-1).softmax(-1)[..., :-1]


@without_gradients
def dense_decode(inputs: DecodeInputs, rows: RowLengths | None) -> Tensor:
    """The op on checked arguments."""
    lengths = None if rows is None else rows.tensor
    if lengths is not None and lengths.device.type == "cpu" and len(lengths):
        return _by_row(*inputs, lengths)
    k, v, page_table, mask_B11S = inputs.k, inputs.v, inputs.page_table, None
    if page_table is not None:
        k, v = unpaged(k, page_table), unpaged(v, page_table)
    if lengths is not None:
        mask_B11S = (torch.arange(k.shape[2], device=k.device) < lengths[:, None])[:, None, None]
        visible = mask_B11S.transpose(-1, -2)
        k, v = k.masked_fill(~visible, 0), v.masked_fill(~visible, 0)  # NaN beyond a row's length must not spread
    return _attend(inputs._replace(k=k, v=v), mask_B11S)


def _attend(inputs: DecodeInputs, mask_B11S: Tensor | None = None) -> Tensor:
    """Attention to a contiguous cache, ``[B, H, D]``; 16-bit caches are copied to fp32 with sinks or a softcap."""
    q_BHD, k_BKSD, v_BKSD, sm_scale, sinks_H, softcap, _ = inputs
    q_BKGD = q_BHD.unflatten(1, (k_BKSD.shape[1], -1))
    if sinks_H is None and softcap is None:
        output_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=mask_B11S, scale=sm_scale)
        return output_BKGD.flatten(1, 2)
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
@custom_op(
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
