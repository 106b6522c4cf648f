"""`pool_keys` and `update_compressed_keys` in torch.

Shape suffixes: B batch, K KV heads, S tokens, N blocks, C tokens of a block, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.inference_mode import without_gradients
from seergate.ops.gate_math import Branch, compressed_keys, wide_dtype
from seergate.ops.rows import RowLengths


def pool_keys(k: Tensor, block_size: int, kinds: tuple[str, ...], lengths: Tensor | None) -> Tensor:
    """The op on checked arguments."""
    if lengths is not None:
        return _pool_ragged(k, block_size, kinds, lengths)
    whole = k.shape[2] // block_size * block_size
    parts = []
    if whole:
        parts.append(_pool(k[:, :, :whole].unflatten(2, (-1, block_size)), kinds))
    if whole < k.shape[2]:
        parts.append(_pool(k[:, :, None, whole:], kinds))
    if not parts:
        return k.new_zeros(*k.shape[:2], 0, len(kinds) * k.shape[3])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _pool(k_BKNCD: Tensor, kinds: tuple[str, ...]) -> Tensor:
    # Contiguous, so that the summation order of a mean depends only on the block: it is pooled to the same bits in
    # prefill, in decode and in another batch.
    k_BKNCD = k_BKNCD.contiguous()
    pools = {
        "max": lambda: k_BKNCD.amax(3),
        "min": lambda: k_BKNCD.amin(3),
        "avg": lambda: k_BKNCD.mean(3, dtype=wide_dtype(k_BKNCD.dtype)).to(k_BKNCD.dtype),
    }
    return torch.cat([pools[kind]() for kind in kinds], dim=-1)


def _pool_ragged(k: Tensor, block_size: int, kinds: tuple[str, ...], lengths: Tensor) -> Tensor:
    """Pool rows of different lengths: padding is replaced by the neutral element of each pooling."""
    padding = -k.shape[2] % block_size
    k_BKNCD = F.pad(k, (0, 0, 0, padding)).contiguous().unflatten(2, (-1, block_size))  # contiguous: see _pool
    positions = torch.arange(k.shape[2] + padding, device=k.device)
    beyond_BN = (positions >= lengths[:, None]).unflatten(1, (-1, block_size))
    beyond, real_BN = beyond_BN[:, None, :, :, None], (~beyond_BN).sum(-1)[:, None, :, None]
    pools = {
        "max": lambda: k_BKNCD.masked_fill(beyond, -torch.inf).amax(3),
        "min": lambda: k_BKNCD.masked_fill(beyond, torch.inf).amin(3),
        "avg": lambda: (
            k_BKNCD.masked_fill(beyond, 0).sum(3, dtype=wide_dtype(k.dtype)).div(real_BN.clamp(min=1)).to(k.dtype)
        ),
    }
    return torch.cat([pools[kind]() for kind in kinds], dim=-1).masked_fill(real_BN == 0, 0)


@without_gradients
def update_compressed_keys(
    k: Tensor,
    rows: RowLengths,
    recent: Tensor,
    compressed: Tensor,
    branch: Branch,
    block_size: int,
    kinds: tuple[str, ...],
    position_offset: int,
) -> None:
    """The op on checked arguments. If the host knows the lengths, only the blocks that close are computed."""
    slots, lengths, host, device = recent.shape[2], rows.tensor, rows.host, k.device
    if rows.even:
        recent[:, :, (rows.even - 1) % slots] = k
    else:
        recent[rows.each, :, rows.once(("slot", slots), lambda: (lengths - 1) % slots)] = k.to(recent.dtype)
    if host is not None:
        closing = [row for row, length in enumerate(host) if length % block_size == 0]
        if not closing:
            return
        index = torch.tensor(closing, device=device)
        block = torch.tensor([host[row] // block_size - 1 for row in closing], device=device)
    else:  # compute all rows; those without a completed block get their old entry back
        index, block = rows.each, (lengths // block_size - 1).clamp(min=0)
    start = block * block_size
    ring = (start % slots)[:, None] + torch.arange(block_size, device=device)
    keys_BKSD = recent[index].gather(2, ring[:, None, :, None].expand(-1, recent.shape[1], -1, recent.shape[3]))
    pooled = pool_keys(keys_BKSD, block_size, kinds, None)
    positions = (start + position_offset)[:, None]
    entries = compressed_keys(pooled, branch, positions)[:, :, 0]
    if host is None and compressed.shape[2]:
        entries = torch.where((lengths % block_size == 0)[:, None, None], entries, compressed[index, :, block])
    if compressed.shape[2]:
        compressed[index, :, block] = entries
