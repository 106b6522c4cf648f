"""Rows that are too short for selecting to pay, beside rows that are not."""

from __future__ import annotations

import torch

from seergate.ops import Selection


def with_all_blocks(selection: Selection, ends: list[int], block_size: int, short: int) -> Selection:
    """The selection, but rows of at most ``short`` tokens read all of their blocks.

    A row's own length decides, so that it reads the same alone and beside longer rows.

    Args:
        selection: of every row.
        ends: tokens of each row, the current one included.
        block_size: tokens per block.
        short: the longest row, in tokens, that reads everything.
    """
    blocks = [-(-end // block_size) if end <= short else 0 for end in ends]
    if not any(blocks):
        return selection
    indices, counts = selection
    width = max(indices.shape[2], *blocks)
    wanted_B = torch.tensor(blocks, dtype=indices.dtype, device=indices.device)
    everything_N = torch.arange(width, dtype=indices.dtype, device=indices.device)
    everything_BN = torch.where(everything_N < wanted_B[:, None], everything_N, -1)
    wider = torch.nn.functional.pad(indices, (0, width - indices.shape[2]), value=-1)
    is_short = wanted_B > 0
    return Selection(
        torch.where(is_short[:, None, None], everything_BN[:, None], wider),
        torch.where(is_short[:, None], wanted_B[:, None].to(counts.dtype), counts),
    )
