"""The selection of the published SeerAttention-R code, for gates whose accuracy was measured with it."""

from __future__ import annotations

import torch
from torch import Tensor

from seergate.config import DecodeConfig
from seergate.ops import Selection


def published_selection(scores_BKN: Tensor, lengths: Tensor, block_size: int, rule: DecodeConfig) -> Selection:
    """Select as the published decode loop does.

    The block that the newest token belongs to takes part in softmax and top-k: with logit 0 while it is open, with its
    own score once it is complete. The last and the first block are then read on top of the budget.

    Args:
        scores_BKN: gate logits ``[B, K, N]``.
        lengths: ``[B]``, the current token included.
        block_size: tokens per block.
        rule: token budget or threshold.
    """
    used = -(-lengths // block_size)  # blocks in use, the open one included
    width = int(used.max())
    blocks = torch.arange(width, device=lengths.device)
    valid = (blocks < used[:, None])[:, None]
    last = (blocks == used[:, None] - 1)[:, None]
    is_open = last & (lengths % block_size != 0)[:, None, None]
    logits = scores_BKN[..., :width].float().masked_fill(is_open, 0.0).masked_fill(~valid, -torch.inf)
    if rule.threshold is not None:
        chosen = logits.softmax(-1) > rule.threshold
    else:
        assert rule.token_budget is not None
        # a stable sort: ties go to the lower block, whatever else is in the batch
        ranked = logits.sort(dim=-1, descending=True, stable=True).indices
        best = ranked[..., : min(width, rule.token_budget // block_size)]
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)
    chosen = (chosen | last | (blocks == 0)) & valid
    counts = chosen.sum(-1)
    indices = torch.where(chosen, blocks, width).sort(-1).values[..., : int(counts.max())]
    return Selection(indices.masked_fill(indices == width, -1).int(), counts.int())
