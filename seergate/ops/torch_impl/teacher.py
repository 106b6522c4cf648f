"""`attention_with_block_targets` in torch, and the teacher's computation that the losses share.

Shape suffixes: T packed tokens, H query heads, K KV heads, G query heads per KV head, D head dimension, R rows of a
chunk, S keys of a segment up to the chunk's end, N candidate blocks. Chunks have keys in the first dimension
(``[S, G * R]``), so reductions over the tokens of a block are vectorised for every block size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from seergate.inference_mode import without_gradients
from seergate.ops.attention import AttentionWithTargets, Pack

MASKED = -1e30
"""Stands for log 0. Finite, so that the difference of two is not NaN; its exp() is 0 in fp32 and float64."""

CHUNK_BYTES_CPU = 4 * 2**20
CHUNK_BYTES_DEVICE = 256 * 2**20
"""Size of the score buffer: on a CPU about a core's share of the cache, on a device enough work to fill it."""

MIN_ROWS = 16
"""Minimum rows of a chunk; at very long contexts the buffer grows. Products of fewer rows are memory-bound."""


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The compute dtype: float32, or float64 if any input is."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def segments(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """Start and end of every segment. Waits for the device if ``cu_seqlens`` is on one."""
    return list(pairwise(cu_seqlens.tolist()))


def row_chunks(rows: range, area: int) -> Iterator[range]:
    """Split rows of a segment into chunks so that rows x keys, up to the chunk's last row, is at most ``area``."""
    while rows:
        first, step = rows.start, rows.step
        # solves count * (first + step * count) = area
        count = int((math.sqrt(first * first + 4 * step * area) - first) / (2 * step))
        yield rows[: max(count, MIN_ROWS)]
        rows = rows[max(count, MIN_ROWS) :]


def in_pack(start: int, rows: range) -> slice:
    """The slice of the pack that holds these rows of the segment that starts at ``start``."""
    return slice(start + rows.start, start + rows[-1] + 1, rows.step)


