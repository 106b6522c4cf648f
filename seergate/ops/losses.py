"""Distillation losses and their gradients, in memory that grows linearly with the pack.

`gate_kl` is the loss of gates that score a block by one product, `scorer_kl` that of any scorer of blocks, and
`retention_kl` that of scores of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seergate.checks import check, check_count, is_int, is_number
from seergate.config import check_rows, check_target
from seergate.ops.attention import check_pack, packed_attention
from seergate.ops.backend import run
from seergate.ops.checks import check_scale, check_tensor, readable

REDUCTIONS = ("row_mean", "published")


class GateKLStats(NamedTuple):
    """Statistics of one `gate_kl` for the training log: detached tensors on the inputs' device.

    A row is counted if it has at least one strictly past block after the first ``sink_blocks`` and its index in its
    segment of length ``L`` is at least ``int(L * row_start)``, whatever the reduction. Of a segment's rows with these
    properties every ``row_stride``-th is counted, from number ``row_shift % row_stride`` on.

    Attributes:
        kl_per_head: ``[Hkv]``, mean KL in nats over the counted rows; 0 without any.
        rows: int64 scalar, how many rows were counted (per head).
        recall: ``[len(recall_budgets), Hkv]``, mean over the counted rows of the teacher's share (`block_targets`) in
            the gate's best ``budget // block_size - 1 - sink_blocks`` blocks; 0 without any row.
    """

    kl_per_head: Tensor
    rows: Tensor
    recall: Tensor


class LossOptions(NamedTuple):
    """Arguments that the losses share, checked; see `gate_kl`."""

    row_start: float
    reduction: str
    recall_budgets: tuple[int, ...]
    sink_blocks: int = 0
    row_stride: int = 1
    row_shift: int = 0


def gate_kl(
    q: Tensor,
    k: Tensor,
    qg: Tensor,
    kg: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    *,
    row_start: float = 0.0,
    sm_scale: float | None = None,
    gate_scale: float | None = None,
    reduction: str = "row_mean",
    recall_budgets: tuple[int, ...] = (),
    sink_blocks: int = 0,
    row_stride: int = 1,
    row_shift: int = 0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, GateKLStats]:
    """KL divergence from the teacher's block distribution to the gate's.

    Per row ``t`` and KV head, over the strictly past blocks ``j``: ``KL = sum_j p_j (log p_j - log pi_j)`` with ``p``
    the `block_targets` and ``pi = softmax_j(gate_scale * qg_t . kg_j)``. All in log domain, fp32 or wider. The
    gradients with respect to ``qg`` and ``kg`` are computed in the forward, where they are needed; the backward only
    scales them. Nothing of size rows x blocks outlives a chunk of rows. No gradient flows to ``q`` and ``k``: the
    teacher is frozen.

    On GPUs, gates in fp32 that are wider than 128 are multiplied in bf16, for which there are registers; sums, the
    softmax and the results are fp32.

    Args:
        q: ``[T, H, d]`` packed queries as the attention sees them (after RoPE).
        k: ``[T, Hkv, d]`` packed keys, likewise.
        qg: ``[T, Hkv, dg]`` the gate's queries; only those of `counted_rows` are read.
        kg: ``[sum NB_i, Hkv, dg]`` the gate's keys; segment i of length ``L_i`` has ``NB_i = ceil(L_i / block_size)``
            of them. The last one is never a candidate, so its value does not matter.
        cu_seqlens: int32 ``[n + 1]``, segment borders; segments may be empty. In host memory it costs no device
            synchronisation.
        block_size: tokens per block; blocks are counted from each segment's start.
        row_start: of a segment of length ``L``, rows from ``int(L * row_start)`` on count; in [0, 1).
        sm_scale: factor on ``q . k``; ``1 / sqrt(d)`` if ``None``.
        gate_scale: factor on ``qg . kg``; ``1 / sqrt(dg)`` if ``None``.
        reduction: ``"row_mean"``: mean over every counted (row, KV head), see `GateKLStats`; comparable across
            packings. ``"published"``: per segment, the sum of its KL divided by ``Hkv * rows * NBmax``, where ``rows``
            also counts rows without a past block and ``NBmax`` is the block count of the pack's longest segment; then
            the mean over the segments that are not empty (in the published code an empty one would make it NaN).
        recall_budgets: token budgets, the current block and the sink blocks included, at which to measure recall.
        sink_blocks: the first blocks of each segment, which decoding always reads: they are left out of both
            distributions, and the target is normalised over the others.
        row_stride, row_shift: count every ``row_stride``-th row, see `GateKLStats`; neighbours are nearly alike.
        sinks: ``[H]`` attention-sink logits of the teacher (GPT-OSS).
        softcap: cap on the teacher's scores (Gemma 2).
        lse: ``[T, H]``, what `packed_attention` returns beside the output: the natural
            log of each softmax's denominator (scale, cap and sink included). Saves computing it.

    Returns:
        The loss, a scalar in fp32 (float64 if any of q, qg, kg is), and `GateKLStats`. Without a counted row the loss
        and its gradients are 0.
    """
    pack = check_pack(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_count("block_size", block_size, 1)
    tokens, kv_heads = k.shape[:2]
    check_tensor("qg", qg, (tokens, kv_heads, "dg"), on=("q", q))
    blocks: int | str = "sum NB_i"
    if readable(cu_seqlens):
        blocks = int((cu_seqlens.diff() + block_size - 1).div(block_size, rounding_mode="floor").sum())
    check_tensor("kg", kg, (blocks, kv_heads, qg.shape[-1]), on=("q", q))
    gate_scale = check_scale("gate_scale", gate_scale, qg.shape[-1])
    options = LossOptions(row_start, reduction, recall_budgets, sink_blocks, row_stride, row_shift)
    options = _checked(options, block_size, lse, q)
    return run(
        "gate_kl", q.device, pack=pack, qg=qg, kg=kg, block_size=block_size, gate_scale=gate_scale, options=options,
        lse=lse,
    )  # fmt: skip


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
    check_count("block_size", block_size, 1)
    if not is_int(entry_tokens) or entry_tokens < 1 or block_size % entry_tokens:
        raise ValueError(f"entry_tokens is {entry_tokens!r}; it must divide block_size ({block_size})")
    check_tensor("qs", qs, (len(q), "I", "E'"), on=("q", q))
    entries: int | str = "sum M_i"
    if readable(cu_seqlens):
        entries = int((cu_seqlens.diff() + entry_tokens - 1).div(entry_tokens, rounding_mode="floor").sum())
    check_tensor("ks", ks, (entries, "J", "E"), on=("q", q))
    options = LossOptions(row_start, reduction, recall_budgets, sink_blocks, row_stride, row_shift)
    options = _checked(options, block_size, lse, q)
    check_target(target, target_budget, block_size, sink_blocks)
    return run(
        "scorer_kl", q.device, pack=pack, qs=qs, ks=ks, block_size=block_size, options=options, lse=lse,
        scores=scores, entry_tokens=entry_tokens, target=target, target_budget=target_budget,
    )  # fmt: skip


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
    check_count("distance", distance, 1)
    options = _checked(LossOptions(row_start, "row_mean", recall_budgets), distance, lse, q)
    if lse is None:
        lse = packed_attention(q, k, k, cu_seqlens, sm_scale, sinks=sinks, softcap=softcap).lse
    return run(
        "retention_kl", q.device, pack=pack, scores=scores, distance=distance, row_start=row_start,
        recall_budgets=options.recall_budgets, lse=lse,
    )  # fmt: skip


def _checked(options: LossOptions, block_size: int, lse: Tensor | None, q: Tensor) -> LossOptions:
    row_start, reduction, recall_budgets, sink_blocks, row_stride, row_shift = options
    if lse is not None:
        check_tensor("lse", lse, q.shape[:2], on=("q", q))
    check("row_start", row_start, is_number(row_start) and 0 <= row_start < 1, "at least 0 and less than 1")
    check("reduction", reduction, reduction in REDUCTIONS, f"one of {', '.join(REDUCTIONS)}")
    check_rows(reduction, sink_blocks, row_stride)
    check_count("row_shift", row_shift)
    budgets = tuple(recall_budgets) if isinstance(recall_budgets, Sequence) else (0,)
    if not all(is_int(budget) and budget >= block_size for budget in budgets):
        raise ValueError(
            f"recall_budgets is {recall_budgets!r}; each must be an integer of at least block_size ({block_size})"
        )
    return options._replace(recall_budgets=budgets)


def counted_rows(
    lengths: Sequence[int], block_size: int, row_start: float, sink_blocks: int, row_stride: int, row_shift: int
) -> list[range]:
    """By segment, the rows that count, see `GateKLStats`; `gate_kl` reads ``qg`` of these only."""
    least = (1 + sink_blocks) * block_size
    rows = [range(min(max(int(length * row_start), least), length), length) for length in lengths]
    return [some[row_shift % row_stride :: row_stride] for some in rows]


def refuse_second_order() -> None:
    """Refuse a second derivative, in the backward: the saved gradients are constants, so it would be zero."""
    if torch.is_grad_enabled():
        raise RuntimeError("gate_kl has no second derivative; call backward without create_graph")
