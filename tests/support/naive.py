"""Evicting methods, simulated: nothing is dropped, masks hide what has been evicted. Float64, loops, numpy.

It shares no code with seergate: the model runs as transformers has it, over its own full cache, with an attention
function that computes ``softmax(q k) v`` over the tokens that a `policy` has let live, from the papers' equations. A
policy sees the whole past of a layer, so it can say a score as its paper defines it instead of keeping it up to date.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@dataclass
class Past:
    """All that ever happened in one layer; query head h belongs to KV head h // G."""

    layer: int
    scale: float
    prompt: int = 0
    queries: list = field(default_factory=list)  # [H, D] each
    hidden: list = field(default_factory=list)  # [W] each: what the attention module got
    keys: np.ndarray = None  # [N, K, D], after RoPE
    given: list = field(default_factory=list)  # per query [H, N_i]: the probabilities it gave
    alive: np.ndarray = None  # bool [K, N]

    @property
    def seen(self):
        return len(self.queries)

    @property
    def decoded(self):
        return self.seen - self.prompt

    def group(self, head):
        size = len(self.queries[0]) // self.keys.shape[1]
        return range(head * size, (head + 1) * size)

    def living(self, head):
        return np.nonzero(self.alive[head])[0]

    def logits(self, query, of, head):
        """Of query index `query`, query head `of`, to all keys of a KV head."""
        return self.scale * self.keys[:, head] @ self.queries[query][of]


def keep_best(past, head, scores, number, always):
    """Let the `number` best residents live: those in `always`, then by score, then the newer."""
    order = sorted(past.living(head), key=lambda j: (j in always, scores[j], j), reverse=True)
    past.alive[head] = False
    past.alive[head, order[:number]] = True


class Budgeted:
    """Common rules: C residents stay, the recent and perhaps the prompt always."""

    def __init__(self, budget, interval=1, recent=0, periodic=False, pinned=False, at_prompt=True):
        self.budget, self.interval, self.recent = budget, interval, recent
        self.periodic, self.pinned, self.at_prompt = periodic, pinned, at_prompt

    def __call__(self, past):
        kept = self.budget
        if self.pinned:
            kept = max(kept, past.prompt + max(self.interval, self.recent))
        for head in range(past.keys.shape[1]):
            count = int(past.alive[head].sum())
            if past.decoded == 0:
                due = self.at_prompt and count > kept
            elif self.periodic:
                due = self.clock(past) % self.interval == 0 and count > kept
            else:
                due = count >= kept + self.interval
            if due:
                always = set(past.living(head)[count - self.recent :])
                if self.pinned:
                    always |= set(range(past.prompt))
                keep_best(past, head, self.scores(past, head), kept, always)

    def clock(self, past):
        return past.decoded


class H2O(Budgeted):
    def scores(self, past, head):
        total = np.zeros(past.seen)
        for p in past.given:
            total[: p.shape[1]] += p[past.group(head)].mean(0)
        return total


class TOVA(Budgeted):
    def scores(self, past, head):
        return past.given[-1].mean(0)


class Lazy(Budgeted):
    alpha, shift, use_h1 = 0.04, 1, True

    def scores(self, past, head):
        scores = np.zeros(past.seen)
        for j in past.living(head):
            last, mri = max(0, j - past.prompt), 0  # a token decoded at step t is born at t - 1
            for t in range(max(1, j - past.prompt + 1), past.decoded + 1):
                if past.given[past.prompt + t - 1][past.group(head), j].max() >= self.alpha:
                    mri, last = max(mri, t - last), t
            elapsed = (past.decoded - last) / (mri + 1e-5)
            scores[j] = 2 / (1 + np.exp(self.shift + elapsed)) if self.use_h1 and elapsed < 600 else 0.0
            scores[j] += 0 if mri == 0 else 2 / (1 + np.exp(mri - 1))
        return scores


class SnapKV(Budgeted):
    kernel, by_group = 5, False

    def scores(self, past, head):
        living, window = past.living(head), self.recent
        before = living[: len(living) - window]
        received = np.zeros((len(past.group(head)), len(before)))
        for given, of in zip(received, past.group(head), strict=True):
            for query in range(past.seen - window, past.seen):
                visible = living[living <= query]
                given += softmax(past.logits(query, of, head)[visible])[: len(before)] / window
        if self.by_group:
            return self.spread(past, before, received.mean(0))
        return np.mean([self.spread(past, before, given) for given in received], 0)

    def spread(self, past, before, received):
        """Max-pool over neighbours among the candidates."""
        scores, half = np.zeros(past.seen), self.kernel // 2
        for i, j in enumerate(before):
            scores[j] = received[max(0, i - half) : i + half + 1].max()
        return scores


