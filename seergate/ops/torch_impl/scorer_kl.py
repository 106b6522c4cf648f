"""`scorer_kl` in torch: works on chunks of rows; gradients in the forward, by autograd through a chunk's scores.

Shape suffixes: see `seergate.ops.torch_impl.teacher`; I query and J key heads of the scorer, E their width, M entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seergate.ops.attention import Pack
from seergate.ops.losses import GateKLStats, LossOptions, Scores
from seergate.ops.torch_impl.gate_kl import Outcome, Sums, add_recall, rows_and_weights, with_gradients
from seergate.ops.torch_impl.teacher import MASKED, Teacher, compute_dtype, in_pack


def scorer_kl(
    pack: Pack,
    qs: Tensor,
    ks: Tensor,
    block_size: int,
    options: LossOptions,
    lse: Tensor | None,
    scores: Scores,
    entry_tokens: int,
    target: str,
) -> tuple[Tensor, GateKLStats]:
    """The op on checked arguments."""
    sink_blocks, dtype = options.sink_blocks, compute_dtype(pack.q, pack.k, qs, ks)
    teacher = Teacher(pack, block_size, dtype, lse, sink_blocks)
    total, rows, weights = rows_and_weights(teacher.spans, block_size, teacher.kv_heads, options)
    per_token = qs.shape[1] // entry_tokens  # scores that the scorer computes per row and token
    plans = [teacher.chunks(some, per_token) for some in rows]
    past_blocks = [budget // block_size - 1 - sink_blocks for budget in options.recall_budgets]
    log_targets = Teacher.log_targets if target == "max" else log_masses

    def run(want_dqs: bool, want_dks: bool) -> Outcome:
        device, kv_heads = qs.device, teacher.kv_heads
        dqs_TIE = torch.zeros_like(qs, memory_format=torch.contiguous_format) if want_dqs else None
        dks_MJE = torch.zeros(ks.shape, dtype=dtype, device=device) if want_dks else None
        sums = Sums(kv_heads, len(past_blocks), device)
        scratch, entry = teacher.scratch(plans), 0
        for (start, stop), plan, weight in zip(teacher.spans, plans, weights, strict=True):
            keys_KSD = [teacher.head_keys(start, stop, head) for head in range(kv_heads if plan else 0)]
            for chunk in plan:
                blocks = chunk[-1] // block_size - sink_blocks  # candidates of the chunk's last row
                first = entry + sink_blocks * block_size // entry_tokens
                some = slice(first, first + blocks * block_size // entry_tokens)
                here = in_pack(start, chunk)
                qs_RIE = qs[here].detach().to(dtype).requires_grad_(want_dqs)
                ks_MJE = ks[some].detach().to(dtype).requires_grad_(want_dks)
                with torch.set_grad_enabled(want_dqs or want_dks):
                    logits_KRN = scores(qs_RIE.transpose(0, 1)[None], ks_MJE.transpose(0, 1)[None])[0, ..., :blocks]
                    logits_KRN = logits_KRN.masked_fill(teacher.not_past(chunk).T, MASKED)
                delta_KRN = torch.empty_like(logits_KRN)
                for head, a_RN in enumerate(logits_KRN.detach().to(dtype)):
                    u_RN = log_targets(teacher, keys_KSD[head], start, chunk, head, scratch).T
                    log_p_RN, log_pi_RN = u_RN.log_softmax(1), a_RN.log_softmax(1)
                    p_RN = log_p_RN.exp()
                    sums.add(((log_p_RN - log_pi_RN) * p_RN).sum(dtype=torch.float64), weight, head)
                    add_recall(sums.recall_IK[:, head], past_blocks, a_RN.T, p_RN.T)
                    delta_KRN[head] = (log_pi_RN.exp() - p_RN) * weight
                sides = [x for x in (qs_RIE, ks_MJE) if x.requires_grad]
                if sides:
                    gradients = iter(torch.autograd.grad(logits_KRN, sides, delta_KRN))
                    if dqs_TIE is not None:
                        dqs_TIE[here] = next(gradients).to(dqs_TIE.dtype)
                    if dks_MJE is not None:
                        dks_MJE[some] += next(gradients)
            entry += -(-(stop - start) // entry_tokens)
        return sums.outcome(total, dtype, dqs_TIE, None if dks_MJE is None else dks_MJE.to(ks.dtype))

    return with_gradients(run, qs, ks)


def log_masses(teacher: Teacher, keys_SD: Tensor, start: int, rows: range, head: int, scratch: Tensor) -> Tensor:
    """``u [N, R]``: log of each past block's probability, summed over the group's heads; `MASKED` where not past.

    Arguments: see `Teacher.log_targets`.
    """
    scores_SX, block_max_NX = teacher.scores(keys_SD, start, rows, head, scratch)
    in_blocks = scores_SX[: len(block_max_NX) * teacher.block_size].view(-1, teacher.block_size, scores_SX.shape[1])
    block_lse_NX = in_blocks.logsumexp(1)  # before `lse`, which may overwrite the scores
    lse_X = teacher.lse(scores_SX, block_max_NX, start, rows, head)
    u_NR = (block_lse_NX[teacher.sink_blocks :] - lse_X).view(-1, teacher.group, len(rows)).logsumexp(1)
    return u_NR.masked_fill_(teacher.not_past(rows), MASKED)
