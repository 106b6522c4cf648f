"""`update_compressed_keys` in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seergate.ops.checks import readable
from seergate.ops.gate_math import compressed_keys
from seergate.ops.torch_impl.pooling import pool_keys


@torch.no_grad()
def update_compressed_keys(
    k: Tensor,
    lengths: Tensor,
    recent: Tensor,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    kinds: tuple[str, ...],
    *,
    norm_weight: Tensor | None,
    inv_freq: Tensor | None,
    attention_scaling: float,
    position_offset: int,
    host_lengths: Sequence[int] | None,
) -> None:
    """The public op, once its arguments are checked."""
    slots, device = recent.shape[2], k.device
    rows = torch.arange(len(k), device=device)
    recent[rows, :, (lengths - 1) % slots] = k.to(recent.dtype)
    if host_lengths is None and readable(lengths):
        host_lengths = lengths.tolist()
    if host_lengths is not None:
        closing = [row for row, length in enumerate(host_lengths) if length % block_size == 0]
        if not closing:
            return
        index = torch.tensor(closing, device=device)
        block = torch.tensor([host_lengths[row] // block_size - 1 for row in closing], device=device)
    else:  # every row, and what has not just been completed is put back
        index, block = rows, (lengths // block_size - 1).clamp(min=0)
    start = block * block_size
    ring = (start % slots)[:, None] + torch.arange(block_size, device=device)
    keys_BKSD = recent[index].gather(2, ring[:, None, :, None].expand(-1, recent.shape[1], -1, recent.shape[3]))
    pooled = pool_keys(keys_BKSD, block_size, kinds, None)
    positions = (start + position_offset)[:, None]
    entries = compressed_keys(pooled, weight, norm_weight, positions, inv_freq, attention_scaling)[:, :, 0]
    if host_lengths is None and compressed.shape[2]:
        entries = torch.where((lengths % block_size == 0)[:, None, None], entries, compressed[rows, :, block])
    if compressed.shape[2]:
        compressed[index, :, block] = entries
