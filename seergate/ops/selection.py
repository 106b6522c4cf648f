"""`select_blocks`: from scores to the blocks that each KV head reads (SeerAttention-R, section 3.1)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from seergate.ops.backend import implementation
from seergate.ops.checks import check_block_size, check_fraction, check_lengths, check_same, check_tensor


class Selection(NamedTuple):
    """The blocks to read.

    Attributes:
        indices: int32 ``[B, Hkv, K]``, ascending, padded with -1 on the right.
        counts: int32 ``[B, Hkv]``, how many of them are blocks.
    """

    indices: Tensor
    counts: Tensor


def select_blocks(
    scores: Tensor,
    lengths: Tensor,
    *,
    block_size: int,
    token_budget: int | None = None,
    threshold: float | None = None,
    top_p: float | None = None,
    sink_blocks: int = 0,
) -> Selection:
    """Choose blocks for one decode step, by exactly one of three rules.

    The current block, ``(length - 1) // block_size``, is always in; it is never scored. So are the first
    ``sink_blocks``. Scores of the sinks, of the current block and of later ones are ignored, whatever they are. Scores
    are compared in fp32; NaN counts as the lowest, infinities as the extremes of fp32; ties go to the lower index.

    Args:
        scores: ``[B, Hkv, NB]``, higher is better. ``NB`` may be a capacity, larger than the blocks in use.
        lengths: int ``[B]``, 1..NB * block_size: tokens of each row, the current one included.
        block_size: tokens per block.
        token_budget: read ``token_budget // block_size`` blocks, the current one and the sinks included.
        threshold: read the past blocks whose softmax probability (over past blocks but the sinks) is greater than
            this.
        top_p: read the fewest past blocks whose probabilities sum to at least this.
        sink_blocks: how many first blocks are always read. Within a token budget they use it up; the other two rules
            choose among the rest.

    Returns:
        `Selection`. ``K`` is at most NB, and at most ``token_budget // block_size``; it is static on accelerators,
        where nothing waits for the result.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    check_tensor("scores", scores, ("B", "Hkv", "NB"))
    check_block_size(block_size)
    check_lengths(lengths, scores.shape[0], scores.shape[2] * block_size, "NB * block_size")
    check_same("lengths", lengths, "scores", scores, dtype=False)
    rules = {"token_budget": token_budget, "threshold": threshold, "top_p": top_p}
    given = [name for name, value in rules.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise ValueError(f"the rules given are {found}; exactly one of {', '.join(rules)} must be")
    if not isinstance(sink_blocks, int) or isinstance(sink_blocks, bool) or sink_blocks < 0:
        raise ValueError(f"sink_blocks is {sink_blocks!r}; it must be 0 or a positive integer")
    if token_budget is not None:
        needed = (1 + sink_blocks) * block_size
        if not isinstance(token_budget, int) or isinstance(token_budget, bool) or token_budget < needed:
            raise ValueError(
                f"token_budget is {token_budget!r}; with block_size {block_size} and {sink_blocks} sink blocks it "
                f"must be an integer of at least {needed}"
            )
    else:
        check_fraction(given[0], rules[given[0]])
    return implementation("select_blocks", scores.device)(
        scores,
        lengths,
        block_size=block_size,
        token_budget=token_budget,
        threshold=threshold,
        top_p=top_p,
        sink_blocks=sink_blocks,
    )
