"""`retained_attention`: attention to tokens that fade, with gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from seergate.ops.backend import implementation
from seergate.ops.checks import check_same, check_tensor
from seergate.ops.teacher import check_teacher


class RetainedAttention(NamedTuple):
    """Result of `retained_attention`.

    Attributes:
        output: ``[T, H, dv]`` in v's dtype.
        held: ``[T, Hkv]``, how many tokens each row's are worth together, ``sum over s of beta(s) ** (t - s)``; fp32
            (float64 for float64 inputs).
    """

    output: Tensor
    held: Tensor


def retained_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    cu_seqlens: Tensor,
    sm_scale: float | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> RetainedAttention:
    """Causal attention of packed segments whose scores fade with the age of a token (TRIM-KV, arXiv 2512.03324).

    The score of row t for token s is ``beta(s) ** (t - s) * sm_scale * q(t) . k(s)``: it is the logit that is
    multiplied, so that a forgotten token has logit 0 and not none. Not said by the paper: a cap is applied before,
    sinks do not fade. Gradients flow to ``q``, ``k``, ``v`` and ``log_beta``; chunks of rows are computed again for
    them. There is no fused kernel.

    Args:
        q, k, v, cu_seqlens, sm_scale, window, sinks, softcap: see `packed_attention`.
        log_beta: ``[T, Hkv]``, at most 0; of zeros it is ordinary attention.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    check_teacher(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_tensor("v", v, (*k.shape[:2], "dv"))
    check_same("v", v, "q", q)
    check_tensor("log_beta", log_beta, k.shape[:2])
    check_same("log_beta", log_beta, "q", q, dtype=False)
    run = implementation("retained_attention", q.device)
    scale = 1.0 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
    return run(q, k, v, log_beta, cu_seqlens, scale, window=window, sinks=sinks, softcap=softcap)
