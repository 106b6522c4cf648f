"""Block scores of a decode step, and selection of the blocks that each KV head reads (SeerAttention-R, 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from seergate.checks import check, check_count, is_int, is_number
from seergate.ops.arguments import check_lengths, check_tensor
from seergate.ops.backend import run
from seergate.ops.compression import check_branch
from seergate.ops.gate_math import Branch
from seergate.ops.rows import RowLengths


def score_blocks(
    q: Tensor,
    lengths: Tensor | RowLengths,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    *,
    norm_weight: Tensor | None = None,
    inv_freq: Tensor | None = None,
    attention_scaling: float = 1.0,
) -> Tensor:
    """Score blocks: project each row's newest query, apply norm and RoPE, and multiply it with the compressed keys.

    With several gate queries per KV head, a block's score is the maximum over them.

    Args:
        q: ``[B, H, d]``, the newest query of each row before RoPE.
        lengths: int ``[B]``, tokens of each row, including this one; the query's position is ``length - 1``; or
            `RowLengths`, with arguments that need no checks.
        compressed: ``[B, Hkv, NB, E]``, the compressed keys. ``NB`` may be a capacity: on a GPU, only a row's complete
            blocks are read.
        weight: ``[I, H / I, d, E]``, the query branch's linear map. Gate query i is a projection of ``H / I``
            consecutive query heads; ``I`` is a multiple of Hkv.
        block_size: tokens per block.
        norm_weight, inv_freq, attention_scaling: as in `update_compressed_keys`.

    Returns:
        ``[B, Hkv, NB]`` logits, scaled by ``1 / sqrt(E)``, in fp32 or wider; undefined for incomplete blocks.
    """
    if isinstance(lengths, RowLengths):
        branch = Branch(weight, norm_weight, inv_freq, attention_scaling)
    else:
        check_tensor("weight", weight, ("I", "H / I", "d", "E"))
        queries, heads, dim, width = weight.shape
        check_tensor("q", q, ("B", queries * heads, dim), on=("weight", weight))
        check_count("block_size", block_size, 1)
        check_tensor("compressed", compressed, (len(q), "Hkv", "NB", width), like=("weight", weight))
        kv_heads = compressed.shape[1]
        if not kv_heads or queries % kv_heads:
            raise ValueError(f"weight has {queries} queries; it must have a multiple of compressed's {kv_heads}")
        most = (compressed.shape[2] + 1) * block_size - 1
        check_lengths(lengths, len(q), most, "(NB + 1) * block_size - 1", on=("q", q))
        branch = check_branch(weight, norm_weight, inv_freq, attention_scaling)
    rows = RowLengths.of(lengths)
    return run("score_blocks", q.device, q=q, rows=rows, compressed=compressed, branch=branch, block_size=block_size)


UNBOUNDED = 2**31 - 1
"""Number of blocks that stands for no limit."""


class Selection(NamedTuple):
    """The blocks to read.

    Attributes:
        indices: int32 ``[B, Hkv, K]``, ascending, padded with -1 on the right.
        counts: int32 ``[B, Hkv]``, number of blocks in ``indices``.
    """

    indices: Tensor
    counts: Tensor


Blocks = TypeVar("Blocks", int, Tensor)


@dataclass(frozen=True)
class BlockBudget:
    """Number of blocks that each KV head of a row reads: a share of its blocks, rounded up, within ``least..most``.

    Attributes:
        least, most: bounds in blocks; equal for a token budget.
        numerator, denominator: the share as a fraction of integers, so that host and device round alike.
    """

    least: int
    most: int
    numerator: int = 0
    denominator: int = 1

    @classmethod
    def of(
        cls,
        block_size: int,
        sink_blocks: int = 0,
        *,
        token_budget: int | None = None,
        budget_share: float | None = None,
        budget_min: int | None = None,
        budget_max: int | None = None,
    ) -> BlockBudget | None:
        """The budget of these arguments of `select_blocks`; ``None`` without ``token_budget`` and ``budget_share``."""
        if token_budget is not None:
            return cls(token_budget // block_size, token_budget // block_size)
        if budget_share is None:
            return None
        least = max(1 + sink_blocks, (budget_min or 0) // block_size)
        most = UNBOUNDED if budget_max is None else budget_max // block_size
        return cls(least, most, *_as_written(budget_share))

    def read(self, blocks: Blocks) -> Blocks:
        """Number of blocks read, including the current one, of a row with ``blocks`` blocks; int or int64 tensor."""
        share = -(-blocks * self.numerator // self.denominator)
        if isinstance(blocks, Tensor):
            return share.clamp(self.least, self.most).minimum(blocks)
        return min(blocks, self.most, max(self.least, share))

    @property
    def covered(self) -> int:
        """Largest number of blocks with which a row still reads all of its blocks."""
        unread = self.denominator - self.numerator  # a row of n blocks reads all if n * unread < denominator
        all_of = (self.denominator - 1) // unread if unread else UNBOUNDED
        return min(self.most, max(self.least, all_of))


def _as_written(share: float) -> tuple[int, int]:
    """Numerator and denominator (up to 10^6, so that products fit int64) of ``share`` as written in decimals."""
    fraction = Fraction(str(share)).limit_denominator(10**6)
    return fraction.numerator, fraction.denominator


_as_written._dynamo_marked_constant = True  # type: ignore[attr-defined]  # constant in a graph


def select_blocks(
    scores: Tensor,
    lengths: Tensor | RowLengths,
    *,
    block_size: int,
    token_budget: int | None = None,
    budget_share: float | None = None,
    budget_min: int | None = None,
    budget_max: int | None = None,
    threshold: float | None = None,
    top_p: float | None = None,
    sink_blocks: int = 0,
) -> Selection:
    """Select blocks for one decode step, by exactly one of four rules.

    The current block, ``(length - 1) // block_size``, and the first ``sink_blocks`` are always selected. Their scores
    and those of later blocks are ignored, whatever they hold. Scores are compared in fp32; NaN counts as the lowest,
    infinities as the extremes of fp32; ties go to the lower index.

    Args:
        scores: ``[B, Hkv, NB]``, higher is better. ``NB`` may be a capacity, larger than the blocks in use.
        lengths: int ``[B]``, 1..NB * block_size: tokens of each row, including the current one; or `RowLengths`, with
            arguments that need no checks.
        block_size: tokens per block.
        token_budget: select ``token_budget // block_size`` blocks, including the current block and the sink blocks.
        budget_share: select this share of the row's blocks, in [0, 1], rounded up, including the current block and the
            sink blocks. Read as the decimal fraction as written, or the nearest one with a denominator up to 10^6.
        budget_min, budget_max: minimum and maximum tokens for ``budget_share``; each is rounded down to blocks.
        threshold: select the past blocks with a softmax probability (over past blocks except sinks) above this.
        top_p: select the fewest past blocks (except sinks) whose probabilities sum to at least this.
        sink_blocks: number of first blocks that are always selected. They count towards a budget; ``threshold`` and
            ``top_p`` select in addition to them.

    Returns:
        `Selection`. ``K`` is at most NB, and with a budget at most the budget of a row with NB blocks. On accelerators
        ``K`` is static and nothing waits for the device.
    """
    rules = {"token_budget": token_budget, "budget_share": budget_share, "threshold": threshold, "top_p": top_p}
    bounds = {"budget_min": budget_min, "budget_max": budget_max}
    if not isinstance(lengths, RowLengths):
        _check_selection(scores, lengths, block_size, sink_blocks, rules, bounds)
        lengths = RowLengths(lengths)  # the width of the result does not depend on their values
    return run(
        "select_blocks", scores.device, scores=scores, rows=lengths, block_size=block_size,
        sink_blocks=sink_blocks, **rules, **bounds,
    )  # fmt: skip


def _check_selection(
    scores: Tensor,
    lengths: Tensor,
    block_size: int,
    sink_blocks: int,
    rules: dict[str, Any],
    bounds: dict[str, int | None],
) -> None:
    """Check the arguments of `select_blocks`."""
    check_tensor("scores", scores, ("B", "Hkv", "NB"))
    check_count("block_size", block_size, 1)
    check_lengths(lengths, scores.shape[0], scores.shape[2] * block_size, "NB * block_size", on=("scores", scores))
    given = [name for name, value in rules.items() if value is not None]
    if len(given) != 1:
        names = " and ".join(given) if given else "none"
        raise ValueError(f"the rules given are {names}; exactly one of {', '.join(rules)} must be")
    check_count("sink_blocks", sink_blocks)
    needed = (1 + sink_blocks) * block_size
    for name, value in ({"token_budget": rules["token_budget"]} | bounds).items():
        if value is not None and (not is_int(value) or value < needed):
            raise ValueError(
                f"{name} is {value!r}; with block_size {block_size} and {sink_blocks} sink blocks it "
                f"must be an integer of at least {needed}"
            )
    budget_share, (budget_min, budget_max) = rules["budget_share"], bounds.values()
    if budget_share is None and any(value is not None for value in bounds.values()):
        raise ValueError(f"budget_min is {budget_min!r} and budget_max {budget_max!r} without a budget_share")
    if budget_share is not None:
        check("budget_share", budget_share, is_number(budget_share) and 0 <= budget_share <= 1, "a number in 0..1")
        if None not in bounds.values() and budget_max < budget_min:  # type: ignore[operator]
            raise ValueError(f"budget_max is {budget_max}; it must be at least budget_min ({budget_min})")
    elif rules["token_budget"] is None:
        share = rules[given[0]]
        check(given[0], share, is_number(share) and 0 < share < 1, "strictly between 0 and 1")
