"""A slow, simple sparse decoder for one sequence of a Qwen3-like model: what the engine is held to.

No batch, no padding, no cache layer, no state that is carried along: every step scores all blocks anew from all keys,
with loops over heads and blocks, in float64. The model's own modules compute everything but attention.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rule:
    """How blocks are chosen; the fields mean what they mean in `DecodeConfig`."""

    selector: str
    block_size: int
    token_budget: int | None = None
    threshold: float | None = None
    top_p: float | None = None
    sink_blocks: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_below: int = 0
    anchors: tuple[int, ...] = ()


@dataclass
class Kept:
    """One layer's tokens: keys before and after RoPE and values, each ``[K, n, D]``."""

    raw: Tensor
    keys: Tensor
    values: Tensor


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, the halves of a vector being the parts of complex numbers."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class ReferenceRow:
    """One sequence.

    Args:
        model: in float64.
        rule: how blocks are chosen.
        gates: by layer, in float64, where the selector is the gate.
    """

    def __init__(self, model, rule: Rule, gates: dict[int, nn.Module] | None = None) -> None:
        self.model, self.rule, self.gates = model, rule, gates
        config = model.config
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        empty = torch.zeros(self.kv_heads, 0, self.width, dtype=torch.float64)
        self.layers = [Kept(empty, empty, empty) for _ in model.model.layers]
        self.picked: dict[tuple[int, int], set[int]] = {}  # blocks of this token by anchor and KV head

    @property
    def length(self) -> int:
        return self.layers[0].keys.shape[1]

    def twin(self) -> "ReferenceRow":
        """A copy that goes its own way."""
        other = copy.copy(self)
        other.layers = [Kept(kept.raw, kept.keys, kept.values) for kept in self.layers]
        return other

    def crop(self, tokens: int) -> None:
        """Forget the newest tokens."""
        left = self.length - tokens
        self.layers = [Kept(kept.raw[:, :left], kept.keys[:, :left], kept.values[:, :left]) for kept in self.layers]

    def read(self, tokens: list[int]) -> Tensor:
        """Read tokens densely, as a prompt: logits ``[n, V]``."""
        return self._forward(tokens, dense=True)

    def decode(self, tokens: list[int]) -> Tensor:
        """Decode tokens one after another: logits ``[n, V]``."""
        return torch.cat([self._forward([token], dense=False) for token in tokens])

    def _forward(self, tokens: list[int], dense: bool) -> Tensor:
        decoder, start = self.model.model, self.length
        positions = torch.arange(start, start + len(tokens))[None]
        hidden = decoder.embed_tokens(torch.tensor([tokens]))
        cos, sin = (part[0].double() for part in decoder.rotary_emb(hidden, positions))
        for index, layer in enumerate(decoder.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            split = (1, len(tokens), -1, self.width)
            raw_q = attention.q_norm(attention.q_proj(normed).view(split))[0].transpose(0, 1)
            raw_k = attention.k_norm(attention.k_proj(normed).view(split))[0].transpose(0, 1)
            values = attention.v_proj(normed).view(split)[0].transpose(0, 1)
            kept = self.layers[index]
            kept.raw = torch.cat((kept.raw, raw_k), 1)
            kept.keys = torch.cat((kept.keys, turn(raw_k, cos, sin)), 1)
            kept.values = torch.cat((kept.values, values), 1)
            output = self._attend(index, raw_q, turn(raw_q, cos, sin), start, dense)
            hidden = hidden + attention.o_proj(output.transpose(0, 1).reshape(1, len(tokens), -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(decoder.norm(hidden))[0]

    def _attend(self, layer: int, raw_q: Tensor, q: Tensor, start: int, dense: bool) -> Tensor:
        kept, group = self.layers[layer], self.heads // self.kv_heads
        outputs = torch.zeros_like(q)
        total = kept.keys.shape[1]
        for kv_head in range(self.kv_heads):
            chosen = torch.ones(total, dtype=torch.bool) if dense else self._chosen(layer, kv_head, raw_q, q, total)
            for head in range(kv_head * group, (kv_head + 1) * group):
                scores = q[head] @ kept.keys[kv_head].T / math.sqrt(self.width)
                for i in range(q.shape[1]):
                    visible = chosen & (torch.arange(total) <= start + i)
                    outputs[head, i] = scores[i].masked_fill(~visible, -torch.inf).softmax(-1) @ kept.values[kv_head]
        return outputs

    def _chosen(self, layer: int, kv_head: int, raw_q: Tensor, q: Tensor, length: int) -> Tensor:
        """Which tokens a KV head reads for the newest token, bool ``[length]``."""
        rule, size = self.rule, self.rule.block_size
        current = (length - 1) // size
        blocks = set(range(current + 1))
        anchor = max((anchor for anchor in rule.anchors if anchor < layer), default=None)
        if layer not in rule.dense_layers and anchor is not None and layer not in rule.anchors:
            blocks = self.picked[anchor, kv_head]
        elif layer not in rule.dense_layers and length > rule.dense_below:
            scores = [self._score(layer, kv_head, raw_q, q, block) for block in range(current)]
            blocks = self._pick([float(torch.tensor(score, dtype=torch.float32)) for score in scores], current)
        self.picked[layer, kv_head] = blocks
        token_blocks = torch.arange(length) // size
        return torch.tensor([int(block) in blocks for block in token_blocks])

    def _pick(self, scores: list[float], current: int) -> set[int]:
        rule = self.rule
        forced = {current, *range(min(rule.sink_blocks, current))}
        ranked = sorted(set(range(current)) - forced, key=lambda block: (-scores[block], block))
        if rule.token_budget is not None:
            free = rule.token_budget // rule.block_size - len(forced)
            return forced | set(ranked[: max(0, free)])
        if not ranked:
            return forced
        normalised_scores = torch.tensor([scores[block] for block in ranked], dtype=torch.float64).softmax(-1).tolist()
        shares = dict(zip(ranked, normalised_scores, strict=True))
        if rule.threshold is not None:
            return forced | {block for block in ranked if shares[block] > rule.threshold}
        total, nucleus = 0.0, set()
        for block in ranked:
            if total >= rule.top_p:
                break
            nucleus.add(block)
            total += shares[block]
        return forced | nucleus

    def _score(self, layer: int, kv_head: int, raw_q: Tensor, q: Tensor, block: int) -> float:
        kept, group, size = self.layers[layer], self.heads // self.kv_heads, self.rule.block_size
        inside = slice(block * size, (block + 1) * size)
        heads = range(kv_head * group, (kv_head + 1) * group)
        if self.rule.selector == "oracle":  # log of the largest probability
            log_probs = []
            for head in heads:
                logits = kept.keys[kv_head] @ q[head, -1] / math.sqrt(self.width)
                log_probs.append(float((logits - logits.logsumexp(0))[inside].max()))
            return max(log_probs)
        if self.rule.selector == "quest":
            keys = kept.keys[kv_head][inside]
            high, low = keys.max(0).values, keys.min(0).values
            bounds = [float(torch.maximum(q[head, -1] * high, q[head, -1] * low).sum()) for head in heads]
            return max(bounds) / math.sqrt(self.width)
        gate = self.gates[layer]
        query = sum(raw_q[head, -1] @ gate.q_proj.weight[kv_head, i] for i, head in enumerate(heads))
        query = self._placed(gate, gate.q_norm, query, self.length - 1)
        return float(query @ self.compressed_key(layer, kv_head, block)) / math.sqrt(len(query))

    def compressed_key(self, layer: int, kv_head: int, block: int) -> Tensor:
        """The gate's key of a block that is full ``[E]``."""
        gate, size = self.gates[layer], self.rule.block_size
        keys = self.layers[layer].raw[kv_head, block * size : (block + 1) * size]
        pooled = torch.cat((keys.max(0).values, keys.min(0).values, keys.mean(0)))
        return self._placed(gate, gate.k_norm, pooled @ gate.k_proj.weight[kv_head], block * size)

    @staticmethod
    def _placed(gate, norm, x: Tensor, position: int) -> Tensor:
        x = x / (x.square().mean() + 1e-6).sqrt() * norm.weight
        angles = (position * gate.inv_freq.double()).repeat(2)
        return turn(x, angles.cos(), angles.sin())
