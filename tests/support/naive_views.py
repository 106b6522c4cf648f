"""Simulations of the methods that do not just evict: what a query sees of the whole past. See `naive`."""

from functools import cache

import numpy as np
import torch

from seergate import GateBank, GateConfig
from tests.support import naive


class KV4Bit:
    """Tokens older than `residual` are rounded in whole groups, counted from the first token of the row."""

    def __init__(self, group, residual):
        self.group, self.residual = group, residual

    def __call__(self, past):
        past.alive[:, : self.old(past.seen)] = False  # of the cache they are gone

    def old(self, seen):
        return max(0, (seen - self.residual) // self.group * self.group)

    def view(self, past, head, keys, values):
        keys, values = keys.copy(), values.copy()
        if past.seen > past.prompt:  # a prompt is read before it is rounded
            for first in range(0, self.old(past.seen - 1), self.group):
                tokens = range(first, first + self.group)
                for channel in range(keys.shape[1]):
                    keys[tokens, channel] = rounded(keys[tokens, channel])
                rows_in_groups(values, tokens, self.group)
        return np.arange(len(keys)), keys, values


def rows_in_groups(x, tokens, group):
    """Round some tokens, each in groups of its channels: as many as divide their number, at most `group`."""
    size = next(n for n in range(group, 0, -1) if x.shape[1] % n == 0)
    for token in tokens:
        for first in range(0, x.shape[1], size):
            x[token, first : first + size] = rounded(x[token, first : first + size])


def rounded(numbers):
    """The nearest of 16 levels, one number at a time; the lowest level and the step between two are float16."""
    return np.array(_rounded(tuple(numbers)))


@cache  # a full group is rounded again at every step, and never otherwise
def _rounded(numbers):
    low = float(np.float16(min(numbers)))
    step = float(np.float16(max(0, max(numbers) - low) / 15))
    levels = [low + step * code for code in range(16)]
    return [min(levels, key=lambda level: abs(level - x)) for x in numbers]


def turned(x, positions, frequencies, sign=1):
    """Rotate the halves of `x [n, D]` by RoPE to these positions, or with sign -1 back. The angles have the precision
    of the frequencies: float32 in transformers, whatever the model's.
    """
    half = len(frequencies)
    angles = np.outer(np.asarray(positions, frequencies.dtype), frequencies)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(sign * 1j * angles)
    return np.concatenate((z.real, z.imag), -1)


class StreamingLLM:
    """The first tokens and the newest, from section 3.2 and Figure 4: keys are kept before RoPE, and a query sees
    those at hand at the positions 0 .. n - 1, itself at n - 1. What is not seen any more leaves in batches.
    """

    def __init__(self, budget, sinks, batch, frequencies):
        self.budget, self.sinks, self.batch, self.frequencies = budget, sinks, batch, frequencies

    def __call__(self, past):
        for alive in past.alive:
            living = np.nonzero(alive)[0]
            if len(living) >= self.budget + self.batch:
                recent = self.budget - self.sinks - 1  # and room for the next token
                alive[living[self.sinks : len(living) - recent]] = False

    def stored(self, past, head):
        """What the cache holds of a head: living keys before RoPE."""
        return turned(past.keys[:, head], np.arange(past.seen), self.frequencies, -1)[past.alive[head]]

    def seen(self, past):
        """Tokens that the newest query sees: all of a prompt, whatever its length."""
        if past.seen <= max(past.prompt, self.budget):
            return np.arange(past.seen)
        return np.array([*range(self.sinks), *range(past.seen - self.budget + self.sinks, past.seen)])

    def view(self, past, head, keys, values):
        which = self.seen(past)
        assert past.alive[head, which].all(), "what is seen must not have left"
        keys = turned(keys, np.arange(past.seen), self.frequencies, -1)
        keys[which] = turned(keys[which], np.arange(len(which)), self.frequencies)
        return which, keys, values

    def query(self, past, q):
        raw = turned(q[None], [past.seen - 1], self.frequencies, -1)
        return turned(raw, [len(self.seen(past)) - 1], self.frequencies)[0]


class SinksAndWindow(StreamingLLM):
    """The same tokens, but keys and queries have the positions at which they came."""

    stored = None

    def view(self, past, head, keys, values):
        return super().view(past, head, keys, values)[0], keys, values

    def query(self, past, q):
        return q


class Gated:
    """A policy, and a gate that picks blocks of the whole text: of a picked block all that lives is seen."""

    def __init__(self, policy, bank, budget, frequencies):
        self.policy, self.bank, self.budget, self.frequencies = policy, bank, budget, frequencies

    def __call__(self, past):
        self.policy(past)

    def view(self, past, head, keys, values):
        living = past.living(head)[past.living(head) < past.seen]
        size = self.bank.config.block_size
        newest = (past.seen - 1) // size
        if past.seen <= past.prompt or self.budget // size >= newest + 1:
            return living, keys, values
        scores = self.scores(past, head, newest)
        inhabited = {j // size for j in living}
        best = sorted((n for n in range(newest) if n in inhabited), key=lambda n: scores[n], reverse=True)
        picked = {newest, *best[: self.budget // size - 1]}
        return np.array([j for j in living if j // size in picked]), keys, values

    def scores(self, past, head, blocks):
        """Equations 1a to 1c of SeerAttention-R for one KV head, with its keys rotated back to where they began."""
        gate, size = self.bank.gate(past.layer), self.bank.config.block_size
        raw = turned(past.keys[: blocks * size, head], np.arange(blocks * size), self.frequencies, -1)
        pooled = [np.concatenate((b.max(0), b.min(0), b.mean(0))) for b in raw.reshape(blocks, size, -1)]
        now, own = past.seen - 1, past.queries[-1][past.group(head)]
        queries = turned(own, [now] * len(own), self.frequencies, -1)
        weight_q, weight_k = (w.detach().double().numpy()[head] for w in (gate.q_proj.weight, gate.k_proj.weight))
        qg, kg = np.einsum("gd,gde->e", queries, weight_q), np.stack(pooled) @ weight_k

        def normed(x, norm):
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * norm.weight.detach().double().numpy()

        w = gate.inv_freq.double().numpy()
        placed_k = turned(normed(kg, gate.k_norm), np.arange(blocks) * size, w)
        return placed_k @ turned(normed(qg, gate.q_norm)[None], [now], w)[0]


class Quest:
    """Each query head reads the newest page and those of the whole text whose bounds for its query are highest."""

    def __init__(self, budget, page):
        self.pages, self.page = budget // page, page

    def __call__(self, past):
        pass

    def view(self, past, head, keys, values):
        if past.seen <= max(past.prompt, self.pages * self.page):
            return np.arange(past.seen), keys, values
        pages, which = [range(i, min(i + self.page, past.seen)) for i in range(0, past.seen, self.page)], {}
        for of in past.group(head):
            q = past.queries[past.seen - 1][of]
            bounds = [sum(max(q[d] * keys[p, d].max(), q[d] * keys[p, d].min()) for d in range(len(q))) for p in pages]
            best = sorted(range(len(pages) - 1), key=lambda n, bounds=bounds: -bounds[n])[: self.pages - 1]
            which[of] = np.concatenate([np.array(pages[n]) for n in [*sorted(best), len(pages) - 1]])
        return which, keys, values


DECIMALS = 9
"""Of scores that are rounded."""


class Retained(naive.Budgeted):
    """What retention gates score best; `weights` are a layer's, in float64."""

    def __init__(self, *args, bank, **options):
        super().__init__(*args, **options)
        self.bank = bank

    def weights(self, past):
        return {name: x.double().numpy() for name, x in self.bank.layers[str(past.layer)].state_dict().items()}


class FastKVzip(Retained):
    first = 2

    def scores(self, past, head):
        w, scores = self.weights(past), np.zeros(past.seen)
        heads, group, width = past.keys.shape[1], len(past.group(head)), len(w["q_norm.weight"])

        def normed(x, norm):
            return x / np.sqrt((x**2).mean() + 1e-6) * w[norm]

        for token in past.living(head):
            x = past.hidden[token]
            q = (w["q_proj.weight"] @ x + w["q_proj.bias"]).reshape(heads, group, width)[head]
            k = normed((w["k_proj.weight"] @ x).reshape(heads, width)[head], "k_norm.weight")
            shares = []
            for of in range(group):
                query = normed(q[of], "q_norm.weight")
                own = query @ k / np.sqrt(width) + w["bias"][head, of]
                others = w["base_keys"][head] @ query / np.sqrt(width)
                shares.append(1 / (1 + np.exp(others - own).sum()))
            scores[token] = np.mean(shares).round(DECIMALS) if token >= self.first else 1
        return scores


class TrimKV(Retained):
    def scores(self, past, head):
        w, scores = self.weights(past), np.zeros(past.seen)
        for token in past.living(head):
            inner = w["linear1.weight"] @ past.hidden[token] + w["linear1.bias"]
            out = (w["linear2.weight"] @ (inner / (1 + np.exp(-inner))) + w["linear2.bias"])[head]
            scores[token] = -np.log1p(np.exp(-out)) * (past.seen + 1 - token)
        return scores


def retention_for(model, scorer):
    """Retention gates with random weights, far enough apart that their choices differ from chance and from recency."""
    torch.manual_seed(4)
    bank = GateBank.for_model(model, GateConfig(8, scorer=scorer))
    for parameter in bank.parameters():
        parameter.data.normal_(std=0.3)
    return bank


def level(bank):
    """The gates in float64, whose scores are rounded: tokens that are the same differ in the last bit, and only in the
    first layer.
    """
    for gate in bank.double().layers.values():
        gate.register_forward_hook(lambda gate, x, scores: scores.round(decimals=DECIMALS))
    return bank


def gate_for(model):
    """Gates with random weights, wide enough apart that their choices differ from chance and from recency."""
    torch.manual_seed(3)
    return GateBank.for_model(model, GateConfig(8, 16))


def gated(policy, model, bank, budget):
    """`Gated` with the model's RoPE."""
    return Gated(policy, bank, budget, model.model.rotary_emb.inv_freq.double().numpy())


def streaming(model, *args, kind=StreamingLLM):
    """`StreamingLLM`, or a kind of it, with the model's RoPE."""
    return kind(*args, model.model.rotary_emb.inv_freq.float().numpy())
