"""Rows that a model decodes pass by pass, with the mask and the positions that `generate` would give it."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import seergate
from tests.support.models import left_padded


class Decoding:
    """Rows on one cache.

    Args:
        model: a method may be attached.
        input_ids, attention_mask: the prompts, read at once; as of `left_padded`, or of rows without padding.
        cache: a new dynamic one by default.

    Attributes:
        logits: of the last pass, ``[B, S, V]``.
    """

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> None:
        self.model, self.cache, self.mask = model, DynamicCache() if cache is None else cache, input_ids[:, :0]
        self.read(input_ids, attention_mask)

    def read(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of the rows' next tokens ``[B, S]``, of which ``mask`` hides some."""
        self.mask = torch.cat((self.mask, torch.ones_like(ids) if mask is None else mask), 1)
        self.logits = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=(self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :],
            past_key_values=self.cache,
        ).logits
        return self.logits

    def crop(self, tokens: int) -> None:
        """Take the newest tokens of all rows back."""
        self.cache.crop(-tokens)
        self.mask = self.mask[:, :-tokens]

    def take(self, index: list[int]) -> None:
        """Go on with these rows, in this order; a row may come twice."""
        self.cache.reorder_cache(torch.tensor(index))
        self.mask = self.mask[index]


def forced_run(model, method, prompts, forced, *, each=None, **options):
    """Logits ``[B, 1 + n, V]`` after the prompts and after each of the forced tokens ``[B, n]``; the cache; stats.

    ``each`` is called after every pass: ``(number, cache, handle)``.
    """
    with seergate.attached(model, method, **options) as handle, torch.inference_mode():
        rows = Decoding(model, **left_padded(prompts))
        logits = [rows.logits[:, -1]]
        for at in range(forced.shape[1] + 1):
            if at:
                logits.append(rows.read(forced[:, at - 1 : at])[:, -1])
            if each is not None:
                each(at, rows.cache, handle)
        stats = handle.stats()
    return torch.stack(logits, 1), rows.cache, stats
