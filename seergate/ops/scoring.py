"""`score_blocks`: how well a step's query fits each block (SeerAttention-R, equations 1a and 1c)."""

from __future__ import annotations

from torch import Tensor

from seergate.ops.backend import implementation
from seergate.ops.checks import check_block_size, check_branch_end, check_lengths, check_same, check_tensor


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

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    check_tensor("weight", weight, ("Hkv", "G", "d", "E"))
    kv_heads, group, dim, width = weight.shape
    check_tensor("q", q, ("B", kv_heads * group, dim))
    check_block_size(block_size)
    check_tensor("compressed", compressed, (len(q), kv_heads, "NB", width))
    check_same("compressed", compressed, "weight", weight)
    check_same("weight", weight, "q", q, dtype=False)
    check_lengths(lengths, len(q), (compressed.shape[2] + 1) * block_size - 1, "(NB + 1) * block_size - 1")
    check_same("lengths", lengths, "q", q, dtype=False)
    check_branch_end(weight, norm_weight, inv_freq)
    return implementation("score_blocks", q.device)(
        q,
        lengths,
        compressed,
        weight,
        block_size,
        norm_weight=norm_weight,
        inv_freq=inv_freq,
        attention_scaling=float(attention_scaling),
    )
