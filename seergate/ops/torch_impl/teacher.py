"""`block_targets` in torch, and the chunk of it that `gate_kl` shares.

Shape suffixes: T packed tokens, H query heads, K KV heads, G query heads per KV head, D head dimension, R rows of a
chunk, S keys of a segment up to the chunk's end, N candidate blocks. Chunks are laid out keys first (``[S, G * R]``):
reductions over the tokens of a block then run along vectors, whatever the block size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

MASKED = -1e30
"""Log of nothing. Finite, so that the difference of two is no NaN; exp() of it is exactly 0 in fp32 and float64."""

CHUNK_BYTES_CPU = 4 * 2**20
CHUNK_BYTES_DEVICE = 256 * 2**20
"""Size of the score buffer: about a core's share of cache; on a device, enough to fill it."""

MIN_ROWS = 16
"""Rows of a chunk at very long contexts, where the buffer then grows: fewer would make the products memory-bound."""


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """What to compute in: fp32, or float64 if any input is."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def segments(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """Start and end of every segment. Waits for the device if ``cu_seqlens`` lies on one."""
    return list(pairwise(cu_seqlens.tolist()))


def row_chunks(first: int, length: int, area: int) -> Iterator[tuple[int, int]]:
    """Cut rows ``first..length`` so that rows x keys (all keys up to the chunk's last row) stays within ``area``."""
    while first < length:
        rows = int((math.sqrt(first * first + 4 * area) - first) / 2)  # solves rows * (first + rows) = area
        end = min(length, first + max(rows, MIN_ROWS))
        yield first, end
        first = end


class Teacher:
    """Block targets in log domain, chunk by chunk, of one pack.

    Args:
        q, k, block_size, sm_scale, sinks, softcap: as in `seergate.ops.block_targets`.
        dtype: to compute in.
    """

    def __init__(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        block_size: int,
        sm_scale: float,
        sinks_H: Tensor | None,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> None:
        self.q_THD, self.k_TKD = q_THD.detach(), k_TKD.detach()
        self.block_size, self.sm_scale, self.softcap, self.dtype = block_size, sm_scale, softcap, dtype
        self.kv_heads = k_TKD.shape[1]
        self.group = q_THD.shape[1] // self.kv_heads
        self.sinks_KG = None if sinks_H is None else sinks_H.detach().to(dtype).reshape(self.kv_heads, self.group)
        limit = CHUNK_BYTES_CPU if q_THD.device.type == "cpu" else CHUNK_BYTES_DEVICE
        self.area = max(1, limit // (self.group * torch.finfo(dtype).bits // 8))

    def chunks(self, first: int, length: int) -> list[tuple[int, int]]:
        """Row ranges of a segment of this length, from row ``first`` on, without the rows that have no past block."""
        return list(row_chunks(max(first, self.block_size), length, self.area))

    def scratch(self, plans: list[list[tuple[int, int]]]) -> Tensor:
        """One score buffer that is large enough for every chunk of these plans."""
        size = max(((end - first) * end for plan in plans for first, end in plan), default=0)
        return self.q_THD.new_empty(size * self.group, dtype=self.dtype)

    def head_keys(self, start: int, end: int, head: int) -> Tensor:
        """Keys of one segment and KV head, ``[S, D]``, contiguous."""
        return self.k_TKD[start:end, head].to(self.dtype).contiguous()

    def log_targets(self, keys_SD: Tensor, start: int, first: int, end: int, head: int, scratch: Tensor) -> Tensor:
        """``u [N, R]``: log of each past block's target before it is normalised over blocks; `MASKED` where not past.

        ``u_j = max over the group's heads of (highest score in block j - log sum exp of all scores up to the row)``
        (each head's normaliser comes off before the maximum over heads).

        Args:
            keys_SD: the segment's keys, from `head_keys`.
            start: where the segment starts in the pack.
            first, end: the chunk's rows, counted from the segment's start; ``first >= block_size``.
            head: KV head.
            scratch: from `scratch`; overwritten.
        """
        group, rows, blocks = self.group, end - first, (end - 1) // self.block_size
        past = blocks * self.block_size  # tokens in candidate blocks
        q_RGD = self.q_THD[start + first : start + end, head * group : (head + 1) * group].to(self.dtype)
        q_XD = q_RGD.transpose(0, 1).reshape(group * rows, -1) * self.sm_scale  # X = G * R
        scores_SX = scratch[: end * group * rows].view(end, group * rows)
        torch.mm(keys_SD[:end], q_XD.T, out=scores_SX)
        if self.softcap is not None:
            scores_SX.div_(self.softcap).tanh_().mul_(self.softcap)
        future_RR = torch.ones(rows, rows, dtype=torch.bool, device=q_XD.device).tril(-1)  # key after row
        scores_SX[first:].view(rows, group, rows).masked_fill_(future_RR[:, None], -torch.inf)

        block_max_NX = scores_SX[:past].view(blocks, self.block_size, group * rows).amax(1)
        top_X = torch.maximum(block_max_NX.amax(0), scores_SX[past:].amax(0))
        lse_X = scores_SX.sub_(top_X).exp_().sum(0).log_().add_(top_X)
        if self.sinks_KG is not None:
            lse_X = torch.logaddexp(lse_X, self.sinks_KG[head].repeat_interleave(rows))
        u_NR = block_max_NX.sub_(lse_X).view(blocks, group, rows).amax(1)
        return u_NR.masked_fill_(self.not_past(first, end), MASKED)

    def not_past(self, first: int, end: int) -> Tensor:
        """``[N, R]``: block n does not lie strictly before row r's own block."""
        device = self.q_THD.device
        own_R = torch.arange(first, end, device=device) // self.block_size
        return torch.arange((end - 1) // self.block_size, device=device)[:, None] >= own_R


@torch.no_grad()
def block_targets(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    sm_scale: float,
    *,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """See `seergate.ops.block_targets`."""
    dtype = wide_dtype(q, k)
    teacher = Teacher(q, k, block_size, sm_scale, sinks, softcap, dtype)
    spans = segments(cu_seqlens)
    plans = [teacher.chunks(0, end - start) for start, end in spans]
    widest = max(-(-(end - start) // block_size) for start, end in spans)
    targets_TKN = q.new_zeros(q.shape[0], teacher.kv_heads, widest, dtype=dtype)
    scratch = teacher.scratch(plans)
    for (start, stop), plan in zip(spans, plans, strict=True):
        for head in range(teacher.kv_heads if plan else 0):
            keys_SD = teacher.head_keys(start, stop, head)
            for first, end in plan:
                u_NR = teacher.log_targets(keys_SD, start, first, end, head, scratch)
                targets_TKN[start + first : start + end, head, : len(u_NR)] = u_NR.softmax(0).T
    return targets_TKN
