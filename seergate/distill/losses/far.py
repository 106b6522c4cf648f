"""Recall of a gate on far blocks (those between the first and the newest), compared with that of a recent window.

Most of a model's attention goes to the first and the newest tokens. So a gate that has learned only these has a good
KL and recall over all blocks.

Shape suffixes: R sampled rows of a segment, S its tokens, N its blocks, H query heads, K KV heads, G heads of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seergate.gates.scorer import Scorer
from seergate.models.packed_forward import TeacherCall

ROWS = 256
"""Number of rows of a pack that are sampled, evenly spaced."""

CHUNK_BYTES = 64 * 2**20
"""Maximum size in bytes of the attention scores of a chunk of rows."""


@torch.no_grad()
def far_sums(
    gate: Scorer,
    call: TeacherCall,
    lse_TH: Tensor,
    qs: Tensor,
    ks: Tensor,
    cu_seqlens: Tensor,
    *,
    counted: Tensor,
    target: str,
    budgets: tuple[int, ...],
) -> Tensor:
    """Sum the KL and the recall on far blocks over sampled rows and KV heads of one layer.

    Far blocks are a row's past blocks except the first one (or all sink blocks) and the newest one. A window reads the
    first block and the newest blocks, including the row's own.

    Args:
        call, lse_TH: the layer's attention inputs and the log-sum-exp of its scores.
        qs, ks: the gate's queries ``[T, I, E']`` and keys ``[sum M_i, J, E]``, as in `ops.scorer_kl`.
        cu_seqlens, target: see `ops.scorer_kl`; ``"selected"`` is replaced by ``"sum"``.
        counted: rows of the pack that count, in ascending order; other rows of ``qs`` are undefined.
        budgets: token budgets, which include the row's own block.

    Returns:
        Float64 ``[3 + 2 * budgets]``: number of rows with far blocks, times KV heads; KL over far blocks alone;
        the target's mass on far blocks; for each budget, the part of that mass that the gate reads, then the part that
        a window reads.
    """
    sums = torch.zeros(3 + 2 * len(budgets), dtype=torch.float64, device=qs.device)
    ends, entry, block_size, sink_blocks = cu_seqlens.tolist(), 0, gate.config.block_size, gate.config.sink_blocks
    sampled = counted[:: max(1, len(counted) // ROWS)]
    for a, b in zip(ends, ends[1:], strict=False):
        rows = sampled[(sampled >= a + 3 * block_size) & (sampled < b)]
        blocks, entries = -(-(b - a) // block_size), -(-(b - a) // gate.entry_tokens)
        size = max(1, CHUNK_BYTES // (4 * call.query_BHSD.shape[1] * max(1, b - a)))
        for part in rows.split(size):
            at = part.to(qs.device)
            u_KRN = _log_targets(call, lse_TH, at, a, blocks * block_size, block_size, target)
            keys = ks[entry : entry + entries].transpose(0, 1)[None]
            logits_KRN = gate.scores(qs[at].transpose(0, 1)[None], keys)[0, ..., :blocks].float()
            sums += _compared(u_KRN, logits_KRN, (at - a) // block_size, block_size, sink_blocks, budgets)
        entry += entries
    return sums


def _log_targets(
    call: TeacherCall, lse_TH: Tensor, rows: Tensor, start: int, padded: int, block_size: int, target: str
) -> Tensor:
    """Return the log of each block's unnormalised target, ``[K, R, N]``."""
    end = min(start + padded, call.key_BKSD.shape[2])
    k_KSD = call.key_BKSD[0, :, start:end].float()
    q_KGRD = call.query_BHSD[0][:, rows].float().unflatten(0, (len(k_KSD), -1))
    scores = q_KGRD @ k_KSD[:, None].transpose(-1, -2) * call.sm_scale
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    scores -= lse_TH[rows].T.unflatten(0, (len(k_KSD), -1))[..., None]
    hidden_RS = torch.arange(start, end, device=rows.device) > rows[:, None]
    scores.masked_fill_(hidden_RS, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, start + padded - end), value=-torch.inf)
    in_blocks = scores.unflatten(-1, (-1, block_size))
    return in_blocks.amax(-1).amax(1) if target == "max" else in_blocks.logsumexp(-1).logsumexp(1)


def _compared(
    u_KRN: Tensor, logits_KRN: Tensor, own_R: Tensor, block_size: int, sink_blocks: int, budgets: tuple[int, ...]
) -> Tensor:
    """Return the sums of `far_sums` for a chunk of rows; ``own_R`` holds the number of each row's own block."""
    block_N = torch.arange(u_KRN.shape[-1], device=u_KRN.device)
    past_RN = block_N < own_R[:, None]
    far_RN = (block_N >= max(1, sink_blocks)) & (block_N < own_R[:, None] - 1)
    log_p, log_pi = (x.masked_fill(~far_RN, -torch.inf).log_softmax(-1) for x in (u_KRN, logits_KRN))
    kl = torch.where(far_RN, log_p.exp() * (log_p - log_pi), 0.0).nan_to_num(0.0)  # 0 log 0 = 0
    mass_KRN = u_KRN.masked_fill(~past_RN, -torch.inf).softmax(-1) * far_RN
    wanted_KRN = logits_KRN.masked_fill(block_N < sink_blocks, torch.inf)  # sink blocks are always read
    best_KRN = wanted_KRN.masked_fill(~past_RN, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    read, window = [], []
    for budget in budgets:
        wanted = budget // block_size - 1
        read.append(mass_KRN.gather(-1, best_KRN[..., :wanted]).sum())
        window.append((mass_KRN * (block_N >= own_R[:, None] - max(0, wanted - 1))).sum())
    summed = far_RN.any(-1).sum() * mass_KRN.shape[0]
    return torch.stack([summed, kl.sum(), mass_KRN.sum(), *read, *window]).double()
