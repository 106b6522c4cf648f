"""Attention probabilities and pooling, with which evicting methods score residents. All in float32 or wider.

Shape suffixes: B batch, R chosen rows, W window queries, T residents, H query heads, K KV heads, G = H / K, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.methods.base import LayerSpec, Step
from seergate.methods.evicting import EvictingState
from seergate.ops.gate_math import wide_dtype

TILE = 128
"""Number of queries of a prompt, or of keys, that are compared with all keys at a time."""


def reduced(x: Tensor, group_reduction: str, dim: int) -> Tensor:
    """Reduce axis ``dim``, the query heads of a group, by ``"max"`` or ``"mean"`` to one value per KV head."""
    return x.amax(dim) if group_reduction == "max" else x.mean(dim)


def log_probabilities(step: Step) -> Tensor:
    """Log of dense attention's probabilities at a decode step, ``[B, K, G, T]``, T the longest row's length; minus
    infinity beyond a row's length. Attention sinks take their share of the probability.
    """
    log_probs_PGT = _log_probabilities(step)
    return log_probs_PGT.view(len(step.lengths), -1, *log_probs_PGT.shape[1:])


def _log_probabilities(step: Step) -> Tensor:
    """`log_probabilities`, ``[P, G, T]`` for P = B * K pairs of row and KV head."""
    keys, tokens = step.keys_BKCD, step.max_length
    batch, kv_heads, _, dim = keys.shape
    q_PGD = step.q_BHSD.to(keys.device).reshape(batch * kv_heads, -1, dim)  # keys may be offloaded
    wide = wide_dtype(keys.dtype)
    logits = torch.bmm(q_PGD.to(wide) * step.sm_scale, pairs_of(keys, tokens).to(wide).transpose(1, 2))
    if step.softcap is not None:
        logits = step.softcap * torch.tanh(logits / step.softcap)
    if len(set(step.ends)) > 1:

        def beyond() -> Tensor:
            ends_P11 = step.lengths.repeat_interleave(kv_heads)[:, None, None]
            return torch.arange(tokens, device=ends_P11.device) >= ends_P11

        hidden = step.rows.once(("beyond", tokens, kv_heads), beyond)
        logits = logits.masked_fill(hidden.to(keys.device), -torch.inf)
    normaliser = logits.logsumexp(-1, keepdim=True)
    if step.sinks is not None:
        sinks = step.sinks.to(keys.device, wide).view(kv_heads, -1, 1).repeat(batch, 1, 1)
        normaliser = torch.logaddexp(normaliser, sinks)
    return (logits - normaliser).to(step.lengths.device)


def pairs_of(cache_BKCD: Tensor, tokens: int) -> Tensor:
    """The first T = ``tokens`` tokens of a cache, one matrix ``[B * K, T, D]`` per row and KV head; a view unless the
    strides of rows and heads differ.
    """
    (batch, kv_heads, _, dim), (row, head, *within) = cache_BKCD.shape, cache_BKCD.stride()
    if batch > 1 and row != kv_heads * head:
        return cache_BKCD[:, :, :tokens].flatten(0, 1)
    return cache_BKCD.as_strided((batch * kv_heads, tokens, dim), (head, *within))


def log_block_maxima(step: Step, block_size: int) -> Tensor:
    """Log of the largest probability that any query head of a group gives to any key of each block ``[B, K, N]``; its
    softmax over a row's past blocks is the gate's training target (`ops.block_targets`).
    """
    logp_BKGT = log_probabilities(step)
    missing = -logp_BKGT.shape[-1] % block_size
    return F.pad(logp_BKGT, (0, missing), value=-torch.inf).unflatten(-1, (-1, block_size)).amax(-1).amax(2)


def attend_and_weigh(step: Step) -> tuple[Tensor, Tensor]:
    """Ordinary attention of a decode step, with its probabilities, which a fused kernel does not return.

    Returns:
        Output ``[B, H, D]`` and probabilities ``[B, K, G, T]``, 0 beyond a row's length.
    """
    p_PGT = _log_probabilities(step).exp()
    values = step.values_BKCD  # the cache's buffers are finite beyond a row's length
    output_PGD = torch.bmm(p_PGT.to(values.dtype), pairs_of(values, step.max_length))
    return output_PGD.view(len(values), -1, values.shape[3]), p_PGT.view(*values.shape[:2], *p_PGT.shape[1:])


def logits(q_RHWD: Tensor, keys_RKTD: Tensor, step: Step) -> Tensor:
    """Scaled query-key products ``[R, K, G, W, T]``, capped if the model caps them."""
    wide = wide_dtype(keys_RKTD.dtype)
    q_RKGWD = q_RHWD.to(wide).unflatten(1, (keys_RKTD.shape[1], -1)) * step.sm_scale
    scores = q_RKGWD @ keys_RKTD.to(wide)[:, :, None].transpose(-1, -2)
    return scores if step.softcap is None else step.softcap * torch.tanh(scores / step.softcap)


def causal_softmax(q_RHWD: Tensor, keys_RKTD: Tensor, first: int, step: Step) -> Tensor:
    """Probabilities ``[R, K, G, W, T]`` of consecutive queries, the first at index ``first`` of the keys. Attention
    sinks of the model take their share.
    """
    scores = logits(q_RHWD, keys_RKTD, step)
    own = first + torch.arange(scores.shape[-2], device=scores.device)
    later = torch.arange(scores.shape[-1], device=scores.device) > own[:, None]
    scores = scores.masked_fill(later, -torch.inf)
    if step.sinks is None:
        return scores.softmax(-1)
    sinks = step.sinks.to(scores).view(1, scores.shape[1], -1, 1, 1)
    return (scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks)).exp()


def prompt_probabilities(step: Step, row: int) -> Iterator[Tensor]:
    """Yield the causal attention of a row's new prompt tokens, a tile of queries at a time: ``[K, G, tile, T]``."""
    start, count = step.starts[row], step.counts[row]
    keys = step.keys_BKCD[row : row + 1, :, : start + count]
    for first in range(0, count, TILE):
        queries = step.q_BHSD[row : row + 1, :, first : min(count, first + TILE)]
        yield causal_softmax(queries, keys, start + first, step)[0]


