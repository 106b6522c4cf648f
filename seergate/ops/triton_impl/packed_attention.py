"""`packed_attention` on GPUs: a kernel of PyTorch if one supports the arguments, else `attention_kernel`."""

from __future__ import annotations

import torch
from torch import Tensor

from seergate.inference_mode import without_gradients
from seergate.ops.attention import Pack, PackedAttention
from seergate.ops.torch_impl import packed_attention as torch_impl
from seergate.ops.triton_impl import packs
from seergate.ops.triton_impl.teacher import Teacher, runs_here

BLOCK_SIZE = 64
"""Arbitrary, of the sizes that the kernel supports: without targets, blocks have no effect."""


@without_gradients
def packed_attention(pack: Pack, v: Tensor, window: int | None) -> PackedAttention:
    """The op on checked arguments."""
    q = pack.q
    spans = packs.segments(pack.cu_seqlens, len(q))
    window = torch_impl.in_use(window, spans)
    shape = q.device, q.dtype, q.shape[-1], v.shape[-1]
    fused = torch_impl.fused_kernel(*shape, window=window, softcap=pack.softcap)
    if fused is not None or not runs_here(q, BLOCK_SIZE, v):
        return NotImplemented
    teacher = Teacher(pack, BLOCK_SIZE, v, window)
    out = q.new_empty(*q.shape[:2], v.shape[-1], dtype=v.dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    teacher.attend(spans, out, lse)
    return PackedAttention(out, lse)
