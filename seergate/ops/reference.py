"""Reference implementation of every op: naive loops over segments, rows, heads and blocks, as in the equations.

Has the signatures of the public ops. Computes in fp32, or in float64 for float64 inputs. The tests compare every
backend with it; ``SEERGATE_BACKEND=reference`` runs it instead of them. Not meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from seergate.ops.attention import AttentionWithTargets, PackedAttention, RetainedAttention
from seergate.ops.losses import GateKLStats, Scores
from seergate.ops.paging import unpaged
from seergate.ops.selection import Selection


def _wide(*tensors: Tensor) -> torch.dtype:
    """fp32, or float64 if any tensor is."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _segments(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    return list(zip(ends[:-1], ends[1:], strict=True))


def _widest(cu_seqlens: Tensor, block_size: int) -> int:
    """Number of blocks of the longest segment."""
    return max(math.ceil((end - start) / block_size) for start, end in _segments(cu_seqlens))


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _log_probs(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    sm_scale: float | None,
    sinks: Tensor | None,
    softcap: float | None,
    window: int | None = None,
) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
    """Per segment and head: rows, head, log-softmax of the scores ``[L, L]``, log of its denominator ``[L]``."""
    dtype, heads = _wide(q, k), q.shape[1]
    scale = 1.0 / math.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    for start, end in _segments(cu_seqlens):
        rows, length = slice(start, end), end - start
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(-window)
        for h in range(heads):
            scores = _capped(q[rows, h].to(dtype) @ k[rows, h // (heads // k.shape[1])].to(dtype).T * scale, softcap)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:  # as one more column, dropped after the softmax
                scores = torch.cat((scores, sinks[h].to(dtype).expand(length, 1)), dim=1)
            yield rows, h, scores.log_softmax(dim=1)[:, :length], scores.logsumexp(dim=1)


def _past_blocks(x_LL: Tensor, block_size: int) -> Iterator[tuple[int, Tensor]]:
    """Each block ``j``, and its columns in the rows for which it is strictly past, ``[rows, block_size]``."""
    for j in range((len(x_LL) - 1) // block_size):
        yield j, x_LL[(j + 1) * block_size :, j * block_size : (j + 1) * block_size]


@torch.no_grad()
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
    """Computes whole score matrices, one segment and head at a time."""
    dtype, group = _wide(q, k), q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.zeros(q.shape[:2], dtype=dtype, device=q.device)
    for rows, h, log_probs, denominator in _log_probs(q, k, cu_seqlens, sm_scale, sinks, softcap, window):
        out[rows, h], lse[rows, h] = log_probs.exp() @ v[rows, h // group].to(dtype), denominator
    return PackedAttention(out.to(v.dtype), lse)


@torch.no_grad()
def attention_with_block_targets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> AttentionWithTargets:
    """Computes one segment, head and block at a time."""
    output, lse = packed_attention(q, k, v, cu_seqlens, sm_scale, sinks=sinks, softcap=softcap)
    group, widest = q.shape[1] // k.shape[1], _widest(cu_seqlens, block_size)
    targets = lse.new_full((len(q), k.shape[1], widest), -torch.inf)
    for rows, h, log_probs, _ in _log_probs(q, k, cu_seqlens, sm_scale, sinks, softcap):
        here = targets[rows, h // group]
        for j, block in _past_blocks(log_probs, block_size):
            here[-len(block) :, j] = torch.maximum(here[-len(block) :, j], block.amax(1))
    return AttentionWithTargets(output, lse, targets)


@torch.no_grad()
def block_targets(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Computes a softmax of log targets, so that a row whose past probabilities all underflow still has targets."""
    log_targets = attention_with_block_targets(
        q, k, k, cu_seqlens, block_size, sm_scale, sinks=sinks, softcap=softcap
    ).log_targets
    has_past = (log_targets > -torch.inf).any(-1, keepdim=True)
    return torch.where(has_past, log_targets.softmax(dim=-1), 0.0)


def gate_kl(
    q: Tensor,
    k: Tensor,
    qg: Tensor,
    kg: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    *,
    gate_scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, GateKLStats]:
    """Calls `scorer_kl` with scores ``gate_scale * query . key``; the other options are the same."""
    gate_scale = 1.0 / math.sqrt(qg.shape[-1]) if gate_scale is None else gate_scale

    def scores(queries: Tensor, keys: Tensor) -> Tensor:
        return gate_scale * queries @ keys.transpose(-1, -2)

    return scorer_kl(q, k, qg, kg, cu_seqlens, block_size, scores=scores, entry_tokens=block_size, **options)


@torch.no_grad()
def block_masses(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, block_size: int, sm_scale: float | None, **extras: Any
) -> Tensor:
    """`block_targets` with sums instead of maxima: each past block's share of the group's probability."""
    group, widest = q.shape[1] // k.shape[1], _widest(cu_seqlens, block_size)
    masses = torch.zeros(len(q), k.shape[1], widest, dtype=_wide(q, k), device=q.device)
    for rows, h, log_probs, _ in _log_probs(q, k, cu_seqlens, sm_scale, **extras):
        here = masses[rows, h // group]
        for j, block in _past_blocks(log_probs, block_size):
            here[-len(block) :, j] += block.exp().sum(1)
    total = masses.sum(-1, keepdim=True)
    return torch.where(total > 0, masses / total, 0.0)


def scorer_kl(
    q: Tensor,
    k: Tensor,
    qs: Tensor,
    ks: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    *,
    scores: Scores,
    entry_tokens: int,
    target: str = "max",
    row_start: float = 0.0,
    sm_scale: float | None = None,
    reduction: str = "row_mean",
    recall_budgets: tuple[int, ...] = (),
    sink_blocks: int = 0,
    row_stride: int = 1,
    row_shift: int = 0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, GateKLStats]:
    """Computes one row and KV head at a time from materialised targets; gradients by autograd. Ignores ``lse``."""
    dtype = _wide(q, k, qs, ks)
    kv_heads = k.shape[1]
    definition = block_targets if target == "max" else block_masses
    targets = definition(q.to(dtype), k.to(dtype), cu_seqlens, block_size, sm_scale, sinks=sinks, softcap=softcap)
    segments = _segments(cu_seqlens)
    total = (qs[:0].sum() + ks[:0].sum()).to(dtype)  # 0, with a graph even when no row counts
    kl_per_head = torch.zeros(kv_heads, dtype=dtype, device=q.device)
    recall = torch.zeros(len(recall_budgets), kv_heads, dtype=dtype, device=q.device)
    counted, filled, first_entry = 0, 0, 0
    for start, end in segments:
        length = end - start
        begin = int(length * row_start)
        filled += length > 0
        for number, row in enumerate(range(max(begin, (1 + sink_blocks) * block_size), length)):
            if (number - row_shift) % row_stride:
                continue
            past = row // block_size
            counted += 1
            queries = qs[start + row].to(dtype)[None, :, None]
            each = block_size // entry_tokens
            keys = ks[first_entry + sink_blocks * each : first_entry + past * each].to(dtype).transpose(0, 1)[None]
            block_scores = scores(queries, keys)[0, :, 0]
            for g in range(kv_heads):
                p, logits = targets[start + row, g, sink_blocks:past], block_scores[g].to(dtype)
                p = p / p.sum()
                ranked = logits.detach().sort(descending=True, stable=True).indices  # ties: lower index first
                for i, budget in enumerate(recall_budgets):
                    recall[i, g] += p[ranked[: max(0, budget // block_size - 1 - sink_blocks)]].sum()
                kl = (torch.special.xlogy(p, p) - p * logits.log_softmax(0)).sum()
                kl_per_head[g] += kl.detach()
                weight = 1.0 if reduction == "row_mean" else 1.0 / (kv_heads * (length - begin) * targets.shape[-1])
                total = total + weight * kl
        first_entry += math.ceil(length / entry_tokens)
    rows = max(counted, 1)
    loss = total / (rows * kv_heads) if reduction == "row_mean" else total / max(filled, 1)
    return loss, GateKLStats(kl_per_head / rows, torch.tensor(counted, device=q.device), recall / rows)


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
    """Computes one row and head at a time; gradients by autograd."""
    dtype, group, output, weight_sums = _wide(q, k, v, log_beta), q.shape[1] // k.shape[1], [], []
    sm_scale = 1.0 / math.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    for start, end in _segments(cu_seqlens):
        for row in range(start, end):
            seen = slice(start if window is None else max(start, row - window + 1), row + 1)
            ages = torch.arange(row - seen.start, -1, -1, device=q.device)
            worth = log_beta[seen].to(dtype).exp() ** ages[:, None]
            weight_sums.append(worth.sum(0))
            for h in range(q.shape[1]):
                scores = _capped(k[seen, h // group].to(dtype) @ q[row, h].to(dtype) * sm_scale, softcap)
                faded = scores * worth[:, h // group]
                if sinks is not None:
                    faded = torch.cat((faded, sinks[h].to(dtype)[None]))
                output.append(faded.softmax(0)[: len(ages)] @ v[seen, h // group].to(dtype))
    if not output:
        return RetainedAttention(v.new_zeros(*q.shape[:2], v.shape[2]), log_beta.to(dtype))
    outputs = torch.stack(output).view(*q.shape[:2], v.shape[2])
    return RetainedAttention(outputs.to(v.dtype), torch.stack(weight_sums))


@torch.no_grad()
def received_attention(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, distance: int, row_start: float, sm_scale: float | None, **extras: Any
) -> Tensor:
    """``[T, Hkv]``: the highest probability of a token in rows at least ``distance`` tokens later, or 0."""
    received = torch.zeros(len(q), k.shape[1], dtype=_wide(q, k), device=q.device)
    for rows, h, log_probs, _ in _log_probs(q, k, cu_seqlens, sm_scale, **extras):
        here = received[rows, h // (q.shape[1] // k.shape[1])]
        for row in range(max(int(len(log_probs) * row_start), distance), len(log_probs)):
            far = here[: row - distance + 1]
            torch.maximum(far, log_probs[row, : len(far)].exp(), out=far)
    return received


def retention_kl(
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    cu_seqlens: Tensor,
    distance: int,
    *,
    row_start: float = 0.0,
    sm_scale: float | None = None,
    recall_budgets: tuple[int, ...] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, GateKLStats]:
    """Computes one token and KV head at a time. Ignores ``lse``."""
    dtype = _wide(q, k, scores)
    targets = received_attention(
        q.to(dtype), k.to(dtype), cu_seqlens, distance, row_start, sm_scale, sinks=sinks, softcap=softcap
    )
    kv_heads = k.shape[1]
    total = scores[:0].sum().to(dtype)
    kl_per_head = torch.zeros(kv_heads, dtype=dtype, device=q.device)
    recall = torch.zeros(len(recall_budgets), kv_heads, dtype=dtype, device=q.device)
    full = [(start, end - distance) for start, end in _segments(cu_seqlens) if end - distance > start]
    counted = sum(end - start for start, end in full)
    for start, end in full:
        for token in range(start, end):
            for g in range(kv_heads):
                y, s = targets[token, g], scores[token, g].to(dtype)
                # without y / s, of which xlogy has no gradient at y = 0
                kl = torch.xlogy(y, y) - torch.xlogy(y, s) + torch.xlogy(1 - y, 1 - y) - torch.xlogy(1 - y, 1 - s)
                kl_per_head[g] += kl.detach()
                total = total + kl
        for g in range(kv_heads):
            y = targets[start:end, g]
            ranked = scores[start:end, g].detach().sort(descending=True, stable=True).indices
            for i, budget in enumerate(recall_budgets):
                recall[i, g] += y[ranked[: budget - distance]].sum() / y.sum() * len(y) / counted
    rows = max(counted, 1)
    stats = GateKLStats(kl_per_head / rows, torch.tensor(counted, device=q.device), recall)
    return total / (rows * kv_heads), stats


def pool_keys(
    k: Tensor, block_size: int, kinds: Sequence[str] = ("max", "min", "avg"), lengths: Tensor | None = None
) -> Tensor:
    """Computes one block at a time."""
    batch, kv_heads, capacity, dim = k.shape
    ends = [capacity] * batch if lengths is None else lengths.tolist()
    pooled = torch.zeros(
        batch, kv_heads, math.ceil(capacity / block_size), len(kinds) * dim, dtype=k.dtype, device=k.device
    )
    for b, end in enumerate(ends):
        for j in range(math.ceil(end / block_size)):
            keys = k[b, :, j * block_size : min((j + 1) * block_size, end)]
            results = {"max": keys.amax(1), "min": keys.amin(1), "avg": keys.to(_wide(k)).mean(1).to(k.dtype)}
            pooled[b, :, j] = torch.cat([results[kind] for kind in kinds], dim=-1)
    return pooled


@torch.no_grad()
def update_compressed_keys(
    k: Tensor,
    lengths: Tensor,
    recent: Tensor,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    kinds: Sequence[str] = ("max", "min", "avg"),
    *,
    norm_weight: Tensor | None = None,
    inv_freq: Tensor | None = None,
    attention_scaling: float = 1.0,
    position_offset: int = 0,
) -> None:
    """Computes one row and KV head at a time."""
    dtype = _wide(k, weight)
    slots = recent.shape[2]
    for b, length in enumerate(lengths.tolist()):
        recent[b, :, (length - 1) % slots] = k[b]
        if length % block_size:
            continue
        start = length - block_size
        for h in range(k.shape[1]):
            keys = torch.stack([recent[b, h, position % slots] for position in range(start, length)])
            x = pool_keys(keys[None, None], block_size, kinds)[0, 0, 0].to(dtype) @ weight[h].to(dtype)
            x = _branch_end(x, norm_weight, inv_freq, attention_scaling, start + position_offset)
            compressed[b, h, length // block_size - 1] = x.to(compressed.dtype)


def score_blocks(
    q: Tensor,
    lengths: Tensor,
    compressed: Tensor,
    weight: Tensor,
    block_size: int,
    *,
    norm_weight: Tensor | None = None,
    inv_freq: Tensor | None = None,
    attention_scaling: float = 1.0,
) -> Tensor:
    """Computes one row, gate query and block at a time; 0 for incomplete blocks."""
    dtype = _wide(q, weight)
    queries, heads, _, width = weight.shape
    batch, kv_heads, blocks = compressed.shape[:3]
    scores = torch.zeros(batch, kv_heads, blocks, queries // kv_heads, dtype=dtype, device=q.device)
    for b, length in enumerate(lengths.tolist()):
        for i in range(queries):
            h, of_head = divmod(i, queries // kv_heads)
            x = q[b, i * heads : (i + 1) * heads].to(dtype).flatten() @ weight[i].to(dtype).flatten(0, 1)
            x = _branch_end(x, norm_weight, inv_freq, attention_scaling, length - 1)
            for block in range(length // block_size):
                scores[b, h, block, of_head] = x @ compressed[b, h, block].to(dtype) / math.sqrt(width)
    return scores.amax(-1)


def _branch_end(
    x: Tensor, norm_weight: Tensor | None, inv_freq: Tensor | None, attention_scaling: float, position: int
) -> Tensor:
    """RMSNorm and RoPE of one vector ``[E]``; angles in Python floats."""
    if norm_weight is not None:
        x = x / (x.square().mean() + 1e-6).sqrt() * norm_weight.to(x.dtype)
    if inv_freq is None:
        return x
    rotated = x.clone()
    for i, frequency in enumerate(inv_freq.tolist()):
        angle, j = position * frequency, i + len(x) // 2
        cos, sin = (attention_scaling * f(angle) for f in (math.cos, math.sin))
        rotated[i], rotated[j] = x[i] * cos - x[j] * sin, x[j] * cos + x[i] * sin
    return rotated


def select_blocks(
    scores: Tensor,
    lengths: Tensor,
    *,
    block_size: int,
    token_budget: int | None = None,
    budget_share: float | None = None,
    budget_min: int | None = None,
    budget_max: int | None = None,
    threshold: float | None = None,
    top_p: float | None = None,
    sink_blocks: int = 0,
) -> Selection:
    """Uses a stable sort per row and KV head, and Python sets."""
    batch, kv_heads, _ = scores.shape
    largest = torch.finfo(torch.float32).max
    chosen: list[list[int]] = []
    for b in range(batch):
        current = (int(lengths[b]) - 1) // block_size
        for g in range(kv_heads):
            past_scores = scores[b, g, :current].float().nan_to_num(-largest, largest, -largest)
            ranked = past_scores.sort(descending=True, stable=True).indices.tolist()  # ties: lower index first
            always = {current, *range(min(sink_blocks, current))}
            picked: set[int]
            if token_budget is not None or budget_share is not None:
                if budget_share is None:
                    block_count = token_budget // block_size  # type: ignore[operator]
                else:
                    block_count = math.ceil((current + 1) * Fraction(str(budget_share)).limit_denominator(1_000_000))
                    block_count = max(block_count, (budget_min or 0) // block_size)
                    block_count = block_count if budget_max is None else min(block_count, budget_max // block_size)
                picked = set([j for j in ranked if j not in always][: max(block_count - len(always), 0)])
            else:
                first = min(sink_blocks, current)
                past_probs = past_scores[first:].softmax(0)
                if threshold is not None:  # compared in float32, as the scores are
                    picked = {first + j for j, above in enumerate((past_probs > threshold).tolist()) if above}
                else:
                    assert top_p is not None
                    probs, picked, mass = [0.0] * first + past_probs.tolist(), set(), 0.0
                    for j in [j for j in ranked if j not in always]:
                        if mass >= top_p:
                            break
                        picked.add(j)
                        mass += probs[j]
            chosen.append(sorted(always | picked))
    width = max((len(blocks) for blocks in chosen), default=0)
    padded = [blocks + [-1] * (width - len(blocks)) for blocks in chosen]
    indices = torch.tensor(padded, dtype=torch.int32, device=scores.device).view(batch, kv_heads, width)
    counts = torch.tensor([len(blocks) for blocks in chosen], dtype=torch.int32, device=scores.device)
    return Selection(indices, counts.view(batch, kv_heads))


@torch.no_grad()
def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    lengths: Tensor,
    block_size: int,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Gathers the selected tokens of one row and query head at a time."""
    if page_table is not None:
        k, v = unpaged(k, page_table), unpaged(v, page_table)
    dtype = _wide(q)
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    scale = 1.0 / math.sqrt(dim) if sm_scale is None else sm_scale
    out = torch.zeros(batch, heads, v.shape[-1], dtype=dtype, device=q.device)
    for b in range(batch):
        length = int(lengths[b])
        for h in range(heads):
            kv = h // (heads // kv_heads)
            blocks = [j for j in indices[b, kv].tolist() if j >= 0]
            tokens = [i for j in blocks for i in range(j * block_size, (j + 1) * block_size) if i < length]
            if not tokens:
                continue
            scores = _capped(k[b, kv, tokens].to(dtype) @ q[b, h].to(dtype) * scale, softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[h].to(dtype)[None]))
            out[b, h] = scores.softmax(0)[: len(tokens)] @ v[b, kv, tokens].to(dtype)
    return out.to(q.dtype)


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    sm_scale: float | None = None,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    """Calls `sparse_decode` with every token selected."""
    if page_table is not None:
        k, v = unpaged(k, page_table), unpaged(v, page_table)
    batch, kv_heads, capacity = k.shape[:3]
    if lengths is None:
        lengths = torch.full((batch,), capacity, device=q.device)
    every_token = torch.arange(capacity, device=q.device).expand(batch, kv_heads, -1)
    return sparse_decode(q, k, v, every_token, lengths, 1, sm_scale, sinks=sinks, softcap=softcap)
