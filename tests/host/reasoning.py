"""Texts that repeat themselves, and models that are forced to emit them."""

from __future__ import annotations

import torch
from transformers import DynamicCache

import seergate
from tests.models import left_padded

BORDER = 3
"""The token that ends a step of `Words`."""


class Words:
    """A tokenizer for random models: every token is a word, one of them a blank line."""

    def decode(self, ids):
        return "".join("\n\n" if i == BORDER else f"w{i} " for i in ids)


def repeating(steps, length, seed=0, fresh=()):
    """Ids ``[1, steps * length]``: the same step again and again, but new ones at the places ``fresh``."""
    draw = torch.Generator().manual_seed(seed)

    def step():
        return [*torch.randint(4, 128, (length - 1,), generator=draw).tolist(), BORDER]

    one = step()
    return torch.tensor([[token for i in range(steps) for token in (step() if i in fresh else one)]])


def forced_run(model, method, prompts, forced, *, each=None, **options):
    """Logits ``[B, 1 + n, V]`` after the prompts and after each of the forced tokens ``[B, n]``; the cache; stats."""
    batch, cache, found = left_padded(prompts), DynamicCache(), []
    mask, ids = batch["attention_mask"], batch["input_ids"]
    with seergate.attached(model, method, **options) as handle, torch.inference_mode():
        for at in range(forced.shape[1] + 1):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
            found.append(out.logits[:, -1])
            if each is not None:
                each(at, cache, handle)
            if at < forced.shape[1]:
                ids = forced[:, at : at + 1]
                mask = torch.cat((mask, torch.ones_like(ids)), 1)
        stats = handle.stats()
    return torch.stack(found, 1), cache, stats
