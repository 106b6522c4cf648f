"""Pooling of keys, and the update of compressed keys in a decode step (SeerAttention-R, sections 2.2 and 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from seergate.checks import check_count
from seergate.config import POOLINGS, check_poolings
from seergate.ops.arguments import check_lengths, check_tensor
from seergate.ops.backend import run
from seergate.ops.gate_math import Branch
from seergate.ops.rows import RowLengths


def check_branch(
    weight: Tensor, norm_weight: Tensor | None, inv_freq: Tensor | None, attention_scaling: float
) -> Branch:
    """Check the weights of norm and RoPE against the linear map; returns them as a `Branch`."""
    width = weight.shape[-1]
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (width,), like=("weight", weight))
    if inv_freq is not None:
        if width % 2:
            raise ValueError(f"weight has {width} columns; with inv_freq it must have an even number")
        check_tensor("inv_freq", inv_freq, (width // 2,), on=("weight", weight))
    return Branch(weight, norm_weight, inv_freq, float(attention_scaling))


def pool_keys(k: Tensor, block_size: int, kinds: Sequence[str] = POOLINGS, lengths: Tensor | None = None) -> Tensor:
    """Pool each block of keys to one vector, the input of the gate's key branch.

    Args:
        k: ``[B, Hkv, S, d]``, before RoPE.
        block_size: tokens per block.
        kinds: one or more of ``"max", "min", "avg"``, each at most once; their results are concatenated in this order.
        lengths: int ``[B]``, 0..S, tokens of each row; ``None`` for all S. Later tokens may hold anything, even NaN.

    Returns:
        ``[B, Hkv, ceil(S / block_size), len(kinds) * d]`` in the dtype of ``k``; means are accumulated in fp32. A
        partial block is pooled over its tokens; a block without tokens is 0.
    """
    check_tensor("k", k, ("B", "Hkv", "S", "d"))
    check_count("block_size", block_size, 1)
    kinds = check_poolings("kinds", kinds)
    if lengths is not None:
        check_lengths(lengths, k.shape[0], k.shape[2], "S", least=0, on=("k", k))
    return run("pool_keys", k.device, k=k, block_size=block_size, kinds=kinds, lengths=lengths)


def update_compressed_keys(
    k: Tensor,
    lengths: Tensor | RowLengths,
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
) -> None:
    """Store each row's newest key; if it completes a block, write the block's compressed key (equation 1b).

    Changes ``recent`` and ``compressed`` in place. The device decides whether a block is complete, so every step has
    the same launches and the host never waits, which suits CUDA graphs. The open block is stored as raw keys rather
    than as running maximum, minimum and sum: this moves fewer bytes (one key written per step, a block read once when
    it closes, instead of three fp32 vectors read and written per step), and a rejected draft can be taken back.

    Args:
        k: ``[B, Hkv, d]``, the newest key of each row before RoPE.
        lengths: int ``[B]``, tokens of each row, including the newest; 1..(NB + 1) * block_size - 1; or `RowLengths`,
            with arguments that need no checks.
        recent: ``[B, Hkv, R, d]``, raw keys: position ``p`` is at slot ``p % R``; ``R`` is a multiple of
            ``block_size``. Changed in place.
        compressed: ``[B, Hkv, NB, E]``, changed in place.
        weight: ``[Hkv, len(kinds) * d, E]``, the key branch's linear map.
        block_size: tokens per block.
        kinds: see `pool_keys`.
        norm_weight: ``[E]``, weight of the RMSNorm after the linear map; ``None`` without norm.
        inv_freq: ``[E / 2]`` radians per position; ``None`` without RoPE.
        attention_scaling: factor on RoPE's cosine and sine.
        position_offset: RoPE position of a block relative to its first token.
    """
    if isinstance(lengths, RowLengths):
        branch = Branch(weight, norm_weight, inv_freq, attention_scaling)
    else:
        check_tensor("k", k, ("B", "Hkv", "d"))
        batch, kv_heads, dim = k.shape
        check_count("block_size", block_size, 1)
        kinds = check_poolings("kinds", kinds)
        check_tensor("recent", recent, (batch, kv_heads, "R", dim), on=("k", k))
        if recent.shape[2] < 1 or recent.shape[2] % block_size:
            raise ValueError(
                f"recent has {recent.shape[2]} slots; it must have a multiple of block_size, {block_size}"
            )
        check_tensor("weight", weight, (kv_heads, len(kinds) * dim, "E"), on=("k", k))
        check_tensor("compressed", compressed, (batch, kv_heads, "NB", weight.shape[2]), like=("weight", weight))
        most = (compressed.shape[2] + 1) * block_size - 1
        check_lengths(lengths, batch, most, "(NB + 1) * block_size - 1", on=("k", k))
        branch = check_branch(weight, norm_weight, inv_freq, attention_scaling)
    run(
        "update_compressed_keys", k.device, k=k, rows=RowLengths.of(lengths), recent=recent, compressed=compressed,
        branch=branch, block_size=block_size, kinds=tuple(kinds), position_offset=position_offset,
    )  # fmt: skip
