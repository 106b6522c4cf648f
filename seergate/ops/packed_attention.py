"""`packed_attention`: the teacher's own attention, and what its softmax divided by."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from seergate.ops.backend import implementation
from seergate.ops.checks import check_same, check_tensor
from seergate.ops.teacher import check_teacher


class PackedAttention(NamedTuple):
    """Result of `packed_attention`.

    Attributes:
        output: ``[T, H, dv]`` in v's dtype.
        lse: ``[T, H]``, natural log of the softmax's denominator, sink included; fp32 (float64 for float64 inputs).
    """

    output: Tensor
    lse: Tensor


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sm_scale: float | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> PackedAttention:
    """Causal attention of packed segments in memory linear in their length. No gradient flows to any input.

    Given its ``lse``, `gate_kl` finds the targets without an exponential.

    Args:
        q: ``[T, H, d]`` packed queries after RoPE.
        k: ``[T, Hkv, d]`` packed keys, likewise.
        v: ``[T, Hkv, dv]`` packed values.
        cu_seqlens: int32 ``[n + 1]``, segment borders. In host memory it costs no device synchronisation.
        sm_scale: factor on ``q . k``; ``1 / sqrt(d)`` if ``None``.
        window: a row sees this many tokens at most, its own included; ``None`` for its whole segment.
        sinks: ``[H]`` attention-sink logits (GPT-OSS), which enter the softmax's denominator.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    check_teacher(q, k, cu_seqlens, sm_scale, sinks, softcap)
    check_tensor("v", v, (*k.shape[:2], "dv"))
    check_same("v", v, "q", q)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"window is {window!r}; it must be an integer of at least 1, or None")
    run = implementation("packed_attention", q.device)
    scale = 1.0 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
    return run(q, k, v, cu_seqlens, scale, window=window, sinks=sinks, softcap=softcap)
