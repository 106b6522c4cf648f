"""Scores of blocks for a step's query, and the choice of blocks that each KV head reads (SeerAttention-R, 3.1)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from seergate.checks import check, is_int
from seergate.ops.backend import implementation
from seergate.ops.checks import check_block_size, check_fraction, check_lengths, check_same, check_tensor
from seergate.ops.compression import check_branch


def score_blocks(
    q: Tensor,
    lengths: Tensor,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    *,
    norm_weight: Tensor | None = None,
    inv_freq: Tensor | None = None,
    attention_scaling: float = 1.0,
) -> Tensor:
    """Project each row's newest query, norm and rotate it, and multiply it with the compressed keys.

    Args:
        q: ``[B, H, d]``, the newest query of each row before RoPE.
        lengths: int ``[B]``, tokens of each row, this one included; the query's position is the last one.
        compressed: ``[B, Hkv, NB, E]``, the K-compression cache. ``NB`` may be a capacity: what lies behind a row's
            complete blocks is not read on a GPU.
        weight: ``[Hkv, G, d, E]``, the query branch's linear map.
        block_size: tokens per block.
        norm_weight: ``[E]``, of the RMSNorm that follows; ``None`` for none.
        inv_freq: ``[E / 2]`` radians per position; ``None`` without RoPE.
        attention_scaling: factor on RoPE's cosine and sine.

    Returns:
        ``[B, Hkv, NB]`` logits, scaled by ``1 / sqrt(E)``, in fp32 (or wider). Those of blocks that are not complete
        mean nothing.
    """
    check_tensor("weight", weight, ("Hkv", "G", "d", "E"))
    kv_heads, group, dim, width = weight.shape
    check_tensor("q", q, ("B", kv_heads * group, dim), on=("weight", weight))
    check_block_size(block_size)
    check_tensor("compressed", compressed, (len(q), kv_heads, "NB", width))
    check_same("compressed", compressed, "weight", weight)
    most = (compressed.shape[2] + 1) * block_size - 1
    check_lengths(lengths, len(q), most, "(NB + 1) * block_size - 1", on=("q", q))
    branch = check_branch(weight, norm_weight, inv_freq, attention_scaling)
    return implementation("score_blocks", q.device)(
        q=q, lengths=lengths, compressed=compressed, branch=branch, block_size=block_size
    )


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
    """
    check_tensor("scores", scores, ("B", "Hkv", "NB"))
    check_block_size(block_size)
    check_lengths(lengths, scores.shape[0], scores.shape[2] * block_size, "NB * block_size", on=("scores", scores))
    rules = {"token_budget": token_budget, "threshold": threshold, "top_p": top_p}
    given = [name for name, value in rules.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise ValueError(f"the rules given are {found}; exactly one of {', '.join(rules)} must be")
    check("sink_blocks", sink_blocks, is_int(sink_blocks) and sink_blocks >= 0, "0 or a positive integer")
    if token_budget is not None:
        needed = (1 + sink_blocks) * block_size
        if not is_int(token_budget) or token_budget < needed:
            raise ValueError(
                f"token_budget is {token_budget!r}; with block_size {block_size} and {sink_blocks} sink blocks it "
                f"must be an integer of at least {needed}"
            )
    else:
        check_fraction(given[0], rules[given[0]])
    return implementation("select_blocks", scores.device)(
        scores=scores, lengths=lengths, block_size=block_size, sink_blocks=sink_blocks, **rules
    )
