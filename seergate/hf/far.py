"""Recall of a gate beyond the first and the newest block, compared with that of a recent window.

The first tokens and the newest get most of a model's attention, so a gate that has learned nothing else looks well by
its KL and recall over all blocks.

Shape suffixes: R sampled rows of a segment, S its tokens, N its blocks, H query heads, K KV heads, G heads of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seergate.gates.scorer import Scorer
from seergate.hf.teacher_pass import TeacherCall

ROWS = 256
"""Rows of a pack that are sampled, evenly spaced."""

CHUNK_BYTES = 64 * 2**20
"""Size of the scores of a chunk of rows."""


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
    """Sums over sampled rows and KV heads, in one layer.

    Far blocks are a row's past blocks except the first (or all sinks) and the newest. A window reads the first block
    and the newest ones, the row's own included.

    Args:
        call, lse_TH: the layer's attention.
        qs, ks: the gate's queries ``[T, I, E']`` and keys ``[sum M_i, J, E]``, as `ops.scorer_kl` takes them.
        cu_seqlens, target: see `ops.scorer_kl`; ``"selected"`` is compared with ``"sum"``.
        counted: rows of the pack that count, ascending; of others there are no queries.
        budgets: budgets in tokens, a row's own block included.

    Returns:
        Float64 ``[3 + 2 * budgets]``: how many were summed; the KL over far blocks alone; the target's share on far
        blocks; by budget, that share in the blocks that the gate reads; the same of a window.
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
    """Log of what the target gives each block before it is normalised, ``[K, R, N]``."""
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
    """The sums of these rows; ``own_R`` is the block that a row lies in."""
    block_N = torch.arange(u_KRN.shape[-1], device=u_KRN.device)
    past_RN = block_N < own_R[:, None]
    far_RN = (block_N >= max(1, sink_blocks)) & (block_N < own_R[:, None] - 1)
    log_p, log_pi = (x.masked_fill(~far_RN, -torch.inf).log_softmax(-1) for x in (u_KRN, logits_KRN))
    kl = torch.where(far_RN, log_p.exp() * (log_p - log_pi), 0.0).nan_to_num(0.0)  # a block without mass adds nothing
    mass_KRN = u_KRN.masked_fill(~past_RN, -torch.inf).softmax(-1) * far_RN
    wanted_KRN = logits_KRN.masked_fill(block_N < sink_blocks, torch.inf)  # sinks are read whatever the gate says
    best_KRN = wanted_KRN.masked_fill(~past_RN, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    read, window = [], []
    for budget in budgets:
        wanted = budget // block_size - 1
        read.append(mass_KRN.gather(-1, best_KRN[..., :wanted]).sum())
        window.append((mass_KRN * (block_N >= own_R[:, None] - max(0, wanted - 1))).sum())
    summed = mass_KRN.new_full((), mass_KRN.shape[0] * mass_KRN.shape[1])
    return torch.stack([summed, kl.sum(), mass_KRN.sum(), *read, *window]).double()
