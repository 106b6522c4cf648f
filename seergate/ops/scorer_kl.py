"""`scorer_kl`: the distillation loss of any scorer, against any of the targets."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from seergate.checks import is_int
from seergate.config import check_target
from seergate.ops.attention import check_pack
from seergate.ops.backend import implementation
from seergate.ops.checks import check_block_size, check_tensor, readable
from seergate.ops.gate_kl import GateKLStats, check_loss

Scores = Callable[[Tensor, Tensor], Tensor]
"""Queries ``[1, I, R, E']`` and keys ``[1, J, M, E]`` of some blocks -> scores ``[1, Hkv, R, N]``, with a graph."""


def scorer_kl(
    q: Tensor,
    k: Tensor,
    qs: Tensor,
    ks: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    *,
    scores: Scores,
    entry_tokens: int,
    target: str = "max",
    target_budget: int | None = None,
    row_start: float = 0.0,
    sm_scale: float | None = None,
    reduction: str = "row_mean",
    recall_budgets: tuple[int, ...] = (),
    sink_blocks: int = 0,
    row_stride: int = 1,
    row_shift: int = 0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, GateKLStats]:
    """KL divergence from a target to the softmax of a scorer's scores over strictly past blocks.

    `gate_kl` for scores that are not one dot product per block, and for other targets. With ``p_h(t, s)`` the
    teacher's probability of query head ``h`` of a group, causal over the row's segment, the target of block ``j`` is

    * ``"max"``: ``max over h, max over s in j of p_h(t, s)`` (SeerAttention-R);
    * ``"sum"``: ``sum over h, sum over s in j of p_h(t, s)`` (the warm-up of DeepSeek-V3.2, there over tokens and all
      heads; MiniMax's group average);
    * ``"selected"``: ``"sum"``, with target and scores restricted to the blocks that the scorer itself picks within
      ``target_budget`` (the second stage of DeepSeek-V3.2). No gradient flows through the choice. DeepSeek's report
      does not say how the restricted target is normalised. Here the sum over heads is renormalised, as in
      MindSpeed's trainer; in Megatron-LM's each head is normalised over the picked blocks before the sum;

    normalised to sum 1 over the blocks that count. The gradients with respect to ``qs`` and ``ks`` are computed in the
    forward, in chunks of rows, by autograd through ``scores``. There is no GPU kernel: torch runs there too.

    Args:
        q, k: see `gate_kl`.
        qs: ``[T, I, E']``, the queries for ``scores``.
        ks: ``[sum M_i, J, E]``, the keys for ``scores``; segment i of length ``L_i`` has
            ``M_i = ceil(L_i / entry_tokens)`` of them.
        cu_seqlens, block_size: see `gate_kl`.
        scores: scores some rows against the keys of consecutive blocks of a segment; further columns are cut off.
        entry_tokens: tokens per key; divides ``block_size``.
        target: ``"max"``, ``"sum"`` or ``"selected"``.
        target_budget: for ``"selected"``, the tokens that the scorer may pick, the current block and the sink blocks
            included: at least one block more.
        row_start, sm_scale, reduction, sink_blocks, row_stride, row_shift, sinks, softcap, lse: see `gate_kl`.
        recall_budgets: see `gate_kl`; the teacher's share is that of the target, for ``"selected"`` that of ``"sum"``.

    Returns:
        As `gate_kl`.
    """
    pack = check_pack(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_block_size(block_size)
    if not is_int(entry_tokens) or entry_tokens < 1 or block_size % entry_tokens:
        raise ValueError(f"entry_tokens is {entry_tokens!r}; it must divide block_size ({block_size})")
    check_tensor("qs", qs, (len(q), "I", "E'"), on=("q", q))
    entries: int | str = "sum M_i"
    if readable(cu_seqlens):
        entries = int((cu_seqlens.diff() + entry_tokens - 1).div(entry_tokens, rounding_mode="floor").sum())
    check_tensor("ks", ks, (entries, "J", "E"), on=("q", q))
    options = check_loss(q, block_size, row_start, reduction, recall_budgets, lse, sink_blocks, row_stride, row_shift)
    check_target(target, target_budget, block_size, sink_blocks)
    return implementation("scorer_kl", q.device)(
        pack=pack, qs=qs, ks=ks, block_size=block_size, options=options, scores=scores, entry_tokens=entry_tokens,
        target=target, target_budget=target_budget,
    )  # fmt: skip
