"""`retention_kl`: the distillation loss of scores of tokens, against the attention that the tokens receive."""

from __future__ import annotations

from torch import Tensor

from seergate.checks import check, is_int
from seergate.ops.attention import check_pack, packed_attention
from seergate.ops.backend import implementation
from seergate.ops.checks import check_tensor
from seergate.ops.gate_kl import GateKLStats, check_loss


def retention_kl(
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    cu_seqlens: Tensor,
    distance: int,
    *,
    row_start: float = 0.0,
    sm_scale: float | None = None,
    recall_budgets: tuple[int, ...] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, GateKLStats]:
    """KL divergence of a token's score from the highest attention probability that later tokens give it.

    With ``p_h(t, s)`` the teacher's probability, causal over the row's segment, a token's target for a KV head is
    ``y(s) = max over h of the group, max over rows t of p_h(t, s)``. Rows are those of its segment with an index of at
    least ``int(length * row_start)`` that come ``distance`` tokens or more after it; a token without such a row does
    not count. The loss of a token is ``KL(Bernoulli(y) || Bernoulli(score))``: the cross-entropy of Fast KVzip (arXiv
    2601.17668) less what no score can change. No gradient flows to ``q`` and ``k``.

    Args:
        q, k, cu_seqlens, sm_scale, sinks, softcap: as in `packed_attention`.
        scores: ``[T, Hkv]``, in [0, 1].
        distance: tokens from a token to the first row that counts for it, at least 1.
        row_start: see `ops.gate_kl`; in [0, 1).
        recall_budgets: tokens, each at least ``distance``.
        lse: ``[T, H]`` log of the softmax's denominator, from `packed_attention`; computed if ``None``.

    Returns:
        The mean over tokens and KV heads, and `GateKLStats`, whose rows are the tokens that count. Recall is the share
        of a segment's targets that its best ``budget - distance`` tokens hold, mean over segments.
    """
    pack = check_pack(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_tensor("scores", scores, k.shape[:2], on=("q", q))
    check("distance", distance, is_int(distance) and distance >= 1, "a positive number of tokens")
    options = check_loss(q, distance, row_start, "row_mean", recall_budgets, lse)
    if lse is None:
        lse = packed_attention(q, k, k, cu_seqlens, sm_scale, sinks=sinks, softcap=softcap).lse
    budgets = options.recall_budgets
    return implementation("retention_kl", q.device)(
        pack=pack, scores=scores, distance=distance, row_start=row_start, recall_budgets=budgets, lse=lse
    )
