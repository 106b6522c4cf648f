"""`retention_kl` in torch: targets from scores of chunks of rows against all earlier keys.

Shape suffixes: see `seergate.ops.torch_impl.teacher`; X = G * R.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from seergate.ops.attention import Pack
from seergate.ops.losses import GateKLStats
from seergate.ops.torch_impl.teacher import Teacher, compute_dtype


def retention_kl(
    pack: Pack, scores: Tensor, distance: int, row_start: float, recall_budgets: tuple[int, ...], lse: Tensor
) -> tuple[Tensor, GateKLStats]:
    """The op on checked arguments."""
    q, dtype = pack.q, compute_dtype(pack.q, pack.k, scores)
    teacher = Teacher(pack, len(q) + 1, dtype, lse)  # one block that is never past: no block maxima
    targets_TK = received_attention(teacher, distance, row_start).clamp_(max=1)
    spans = [(start, max(start, end - distance)) for start, end in teacher.spans]
    counted = torch.cat([torch.arange(*span) for span in spans]).to(q.device)
    y, s = targets_TK[counted], scores.to(dtype)[counted]
    unknown = y.isnan() | s.isnan()  # binary_cross_entropy raises for NaN
    y, s = y.masked_fill(unknown, 0.5), s.masked_fill(unknown, 0.5)
    kl = binary_cross_entropy(s, y, reduction="none") - binary_cross_entropy(y, y, reduction="none")
    kl = kl.masked_fill(unknown, torch.nan)
    rows = max(len(counted), 1)
    recall = torch.zeros(len(recall_budgets), teacher.kv_heads, dtype=dtype, device=q.device)
    for start, end in spans:
        of_segment = targets_TK[start:end]
        ranked = of_segment.gather(0, scores[start:end].detach().sort(dim=0, descending=True, stable=True).indices)
        for each, budget in zip(recall, recall_budgets, strict=True):
            share = ranked[: budget - distance].sum(0) / of_segment.sum(0).clamp(min=1e-30)
            each += share * (len(of_segment) / rows)
    stats = GateKLStats(kl.detach().sum(0) / rows, torch.tensor(len(counted), device=q.device), recall)
    return kl.sum() / (rows * teacher.kv_heads), stats


def received_attention(teacher: Teacher, distance: int, row_start: float) -> Tensor:
    """The targets ``y``, ``[T, K]``; 0 for tokens that do not count."""
    spans, device = teacher.spans, teacher.q_THD.device
    rows = [range(max(int((end - start) * row_start), distance), end - start) for start, end in spans]
    plans = [teacher.chunks(some) for some in rows]
    received_TK = teacher.q_THD.new_zeros(len(teacher.q_THD), teacher.kv_heads, dtype=teacher.dtype)
    scratch = teacher.scratch(plans)
    for (start, stop), plan in zip(spans, plans, strict=True):
        for head in range(teacher.kv_heads if plan else 0):
            keys_SD = teacher.head_keys(start, stop, head)
            for chunk in plan:
                scores_SX, block_max_NX = teacher.scores(keys_SD, start, chunk, head, scratch)
                far_SX = scores_SX[: chunk.stop - distance]  # later tokens are too close to every row of the chunk
                rows_X = torch.arange(chunk.start, chunk.stop, device=device).repeat(teacher.group)
                tokens_S1 = torch.arange(len(far_SX), device=device)[:, None]
                far_SX.sub_(teacher.lse(scores_SX, block_max_NX, start, chunk, head))
                best_S = far_SX.masked_fill_(tokens_S1 > rows_X - distance, -torch.inf).amax(1).exp_()
                received_S = received_TK[start : start + len(far_SX), head]
                torch.maximum(received_S, best_S, out=received_S)
    return received_TK
