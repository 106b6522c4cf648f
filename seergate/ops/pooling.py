"""`pool_keys`: one vector per block of keys, the input of the gate's key branch (SeerAttention-R, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from seergate.config import POOLINGS, check_poolings
from seergate.ops.backend import implementation
from seergate.ops.checks import check_block_size, check_lengths, check_same, check_tensor


def pool_keys(k: Tensor, block_size: int, kinds: Sequence[str] = POOLINGS, lengths: Tensor | None = None) -> Tensor:
    """Pool non-overlapping blocks of keys.

    Args:
        k: ``[B, Hkv, S, d]``, before RoPE.
        block_size: tokens per block.
        kinds: poolings out of ``"max", "min", "avg"``, each at most once; their results are concatenated in this
            order.
        lengths: int ``[B]``, 0..S: how many tokens of each row are real; all of them if ``None``. Whatever lies beyond
            (NaN included) has no influence.

    Returns:
        ``[B, Hkv, ceil(S / block_size), len(kinds) * d]`` in the dtype of ``k``; means are accumulated in fp32. A
        partial block is pooled over its real tokens; a block without any is 0.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    check_tensor("k", k, ("B", "Hkv", "S", "d"))
    check_block_size(block_size)
    kinds = check_poolings("kinds", kinds)
    if lengths is not None:
        check_lengths(lengths, k.shape[0], k.shape[2], "S", least=0)
        check_same("lengths", lengths, "k", k, dtype=False)
    return implementation("pool_keys", k.device)(k, block_size, kinds, lengths)