class Teacher:
    """Log block targets of one pack, computed chunk by chunk.

    Args:
        dtype: dtype of the computation.
        lse_TH: log-sum-exp of every row, if known.
        sink_blocks: number of first blocks of a segment that are left out of the targets.
    """

    def __init__(
        self, pack: Pack, block_size: int, dtype: torch.dtype, lse_TH: Tensor | None = None, sink_blocks: int = 0
    ) -> None:
        self.q_THD, self.k_TKD, sinks_H = pack.q.detach(), pack.k.detach(), pack.sinks
        self.spans = segments(pack.cu_seqlens)
        self.sm_scale, self.softcap = pack.sm_scale, pack.softcap
        self.block_size, self.dtype, self.sink_blocks = block_size, dtype, sink_blocks
        self.kv_heads = self.k_TKD.shape[1]
        self.group = self.q_THD.shape[1] // self.kv_heads
        self.sinks_KG = None if sinks_H is None else sinks_H.detach().to(dtype).reshape(self.kv_heads, self.group)
        self.lse_TH = None if lse_TH is None else lse_TH.detach()
        limit = CHUNK_BYTES_CPU if pack.q.device.type == "cpu" else CHUNK_BYTES_DEVICE
        self.area = max(1, limit // (self.group * torch.finfo(dtype).bits // 8))

    def chunks(self, rows: range, heads: int = 0) -> list[range]:
        """Chunks of rows of a segment, whose scores of a group, or of ``heads`` heads if more, fit the buffer."""
        return list(row_chunks(rows, self.area * self.group // max(self.group, heads)))

    def scratch(self, plans: list[list[range]]) -> Tensor:
        """A score buffer that is large enough for every chunk of these plans."""
        size = max((len(rows) * (rows[-1] + 1) for plan in plans for rows in plan), default=0)
        return self.q_THD.new_empty(size * self.group, dtype=self.dtype)

    def head_keys(self, start: int, end: int, head: int) -> Tensor:
        """Keys of one segment and KV head, ``[S, D]``, contiguous."""
        return self.k_TKD[start:end, head].to(self.dtype).contiguous()

    def log_targets(self, keys_SD: Tensor, start: int, rows: range, head: int, scratch: Tensor) -> Tensor:
        """Log targets ``u [N, R]`` of blocks from ``sink_blocks`` on, not yet normalised; `MASKED` where not past.

        ``u_j = max over the group's heads of (highest score in block j - log sum exp of all scores up to the row)``:
        each head is normalised before the maximum over heads. The segment starts at ``start`` of the pack and has the
        keys ``keys_SD``, from `head_keys`; ``rows`` count from its start. Overwrites ``scratch``, from `scratch`.
        """
        scores_SX, block_max_NX = self.scores(keys_SD, start, rows, head, scratch)
        lse_X = self.lse(scores_SX, block_max_NX, start, rows, head)
        return self.group_max(block_max_NX[self.sink_blocks :], lse_X, rows)

    def lse(self, scores_SX: Tensor, block_max_NX: Tensor, start: int, rows: range, head: int) -> Tensor:
        """Log-sum-exp of the chunk's rows, ``[X]``; overwrites the scores if it is not known."""
        if self.lse_TH is None:
            return self.normaliser(scores_SX, block_max_NX, head)[0]
        group = slice(head * self.group, (head + 1) * self.group)
        return self.lse_TH[in_pack(start, rows), group].T.reshape(-1).to(self.dtype)

    def scores(self, keys_SD: Tensor, start: int, rows: range, head: int, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Causal scores ``[S, X]`` (in ``scratch``), X = G * R, and their maxima per candidate block ``[N, X]``."""
        group, count, first, end = self.group, len(rows), rows.start, rows[-1] + 1
        blocks = rows[-1] // self.block_size
        past = blocks * self.block_size  # tokens in candidate blocks
        q_RGD = self.q_THD[in_pack(start, rows), head * group : (head + 1) * group].to(self.dtype)
        q_XD = q_RGD.transpose(0, 1).reshape(group * count, -1) * self.sm_scale
        scores_SX = scratch[: end * group * count].view(end, group * count)
        torch.mm(keys_SD[:end], q_XD.T, out=scores_SX)
        if self.softcap is not None:
            scores_SX.div_(self.softcap).tanh_().mul_(self.softcap)
        keys, seen_by = (torch.arange(first, end, step, device=q_XD.device) for step in (1, rows.step))
        future = keys[:, None] > seen_by
        scores_SX[first:].view(end - first, group, count).masked_fill_(future[:, None], -torch.inf)
        return scores_SX, scores_SX[:past].view(blocks, self.block_size, group * count).amax(1)

    def normaliser(self, scores_SX: Tensor, block_max_NX: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Log-sum-exp ``[X]`` with the sink, and highest score ``[X]``; scores become ``exp(score - highest)``."""
        past = len(block_max_NX) * self.block_size
        top_X = scores_SX[past:].amax(0)
        if past:
            top_X = torch.maximum(block_max_NX.amax(0), top_X)
        lse_X = scores_SX.sub_(top_X).exp_().sum(0).log_().add_(top_X)
        if self.sinks_KG is not None:
            lse_X = torch.logaddexp(lse_X, self.sinks_KG[head].repeat_interleave(len(lse_X) // self.group))
        return lse_X, top_X

    def group_max(self, block_max_NX: Tensor, lse_X: Tensor, rows: range) -> Tensor:
        """``u [N, R]`` from block maxima, which it overwrites."""
        u_NR = block_max_NX.sub_(lse_X).view(len(block_max_NX), self.group, len(rows)).amax(1)
        return u_NR.masked_fill_(self.not_past(rows), MASKED)

    def not_past(self, rows: range) -> Tensor:
        """``[N, R]``: true if block ``sink_blocks + n`` is not strictly before row r's own block."""
        device = self.q_THD.device
        own_R = torch.arange(rows.start, rows.stop, rows.step, device=device) // self.block_size
        return torch.arange(self.sink_blocks, rows[-1] // self.block_size, device=device)[:, None] >= own_R


@without_gradients
def attention_with_block_targets(pack: Pack, v: Tensor, block_size: int) -> AttentionWithTargets:
    """The op on checked arguments."""
    q, dtype = pack.q, compute_dtype(pack.q, pack.k)
    teacher = Teacher(pack, block_size, dtype)
    (tokens, heads), group, v_dim = q.shape[:2], teacher.group, v.shape[-1]
    plans = [teacher.chunks(range(end - start)) for start, end in teacher.spans]
    widest = max(-(-(end - start) // block_size) for start, end in teacher.spans)
    out_THD = v.new_empty(tokens, heads, v_dim)
    lse_TH = q.new_empty(tokens, heads, dtype=dtype)
    targets_TKN = q.new_full((tokens, teacher.kv_heads, widest), -torch.inf, dtype=dtype)
    scratch = teacher.scratch(plans)
    for (start, stop), plan in zip(teacher.spans, plans, strict=True):
        for head in range(teacher.kv_heads if plan else 0):
            keys_SD = teacher.head_keys(start, stop, head)
            values_SD = v[start:stop, head].to(dtype)
            heads_of_group = slice(head * group, (head + 1) * group)
            for rows in plan:
                here = in_pack(start, rows)
                scores_SX, block_max_NX = teacher.scores(keys_SD, start, rows, head, scratch)
                lse_X, top_X = teacher.normaliser(scores_SX, block_max_NX, head)
                out_XD = (scores_SX.T @ values_SD[: rows.stop]).mul_((top_X - lse_X).exp_()[:, None])
                out_THD[here, heads_of_group] = out_XD.view(group, len(rows), v_dim).transpose(0, 1).to(v.dtype)
                lse_TH[here, heads_of_group] = lse_X.view(group, len(rows)).T
                u_NR = teacher.group_max(block_max_NX, lse_X, rows)
                targets_TKN[here, head, : len(u_NR)] = u_NR.masked_fill_(teacher.not_past(rows), -torch.inf).T
    return AttentionWithTargets(out_THD, lse_TH, targets_TKN)
