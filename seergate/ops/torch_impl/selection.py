"""`score_blocks` and `select_blocks` in torch.

Selection gives every block a float64 key: its fp32 score, lowered by less than the distance to the next fp32 number in
proportion to its index. All keys differ, so a top-k is deterministic on every device, and ties go to the lower index.

Shape suffixes: B batch, K KV heads, I gate queries, J gate queries per KV head, E gate dimension, Q = J * E, P inputs
of a query, or pairs of row and KV head, N blocks, X blocks kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from seergate.inference_mode import without_gradients
from seergate.ops.arguments import readable
from seergate.ops.gate_math import Branch, block_scores, rms_norm, rotation, turned
from seergate.ops.rows import RowLengths
from seergate.ops.selection import BlockBudget, Selection

TIE = 2.0**-50
"""Difference between the keys of neighbouring blocks of equal scores, relative to the score: at least two steps of
float64, and for up to 2^25 blocks less than a step of fp32."""


@without_gradients
def score_blocks(q: Tensor, rows: RowLengths, compressed: Tensor, branch: Branch, block_size: int) -> Tensor:
    """The op on checked arguments: scores of all blocks, complete or not."""
    (batch, kv_heads, blocks, width), weight_IPE = compressed.shape, branch.weight.flatten(1, 2)
    q_IBP = q.to(weight_IPE.dtype).reshape(batch, *weight_IPE.shape[:2]).transpose(0, 1)
    qg_IBE = torch.bmm(q_IBP, weight_IPE)  # one product per gate query: a step reads its weight once
    if branch.norm_weight is not None:
        qg_IBE = rms_norm(qg_IBE, branch.norm_weight)
    if branch.inv_freq is not None:
        angles = partial(rotation, rows.tensor - 1, branch.inv_freq, branch.attention_scaling, qg_IBE.dtype)
        key = ("rotation", branch.attention_scaling, qg_IBE.dtype)
        qg_IBE = turned(qg_IBE, *rows.once(key, angles, branch.inv_freq))
    each = len(weight_IPE) // kv_heads
    qg_KBQ = qg_IBE if each == 1 else qg_IBE.unflatten(0, (kv_heads, each)).transpose(1, 2).flatten(2)
    if compressed.stride(1) > compressed.stride(0):  # heads first, as in vLLM: avoids a copy of the keys
        scores_PJN = block_scores(qg_KBQ.reshape(-1, each, width), compressed.transpose(0, 1).flatten(0, 1))
        return _best(scores_PJN).view(kv_heads, batch, blocks).transpose(0, 1)
    scores_PJN = block_scores(qg_KBQ.transpose(0, 1).reshape(-1, each, width), compressed.flatten(0, 1))
    return _best(scores_PJN).view(batch, kv_heads, blocks)


def _best(scores_PJN: Tensor) -> Tensor:
    """The maximum over the queries of a KV head."""
    return scores_PJN if scores_PJN.shape[1] == 1 else scores_PJN.amax(1)


class Budgeted(NamedTuple):
    """The part of a selection by budget that depends only on lengths.

    Attributes:
        ties_N: float64, minus the block indices in units of ``TIE``.
        free_B1N: whether a block is selected by its score.
        fixed_B1N: float64 keys of the other blocks: always selected ones sort first, future ones last.
        kept: the most blocks of a row.
        surplus_B1X: which of the ``kept`` best blocks a row does not read; ``None`` if every row reads all of them.
        counts_BK: blocks that each head reads.
    """

    ties_N: Tensor
    free_B1N: Tensor
    fixed_B1N: Tensor
    kept: int
    surplus_B1X: Tensor | None
    counts_BK: Tensor

    @classmethod
    def of(cls, budget: BlockBudget, rows: RowLengths, shape: torch.Size, block_size: int, sink_blocks: int) -> Self:
        """For scores of this shape ``[B, K, N]``."""
        _, kv_heads, blocks = shape
        blocks_N, current_B11, always_B1N, free_B1N = _blocks(rows.tensor, blocks, block_size, sink_blocks)
        budget_B11 = budget.read(current_B11.long() + 1)
        kept, even = budget.read(blocks), False
        if rows.host:
            budgets = [budget.read((length - 1) // block_size + 1) for length in rows.host]
            kept, even = max(budgets), min(budgets) == max(budgets)
        return cls(
            ties_N=blocks_N.double().mul(-TIE),
            free_B1N=free_B1N,
            fixed_B1N=torch.where(always_B1N, torch.inf, -torch.inf).double(),
            kept=kept,
            surplus_B1X=None if even else torch.arange(kept, device=budget_B11.device) >= budget_B11,
            counts_BK=budget_B11[..., 0].int().expand(-1, kv_heads).contiguous(),
        )


@without_gradients
def select_blocks(
    scores: Tensor,
    rows: RowLengths,
    *,
    block_size: int,
    threshold: float | None,
    top_p: float | None,
    sink_blocks: int,
    **limits: Any,
) -> Selection:
    """The op on checked arguments; ``limits`` are passed to `BlockBudget.of`."""
    lengths, blocks = rows.tensor, scores.shape[2]
    budget = BlockBudget.of(block_size, sink_blocks, **limits)
    if budget is not None:
        key = ("budgeted", budget, scores.shape, block_size, sink_blocks)
        how = rows.once(key, partial(Budgeted.of, budget, rows, scores.shape, block_size, sink_blocks))
        keys_BKN = torch.where(how.free_B1N, _keys(_finite(scores), how.ties_N), how.fixed_B1N)
        best_BKX = keys_BKN.topk(how.kept, dim=-1, sorted=how.surplus_B1X is not None).indices.int()
        if how.surplus_B1X is None:
            return Selection(best_BKX.sort(dim=-1).values, how.counts_BK)
        best_BKX = best_BKX.masked_fill_(how.surplus_B1X, blocks).sort(dim=-1).values
        return Selection(best_BKX.masked_fill_(how.surplus_B1X, -1), how.counts_BK)

    scores_BKN = _finite(scores)
    blocks_N, _, always_B1N, free_B1N = _blocks(lengths, blocks, block_size, sink_blocks)
    probs_BKN = scores_BKN.masked_fill(~free_B1N, -torch.inf).softmax(-1)
    if threshold is not None:
        picked_BKN = probs_BKN > threshold  # rows without a block to choose have NaN, which is never greater
    else:
        assert top_p is not None
        picked_BKN = _nucleus(scores_BKN, probs_BKN, free_B1N, blocks_N, top_p)
    chosen_BKN = (picked_BKN & free_B1N) | always_B1N
    counts_BK = chosen_BKN.sum(-1, dtype=torch.int32)
    beyond = torch.iinfo(torch.int32).max
    indices_BKN = torch.where(chosen_BKN, blocks_N.int(), beyond).sort(dim=-1).values
    if readable(counts_BK) and counts_BK.numel():  # else the shape must not depend on values
        indices_BKN = indices_BKN[..., : int(counts_BK.max())]
    return Selection(indices_BKN.masked_fill(indices_BKN == beyond, -1), counts_BK)


def _finite(scores: Tensor) -> Tensor:
    largest = torch.finfo(torch.float32).max
    return scores.float().nan_to_num(-largest, largest, -largest)


def _blocks(lengths: Tensor, blocks: int, block_size: int, sink_blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block indices ``[N]``, the index of each row's current block ``[B, 1, 1]``, and two masks ``[B, 1, N]``: blocks
    that are always selected, and those selected by score.
    """
    current_B11 = torch.div(lengths - 1, block_size, rounding_mode="floor")[:, None, None]
    blocks_N = torch.arange(blocks, device=lengths.device)
    past_B1N = blocks_N < current_B11
    always_B1N = (blocks_N == current_B11) | (past_B1N & (blocks_N < sink_blocks))
    return blocks_N, current_B11, always_B1N, past_B1N & ~always_B1N


def _keys(scores_BKN: Tensor, ties_N: Tensor) -> Tensor:
    """Unique float64 keys of blocks, in the order of their finite fp32 scores; ties in the order of ``ties_N``."""
    sizes_BKN = scores_BKN.abs().clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.addcmul(scores_BKN, sizes_BKN, ties_N)


def _nucleus(scores_BKN: Tensor, probs_BKN: Tensor, free_B1N: Tensor, blocks_N: Tensor, top_p: float) -> Tensor:
    """Mask of the fewest free blocks, best first, whose probabilities sum to at least ``top_p``."""
    keys_BKN = _keys(scores_BKN, blocks_N.double().mul(-TIE)).masked_fill(~free_B1N, -torch.inf)
    order_BKN = keys_BKN.argsort(dim=-1, descending=True)
    ranked = probs_BKN.gather(-1, order_BKN).double()
    before = ranked.cumsum(-1) - ranked  # total probability of all better blocks
    return torch.zeros_like(probs_BKN, dtype=torch.bool).scatter(-1, order_BKN, before < top_p)