def pooled(scores_RKT: Tensor, kernel: int, kind: str) -> Tensor:
    """Pool over ``kernel`` neighbours without changing the length. ``"avg"`` divides by ``kernel`` at the ends too;
    ``"max"`` ignores the padding.
    """
    pool = F.avg_pool1d if kind == "avg" else F.max_pool1d
    return pool(scores_RKT, kernel, stride=1, padding=kernel // 2)


class WindowState(EvictingState):
    """Ring buffer of the queries after RoPE of each row's last ``method.window`` tokens: ``queries [B, H, W, D]``.

    The query of the token with index i in its row is in slot ``i % W``.
    """

    method: Any

    def __init__(self, spec: LayerSpec, method: Any) -> None:
        super().__init__(spec, method)
        shape = (spec.batch, spec.num_heads, method.window, spec.head_dim)
        self.rows["queries"] = torch.zeros(shape, dtype=spec.dtype, device=spec.device)

    def append(self, step: Step) -> None:
        super().append(step)
        queries, size = self.rows["queries"], self.method.window
        if step.q_BHSD.shape[2] == 1:
            slots = torch.tensor([(self.total_tokens(row) - 1) % size for row in range(len(step.counts))])
            queries[step.rows.each, :, slots.to(queries.device)] = step.q_BHSD[:, :, 0]
            return
        for row, count in enumerate(step.counts):
            newest, seen = min(count, size), self.total_tokens(row)
            slots = torch.arange(seen - newest, seen, device=queries.device) % size
            queries[row][:, slots] = step.q_BHSD[row, :, count - newest : count]

    def window(self, row: int) -> Tensor:
        """The window's queries of one row, oldest first, ``[1, H, W, D]``; the row must have seen W tokens."""
        seen, size = self.total_tokens(row), self.method.window
        slots = torch.arange(seen - size, seen) % size
        return self.rows["queries"][row : row + 1, :, slots.to(self.spec.device)]