class RKV(SnapKV):
    weight, by_length = 0.1, False

    def clock(self, past):
        return past.seen - 1 if self.by_length else past.decoded

    def scores(self, past, head):
        living, window = past.living(head), self.recent
        before = living[: len(living) - window]
        received = np.zeros(len(before))
        for query in range(past.seen - window, past.seen):
            received += softmax(np.max([past.logits(query, of, head)[before] for of in past.group(head)], axis=0))
        attention = self.spread(past, before, received / window)
        unit = past.keys[living, head] / np.linalg.norm(past.keys[living, head], axis=1, keepdims=True)
        alike = unit @ unit.T
        for i, row in enumerate(alike):
            row[i] = 0
            row[np.nonzero(row > 0.5)[0][-1:]] = 0
        scores = self.weight * attention
        scores[living] -= (1 - self.weight) * softmax(alike.mean(0))
        return scores


class Random(Budgeted):
    seed = 0

    def scores(self, past, head):
        return [number(self.seed, past.layer, head, j, past.decoded) for j in range(past.seen)]


def number(seed, layer, head, token, event):
    """A chain of splitmix64-like finalisers on unsigned 64-bit integers."""

    def mix(x):
        mask = 2**64 - 1
        x = (x * (-7046029254386353131 & mask) + 1442695040888963407) & mask
        x = ((x ^ (x >> 30)) * (-4658895280553007687 & mask)) & mask
        x = ((x ^ (x >> 27)) * (-7723592293110705685 & mask)) & mask
        return x ^ (x >> 31)

    bits = mix(mix(mix(mix(seed * 1_000_003 + layer) + event) + head) + token)
    return (bits - 2**64 if bits >= 2**63 else bits) >> 11


class Tri(Budgeted):
    """The sum of cosines over un-rotated keys; `mean` and `modulus` [L][H, .] and the model's RoPE are given."""

    biggest = 65536

    def __init__(self, *args, mean, modulus, frequencies, factor, **options):
        super().__init__(*args, **options)
        self.mean, self.modulus, self.frequencies, self.factor = mean, modulus, frequencies, factor

    def scores(self, past, head):
        w, half = self.frequencies, len(self.frequencies)
        living = past.living(head)
        competing = living[past.prompt :] if self.pinned else living
        competing = competing[: len(competing) - self.recent]
        k = past.keys[competing, head] / self.factor
        k = (k[:, :half] + 1j * k[:, half:]) * np.exp(-1j * np.outer(competing, w))  # back to before RoPE
        offsets = [2**i for i in range(int(np.log2(self.biggest)) + 1)]
        best = np.full(len(competing), -np.inf)
        for of in past.group(head):
            mu = self.mean[past.layer][of][:half] + 1j * self.mean[past.layer][of][half:]
            spread = self.modulus[past.layer][of] - abs(mu)
            ahead = []
            for offset in offsets:
                phase = w * (past.seen + offset - competing[:, None]) + np.angle(mu * np.conj(k))
                ahead.append((abs(mu) * abs(k) * np.cos(phase)).sum(1))
            total = self.factor**2 * (np.mean(ahead, 0) + (spread * abs(k)).sum(1))
            best = np.maximum(best, (total - total.mean()) / max(total.std(), 1e-6))
        scores = np.zeros(past.seen)
        scores[competing] = best
        return scores


