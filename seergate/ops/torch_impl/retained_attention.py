"""`retained_attention` in torch: works on chunks of rows and recomputes them in the backward.

Shape suffixes: see `seergate.ops.torch_impl.teacher`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seergate.ops.attention import Pack, RetainedAttention
from seergate.ops.torch_impl.teacher import (
    CHUNK_BYTES_CPU,
    CHUNK_BYTES_DEVICE,
    compute_dtype,
    in_pack,
    row_chunks,
    segments,
)


def retained_attention(pack: Pack, v: Tensor, log_beta: Tensor, window: int | None) -> RetainedAttention:
    """The op on checked arguments."""
    q, k, cu_seqlens, sm_scale, sinks, softcap = pack
    dtype, heads, kv_heads = compute_dtype(q, k, v, log_beta), q.shape[1], k.shape[1]
    limit = CHUNK_BYTES_CPU if q.device.type == "cpu" else CHUNK_BYTES_DEVICE

    def rows(q_RHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, log_beta_SK: Tensor, first: int) -> tuple[Tensor, Tensor]:
        q_KGRD = q_RHD.to(dtype).transpose(0, 1).unflatten(0, (kv_heads, -1)) * sm_scale
        logits_KGRS = q_KGRD @ k_SKD.to(dtype).permute(1, 2, 0)[:, None]
        if softcap is not None:
            logits_KGRS = softcap * torch.tanh(logits_KGRS / softcap)
        places = torch.arange(len(k_SKD), device=q.device)
        ages_RS = places[first:, None] - places
        seen_RS = (ages_RS >= 0) & (ages_RS < (len(places) if window is None else window))
        finite_SK = log_beta_SK.clamp(min=torch.finfo(dtype).min)  # -inf times an age of 0 would be NaN
        worth_KRS = (finite_SK.T[:, None] * ages_RS.clamp(min=0)).exp() * seen_RS
        logits_KGRS = (logits_KGRS * worth_KRS[:, None]).masked_fill(~seen_RS, -torch.inf)
        if sinks is not None:
            sinks_KGR1 = sinks.to(dtype).view(kv_heads, -1, 1, 1).expand(*logits_KGRS.shape[:3], 1)
            logits_KGRS = torch.cat((logits_KGRS, sinks_KGR1), -1)
        p_KGRS = logits_KGRS.softmax(-1)[..., : len(places)]
        output_KGRD = p_KGRS @ v_SKD.to(dtype).transpose(0, 1)[:, None]
        return output_KGRD.flatten(0, 1).transpose(0, 1).to(v.dtype), worth_KRS.sum(-1).T

    none = q.new_empty(0, heads, v.shape[-1], dtype=v.dtype), q.new_empty(0, kv_heads, dtype=dtype)
    chunks = [none]  # a pack may be empty
    for start, stop in segments(cu_seqlens):
        for part in row_chunks(range(stop - start), max(1, limit // (heads * dtype.itemsize))):
            keys = slice(start, start + part.stop)
            chunk = q[in_pack(start, part)], k[keys], v[keys], log_beta[keys].to(dtype), part.start
            chunks.append(checkpoint(rows, *chunk, use_reentrant=False, preserve_rng_state=False))
    output, weight_sums = zip(*chunks, strict=True)
    return RetainedAttention(torch.cat(output), torch.cat(weight_sums))
