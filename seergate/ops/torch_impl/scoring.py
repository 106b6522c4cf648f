"""`score_blocks` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from seergate.ops.gate_math import block_scores, branch_end, projected_queries


@torch.no_grad()
def score_blocks(
    q: Tensor,
    lengths: Tensor,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    *,
    norm_weight: Tensor | None,
    inv_freq: Tensor | None,
    attention_scaling: float,
) -> Tensor:
    """The public op, once its arguments are checked: of all blocks, complete or not."""
    qg_BK1E = projected_queries(q[:, :, None], weight)
    qg_BK1E = branch_end(qg_BK1E, norm_weight, (lengths - 1)[:, None], inv_freq, attention_scaling)
    if compressed.stride(1) > compressed.stride(0):  # heads first, as in vLLM: the product reads keys where they are
        return block_scores(qg_BK1E.transpose(0, 1), compressed.transpose(0, 1))[:, :, 0].transpose(0, 1)
    return block_scores(qg_BK1E, compressed)[:, :, 0]
