"""Causal attention over packed sequences in memory linear in their length, for the teacher's forward.

Shape suffixes: B = 1, S tokens of the pack, H query heads, K KV heads, G = H / K, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.host.teaching import TeacherCall

CHUNK_BYTES = 64 * 2**20


def packed_causal_attention(call: TeacherCall, borders: list[int]) -> Tensor:
    """Attention of each sequence to itself.

    Args:
        call: the layer's inputs.
        borders: where the sequences begin, and the end of the last.

    Returns:
        ``[1, S, H, D]`` in the dtype of the values.
    """
    plain = call.window is None and call.sinks is None and call.softcap is None
    output = torch.empty_like(call.query_BHSD[..., : call.value_BKSD.shape[-1]])
    for start, end in zip(borders, borders[1:], strict=False):
        if end == start:
            continue
        q, k, v = (x[:, :, start:end] for x in (call.query_BHSD, call.key_BKSD, call.value_BKSD))
        fits = plain or (
            call.sinks is None and call.softcap is None and call.window is not None and end - start <= call.window
        )
        output[:, :, start:end] = _flash(q, k, v, call.sm_scale) if fits else _chunked(q, k, v, call)
    return output.transpose(1, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> Tensor:
    """The fused kernel, which is causal without a mask."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=sm_scale, enable_gqa=q.shape[1] != k.shape[1])


def _chunked(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, call: TeacherCall) -> Tensor:
    """Windows, attention sinks and soft caps, which the fused kernel has not: one chunk of rows at a time, in fp32."""
    heads, length = k_BKSD.shape[1], q_BHSD.shape[2]
    wide = torch.promote_types(q_BHSD.dtype, torch.float32)
    k, v = k_BKSD.to(wide)[:, :, None], v_BKSD.to(wide)[:, :, None]
    q = q_BHSD.to(wide).unflatten(1, (heads, -1)) * call.sm_scale
    rows = max(1, CHUNK_BYTES // (q_BHSD.shape[1] * length * wide.itemsize))
    pieces = []
    for first in range(0, length, rows):
        last = min(length, first + rows)
        lowest = 0 if call.window is None else max(0, first - call.window + 1)
        scores = q[:, :, :, first:last] @ k[..., lowest:last, :].transpose(-1, -2)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        at = torch.arange(first, last, device=q.device)[:, None]
        to = torch.arange(lowest, last, device=q.device)
        hidden = to > at
        if call.window is not None:
            hidden = hidden | (to <= at - call.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if call.sinks is not None:
            sinks = call.sinks.to(wide).view(1, heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        pieces.append(probabilities @ v[..., lowest:last, :])
    return torch.cat(pieces, dim=3).flatten(1, 2).to(v_BKSD.dtype)
