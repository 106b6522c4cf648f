"""Causal attention over packed sequences in memory linear in their length, for the teacher's forward.

Shape suffixes: B = 1, S tokens of the pack, H query heads, K KV heads, G = H / K, D head dimension.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.hf.teacher_pass import TeacherCall

CHUNK_BYTES = 64 * 2**20


def packed_causal_attention(call: TeacherCall, borders: list[int]) -> tuple[Tensor, Tensor | None]:
    """Attention of each sequence to itself.

    Args:
        call: the layer's inputs.
        borders: where the sequences begin, and the end of the last.

    Returns:
        ``[1, S, H, D]`` in the dtype of the values; and the log of each softmax's denominator, fp32 ``[S, H]``, if
        `gives_lse`.
    """
    plain = call.window is None and call.sinks is None and call.softcap is None
    v_dim, dtype = call.value_BKSD.shape[-1], call.value_BKSD.dtype
    output = torch.empty_like(call.query_BHSD[..., :v_dim], dtype=dtype)
    lse_HS = call.query_BHSD.new_empty(call.query_BHSD.shape[1:3], dtype=torch.float32) if gives_lse(call) else None
    for start, end in zip(borders, borders[1:], strict=False):
        if end == start:
            continue
        # Autocast leaves normalised queries and keys wider than values, and no kernel is told that it is on.
        q, k, v = (x[:, :, start:end].to(output.dtype) for x in (call.query_BHSD, call.key_BKSD, call.value_BKSD))
        fits = plain or (
            call.sinks is None and call.softcap is None and call.window is not None and end - start <= call.window
        )
        if lse_HS is not None:
            output[:, :, start:end], lse_1HS = _fused_on_cpu(q, k, v, call.sm_scale)
            lse_HS[:, start:end] = lse_1HS[0]
        else:
            output[:, :, start:end] = _flash(q, k, v, call.sm_scale) if fits else _chunked(q, k, v, call)
    return output.transpose(1, 2), None if lse_HS is None else lse_HS.T


def gives_lse(call: TeacherCall) -> bool:
    """Whether the log-sum-exp comes with the output: from PyTorch's fused kernel for processors, in a plain layer.

    On a GPU, asking for it would take away PyTorch's choice among its fused kernels.
    """
    q, v = call.query_BHSD, call.value_BKSD
    plain = call.window is None and call.sinks is None and call.softcap is None
    plain = plain and torch.backends.cuda.flash_sdp_enabled()  # for processors too: what `sdpa_kernel` switches
    unit = all(x.stride(-1) == 1 for x in (q, call.key_BKSD, v))
    return plain and unit and q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and _cpu_kernel_gives_lse()


@cache
def _cpu_kernel_gives_lse() -> bool:
    """Whether this PyTorch has the kernel under the name and with the arguments known here."""
    q, k = torch.ones(1, 2, 3, 8), torch.ones(1, 1, 3, 8)
    try:
        output, lse = _fused_on_cpu(q, k, k, 1.0)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(output, _flash(q, k, k, 1.0)) and lse.shape == (1, 2, 3)


def _fused_on_cpu(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp ``[1, H, S]`` of the kernel that `_flash` uses on a processor."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=sm_scale)


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
