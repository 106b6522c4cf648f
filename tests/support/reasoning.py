"""Texts that repeat themselves."""

import torch

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
