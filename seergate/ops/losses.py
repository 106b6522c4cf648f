"""Distillation losses and their gradients, in memory linear in the length of the pack.

`gate_kl` trains gates whose block score is one dot product, `scorer_kl` any scorer of blocks, and `retention_kl`
retention gates, which score tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from seergate.checks import check, check_count, check_one_of, is_int, is_number
from seergate.config import TARGETS, check_rows
from seergate.ops.arguments import check_scale, check_tensor, readable
from seergate.ops.attention import check_pack, packed_attention
from seergate.ops.backend import run

REDUCTIONS = ("row_mean", "published")


class GateKLStats(NamedTuple):
    """Statistics of one `gate_kl` for the training log: detached tensors on the inputs' device.

    A row is eligible if it has at least one strictly past block after the first ``sink_blocks`` and its index in its
    segment of length ``L`` is at least ``int(L * row_start)``. In each segment, every ``row_stride``-th eligible row
    counts, from number ``row_shift % row_stride`` on. This does not depend on the reduction.

    Attributes:
        kl_per_head: ``[Hkv]``, mean KL in nats over the counted rows; 0 without counted rows.
        rows: int64 scalar, number of counted rows, the same for each head.
        recall: ``[len(recall_budgets), Hkv]``, sum of the teacher's `block_targets` over the gate's best
            ``budget // block_size - 1 - sink_blocks`` blocks, mean over the counted rows; 0 without counted rows.
    """

    kl_per_head: Tensor
    rows: Tensor
    recall: Tensor


class LossOptions(NamedTuple):
    """Checked arguments that the losses share; see `gate_kl`."""

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
    the `block_targets` and ``pi = softmax_j(gate_scale * qg_t . kg_j)``, computed in log domain in fp32 or wider. The
    forward computes the gradients with respect to ``qg`` and ``kg`` if they are needed; the backward only scales them.
    Memory for rows x blocks is needed for one chunk of rows at a time. The teacher's ``q`` and ``k`` get no gradient.

    On GPUs, fp32 gates wider than 128 exceed the registers: products are in bf16; sums, softmax and results in fp32.

    Args:
        q: ``[T, H, d]`` packed queries after RoPE.
        k: ``[T, Hkv, d]`` packed keys after RoPE.
        qg: ``[T, Hkv, dg]`` the gate's queries; only those of `counted_rows` are read.
        kg: ``[sum NB_i, Hkv, dg]`` the gate's keys; segment i of length ``L_i`` has ``NB_i = ceil(L_i / block_size)``.
            The last key of a segment is never a candidate, so its value does not matter.
        cu_seqlens: int32 ``[n + 1]``, segment borders; segments may be empty. In host memory it costs no sync.
        block_size: tokens per block; blocks are counted from each segment's start.
        row_start: in [0, 1); in a segment of length ``L``, rows from ``int(L * row_start)`` on count.
        sm_scale: factor on ``q . k``; ``1 / sqrt(d)`` if ``None``.
        gate_scale: factor on ``qg . kg``; ``1 / sqrt(dg)`` if ``None``.
        reduction: ``"row_mean"``: mean over all counted (row, KV head) pairs, see `GateKLStats`; comparable across
            packings. ``"published"``: per segment, the sum of its KL divided by ``Hkv * rows * NBmax``, where ``rows``
            also counts rows without a past block and ``NBmax`` is the block count of the pack's longest segment; then
            the mean over the non-empty segments (in the published code an empty one gives NaN).
        recall_budgets: token budgets for recall, each at least ``block_size``; include the current and sink blocks.
        sink_blocks: number of first blocks of each segment, which decoding always reads. They are left out of both
            distributions, and the target is normalised over the other blocks.
        row_stride, row_shift: count every ``row_stride``-th row, see `GateKLStats`; neighbouring rows are similar.
        sinks: ``[H]`` attention-sink logits of the teacher (GPT-OSS).
        softcap: cap on the teacher's scores (Gemma 2).
        lse: ``[T, H]``, from `packed_attention` with the same scale, softcap and sinks; computed if ``None``.

    Returns:
        The loss, a scalar in fp32 (float64 if any of q, qg, kg is), and `GateKLStats`. Without counted rows it is 0.

    Raises:
        RuntimeError: in the backward, for a second derivative.
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
    options = _checked(options, ("block_size", block_size), lse, q)
    return run(
        "gate_kl", q.device, pack=pack, qg=qg, kg=kg, block_size=block_size, gate_scale=gate_scale, options=options,
        lse=lse,
    )  # fmt: skip


Scores = Callable[[Tensor, Tensor], Tensor]
"""Queries ``[1, I, R, E']`` and keys ``[1, J, M, E]`` -> block scores ``[1, Hkv, R, N]``, differentiable."""


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

    Generalises `gate_kl` to any scores of blocks and to other targets. With ``p_h(t, s)`` the teacher's probability of
    query head ``h`` of a group, causal over the row's segment, the target of block ``j`` is one of

    * ``"max"``: ``max over h, max over s in j of p_h(t, s)`` (SeerAttention-R);
    * ``"sum"``: ``sum over h, sum over s in j of p_h(t, s)`` (MiniMax's group average; the warm-up of DeepSeek-V3.2
      has tokens in place of blocks and sums over all heads);

    normalised to sum 1 over the blocks that count. The forward computes the gradients with respect to ``qs`` and
    ``ks``, in chunks of rows, by autograd through ``scores``. There is no GPU kernel: torch runs there too.

    Args:
        q, k: see `gate_kl`.
        qs: ``[T, I, E']``, the scorer's queries.
        ks: ``[sum M_i, J, E]``, the scorer's keys; segment i of length ``L_i`` has ``M_i = ceil(L_i / entry_tokens)``.
        cu_seqlens, block_size: see `gate_kl`.
        scores: computes block scores from queries of some rows and keys of consecutive blocks of a segment.
        entry_tokens: tokens per key; divides ``block_size``.
        target: ``"max"`` or ``"sum"``.
        row_start, sm_scale, reduction, sink_blocks, row_stride, row_shift, sinks, softcap, lse: see `gate_kl`.
        recall_budgets: see `gate_kl`; recall is a share of the target.

    Returns:
        As `gate_kl`, which also lists the errors.
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
    options = _checked(options, ("block_size", block_size), lse, q)
    check_one_of("target", target, TARGETS)
    return run(
        "scorer_kl", q.device, pack=pack, qs=qs, ks=ks, block_size=block_size, options=options, lse=lse,
        scores=scores, entry_tokens=entry_tokens, target=target,
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
    """KL divergence from the highest attention probability that a token gets from later tokens to the token's score.

    With ``p_h(t, s)`` the teacher's probability, causal over the row's segment, a token's target for a KV head is
    ``y(s) = max over heads h of the group, max over rows t of p_h(t, s)``. The maximum is over rows of the segment
    with an index of at least ``int(length * row_start)`` that come at least ``distance`` tokens after ``s``. The last
    ``distance`` tokens of a segment do not count. The loss of a token is ``KL(Bernoulli(y) || Bernoulli(score))``: the
    cross-entropy of Fast KVzip (arXiv 2601.17668) minus the entropy of ``y``. No gradient flows to ``q`` and ``k``.

    Args:
        q, k, cu_seqlens, sm_scale, sinks, softcap: as in `packed_attention`.
        scores: ``[T, Hkv]``, in [0, 1].
        distance: minimum distance, in tokens, of a row that counts for a token; at least 1.
        row_start: in [0, 1); see above.
        recall_budgets: token budgets at which to measure recall, each at least ``distance``.
        lse: ``[T, H]`` log of the softmax's denominator, from `packed_attention`; computed if ``None``.

    Returns:
        The mean over tokens and KV heads, and `GateKLStats`, whose rows are the tokens that count. Recall is the share
        of a segment's sum of targets in its best ``budget - distance`` tokens, mean over the tokens that count.
    """
    pack = check_pack(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_tensor("scores", scores, k.shape[:2], on=("q", q))
    check_count("distance", distance, 1)
    options = _checked(LossOptions(row_start, "row_mean", recall_budgets), ("distance", distance), lse, q)
    if lse is None:
        lse = packed_attention(q, k, k, cu_seqlens, sm_scale, sinks=sinks, softcap=softcap).lse
    return run(
        "retention_kl", q.device, pack=pack, scores=scores, distance=distance, row_start=row_start,
        recall_budgets=options.recall_budgets, lse=lse,
    )  # fmt: skip


def _checked(options: LossOptions, least: tuple[str, int], lse: Tensor | None, q: Tensor) -> LossOptions:
    """Check options and ``lse``; ``least`` is the argument that recall budgets must not be below, and its value."""
    row_start, reduction, recall_budgets, sink_blocks, row_stride, row_shift = options
    if lse is not None:
        check_tensor("lse", lse, q.shape[:2], on=("q", q))
    check("row_start", row_start, is_number(row_start) and 0 <= row_start < 1, "at least 0 and less than 1")
    check("reduction", reduction, reduction in REDUCTIONS, f"one of {', '.join(REDUCTIONS)}")
    check_rows(reduction, sink_blocks, row_stride)
    check_count("row_shift", row_shift)
    budgets = tuple(recall_budgets) if isinstance(recall_budgets, Sequence) else (0,)
    name, lowest = least
    if not all(is_int(budget) and budget >= lowest for budget in budgets):
        raise ValueError(
            f"recall_budgets is {recall_budgets!r}; each must be an integer of at least {name} ({lowest})"
        )
    return options._replace(recall_budgets=budgets)


def counted_rows(
    lengths: Sequence[int], block_size: int, row_start: float, sink_blocks: int, row_stride: int, row_shift: int
) -> list[range]:
    """The rows of each segment that count, see `GateKLStats`; `gate_kl` reads ``qg`` only at these."""
    least = (1 + sink_blocks) * block_size
    rows = [range(min(max(int(length * row_start), least), length), length) for length in lengths]
    return [some[row_shift % row_stride :: row_stride] for some in rows]
