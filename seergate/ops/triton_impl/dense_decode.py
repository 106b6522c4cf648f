"""`dense_decode` in Triton: the kernels of `sparse_decode` without a selection."""

from __future__ import annotations

import torch
from torch import Tensor

from seergate.ops.torch_impl.dense_decode import dense_decode as in_torch
from seergate.ops.triton_impl.sparse_decode import attend, supports


@torch.no_grad()
def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    sm_scale: float,
    *,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
) -> Tensor:
    """The public op, once its arguments are checked; wide or float64 heads are left to the torch backend."""
    if not supports(q, v):
        return in_torch(q, k, v, lengths, sm_scale, sinks=sinks, softcap=softcap, page_table=page_table)
    return attend(q, k, v, None, None, lengths, 1, sm_scale, sinks, softcap, page_table)
