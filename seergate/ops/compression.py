"""`update_compressed_keys`: one decode step of the K-compression cache (SeerAttention-R, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from seergate.config import POOLINGS, check_poolings
from seergate.ops.backend import implementation
from seergate.ops.checks import (
    brief,
    check_block_size,
    check_branch_end,
    check_lengths,
    check_same,
    check_tensor,
    readable,
)


def update_compressed_keys(
    k: Tensor,
    lengths: Tensor,
    recent: Tensor,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    kinds: Sequence[str] = POOLINGS,
    *,
    norm_weight: Tensor | None = None,
    inv_freq: Tensor | None = None,
    attention_scaling: float = 1.0,
    position_offset: int = 0,
    host_lengths: Sequence[int] | None = None,
) -> None:
    """Remember each row's newest key; where it completes a block, write the block's compressed key (equation 1b).

    Changes ``recent`` and ``compressed`` in place. Whether a block is complete is decided on the device, so the same
    launches serve every step, and no host waits: fit for a CUDA graph. The raw keys of the open block are kept rather
    than their running maximum, minimum and sum: one is written per step and a whole block read back once per block,
    which moves fewer bytes than three fp32 vectors read and written at each step, and a rejected draft can be taken
    back.

    Args:
        k: ``[B, Hkv, d]``, the newest key of each row before RoPE.
        lengths: int ``[B]``, tokens of each row, this one included; blocks up to ``NB - 1`` can be completed.
        recent: ``[B, Hkv, R, d]``, raw keys: position ``p`` lies at slot ``p % R``; ``R`` is a multiple of
            ``block_size``. Changed in place.
        compressed: ``[B, Hkv, NB, E]``, changed in place.
        weight: ``[Hkv, len(kinds) * d, E]``, the key branch's linear map.
        block_size: tokens per block.
        kinds: see `pool_keys`.
        norm_weight: ``[E]``, of the RMSNorm that follows; ``None`` for none.
        inv_freq: ``[E / 2]`` radians per position; ``None`` without RoPE.
        attention_scaling: factor on RoPE's cosine and sine.
        position_offset: a block's position minus that of its first token.
        host_lengths: the same numbers as ``lengths``, where the host has them. The torch backend then computes only
            what is needed, on every device.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    check_tensor("k", k, ("B", "Hkv", "d"))
    batch, kv_heads, dim = k.shape
    check_block_size(block_size)
    kinds = check_poolings("kinds", kinds)
    check_tensor("recent", recent, (batch, kv_heads, "R", dim))
    if recent.shape[2] < 1 or recent.shape[2] % block_size:
        raise ValueError(f"recent has {recent.shape[2]} slots; it must have a multiple of block_size, {block_size}")
    check_tensor("weight", weight, (kv_heads, len(kinds) * dim, "E"))
    width = weight.shape[2]
    check_tensor("compressed", compressed, (batch, kv_heads, "NB", width))
    check_same("compressed", compressed, "weight", weight)
    check_same("recent", recent, "k", k, dtype=False)
    check_same("weight", weight, "k", k, dtype=False)
    check_lengths(lengths, batch, (compressed.shape[2] + 1) * block_size - 1, "(NB + 1) * block_size - 1")
    check_same("lengths", lengths, "k", k, dtype=False)
    check_branch_end(weight, norm_weight, inv_freq)
    if host_lengths is not None and len(host_lengths) != batch:
        raise ValueError(f"host_lengths has {len(host_lengths)} numbers; it must have {batch}, those of lengths")
    if host_lengths is not None and readable(lengths) and list(host_lengths) != lengths.tolist():
        raise ValueError(f"host_lengths is {brief(list(host_lengths))}; it must be lengths, {brief(lengths.tolist())}")
    implementation("update_compressed_keys", k.device)(
        k,
        lengths,
        recent,
        compressed,
        weight,
        block_size,
        kinds,
        norm_weight=norm_weight,
        inv_freq=inv_freq,
        attention_scaling=float(attention_scaling),
        position_offset=position_offset,
        host_lengths=host_lengths,
    )