class RPC:
    def __init__(self, interval, window, ratio=4, kernel=7, layer_wide=True, newest_twice=False):
        self.interval, self.window, self.ratio, self.kernel = interval, window, ratio, kernel
        self.layer_wide, self.newest_twice = layer_wide, newest_twice

    def __call__(self, past):
        passed = past.decoded - self.window
        if passed <= 0 or passed % self.interval:
            return
        heads, received = range(past.keys.shape[1]), []
        queries = list(range(past.seen - self.window, past.seen))
        if self.newest_twice:
            queries = [*queries[1:], past.seen - 1]
        for head in heads:
            middle = past.living(head)[past.prompt : -self.window]
            received.append(np.zeros(len(middle)))
            for of in past.group(head):
                for query in queries:
                    received[head] += softmax(past.logits(query, of, head)[middle]) / len(past.group(head))
        for head in heads:
            mine = np.mean(received, 0) if self.layer_wide else received[head]
            padded = np.pad(mine, self.kernel // 2)
            living, scores = past.living(head), np.zeros(past.seen)
            always = {*living[: past.prompt], *living[-self.window :]}
            middle = living[past.prompt : -self.window]
            scores[middle] = [padded[i : i + self.kernel].sum() / self.kernel for i in range(len(mine))]
            quota = passed // self.interval * (self.interval // self.ratio)
            keep_best(past, head, scores, past.prompt + quota + self.window, always)


class RaaS:
    def __init__(self, budget, page, share=0.5, prompt="pinned", of_budget=False):
        self.pages, self.page, self.share = budget // page, page, share
        self.prompt, self.of_budget, self.used = prompt, of_budget, {}

    def bounded(self, past, head):
        """The pages of a head, and of each, by its first token, what no logit of the newest query exceeds."""
        living, q, bounds = past.living(head), past.queries[-1], {}
        pages = [living[i : i + self.page] for i in range(0, len(living), self.page)]
        for page in pages:
            k = past.keys[page, head]
            bounds[page[0]] = max(np.maximum(q[of] * k.max(0), q[of] * k.min(0)).sum() for of in past.group(head))
        return pages, bounds

    def __call__(self, past):
        if past.decoded == 0:
            return
        for head in range(past.keys.shape[1]):
            pages, bounds = self.bounded(past, head)
            names = [page[0] for page in pages]
            fresh = sorted(names, key=lambda n: (bounds[n], n), reverse=True)
            fresh = fresh[: max(1, int(self.share * (self.pages if self.of_budget else len(names))))]
            for n in [*fresh, names[-1]]:
                self.used[past.layer, head, n] = past.decoded
            of_prompt = [n for n in names if n < past.prompt]
            evictable = [n for n in names[:-1] if self.prompt == "evictable" or n not in of_prompt]
            room = {"pinned": max(self.pages, len(of_prompt) + 1), "extra": len(of_prompt) + self.pages}
            evictable.sort(key=lambda n: (self.used.get((past.layer, head, n), 0), bounds[n], n))
            for worst in evictable[: max(0, len(names) - room.get(self.prompt, self.pages))]:
                past.alive[head, pages[names.index(worst)]] = False


class Simulation:
    """A model whose attention is the simulated one, for the duration of a `with` block."""

    def __init__(self, model, policy):
        self.model, self.policy, self.layers = model, policy, {}

    def __enter__(self):
        self.usual = self.model.config._attn_implementation
        ALL_ATTENTION_FUNCTIONS["naive_simulation"] = self.attend
        self.model.config._attn_implementation = "naive_simulation"
        self.hooks = [
            layer.self_attn.register_forward_pre_hook(self.see, with_kwargs=True) for layer in self.model.model.layers
        ]
        return self

    def __exit__(self, *error):
        self.model.config._attn_implementation = self.usual
        del ALL_ATTENTION_FUNCTIONS["naive_simulation"]
        for hook in self.hooks:
            hook.remove()

    def see(self, module, args, kwargs):
        self.hidden = kwargs["hidden_states"][0].double().numpy()

    def attend(self, module, query, key, value, mask, scaling=None, **kwargs):
        q, k, v = (x[0].transpose(0, 1).double().numpy() for x in (query, key, value))
        past = self.layers.setdefault(module.layer_idx, Past(module.layer_idx, scaling))
        new, heads = len(q), k.shape[1]
        past.hidden += [*self.hidden]
        if past.keys is None:
            past.prompt = new
        alive = np.ones((heads, len(k)), dtype=bool)
        if past.alive is not None:
            alive[:, : past.seen] = past.alive
        past.alive, past.keys = alive, k
        view = getattr(self.policy, "view", None)  # of policies that do more than to evict
        placed = getattr(self.policy, "query", lambda past, q: q)
        output = np.zeros((new, q.shape[1], v.shape[2]))
        for i in range(new):
            past.queries.append(q[i])
            p = np.zeros((q.shape[1], past.seen))
            for head in range(heads):
                visible = past.living(head)[past.living(head) < past.seen]
                for of in past.group(head):
                    p[of, visible] = softmax(past.logits(past.seen - 1, of, head)[visible])
                    output[i, of] = p[of] @ v[: past.seen, head]
                if view is not None:
                    which, keys, values = view(past, head, k[: past.seen, head], v[: past.seen, head])
                    for of in past.group(head):
                        mine = which[of] if isinstance(which, dict) else which
                        output[i, of] = softmax(past.scale * keys[mine] @ placed(past, q[i, of])) @ values[mine]
            past.given.append(p)
        self.policy(past)
        return torch.from_numpy(output).to(query.dtype)[None], None

    def logits(self, ids, forced):
        """Logits ``[1 + n, V]`` after the prompt and after each of the forced tokens ``[n]``."""
        cache, passes = DynamicCache(), (ids, *forced.view(-1, 1, 1))
        return torch.stack([self.model(input_ids=step, past_key_values=cache).logits[0, -1] for step in passes])
