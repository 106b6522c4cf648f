"""Tokens that an evicting method keeps, step by step (as in Figure 5 of RPC and Figure 3 of RaaS)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from seergate.decode.stats import DecodeStats
from seergate.eval.calibration.recurrence import answers
from seergate.eval.sampling import Sampling
from seergate.methods import EvictingMethod
from seergate.methods.base import Step
from seergate.methods.evicting import Eviction
from seergate.models import families
from seergate.models.attach import attached


def drawn_layer(kv_heads: Mapping[int, int]) -> int:
    """The layer to look at, given `seergate.models.families.kv_heads`: the first from layer 1 on, or else layer 0."""
    return next((number for number in kv_heads if number >= 1), next(iter(kv_heads)))


class KeptTokens(DecodeStats):
    """`DecodeStats` of one sample that also remember when each token was evicted; for `Handle.count_with`.

    Attributes:
        prompt: tokens of the prompt.
        tokens: tokens seen in all, the prompt's included.
    """

    def __init__(self, kv_heads: Mapping[int, int]) -> None:
        layers = list(kv_heads)
        super().__init__(layers)
        self.prompt = self.tokens = 0
        self._seen = dict.fromkeys(layers, 0)
        self._resident: dict[int, np.ndarray] = {}  # [K, residents], the index of each resident token
        self._left: dict[int, dict[tuple[int, int], int]] = {layer: {} for layer in layers}

    def evicted(self, layer: int, step: Step, eviction: Eviction) -> None:
        """Record the tokens that each KV head of a layer evicts in this step."""
        resident = self._resident.get(layer, np.zeros((eviction.index.shape[1], 0), dtype=np.int64))
        seen = self._seen[layer]
        new = np.arange(seen, seen + step.ends[0] - resident.shape[1])
        resident = np.concatenate((resident, np.broadcast_to(new, (len(resident), len(new)))), axis=1)
        self._seen[layer] = seen + len(new)
        stays = eviction.index[0].cpu().numpy()
        for head, (before, slots) in enumerate(zip(resident, stays, strict=True)):
            for token in np.setdiff1d(before, before[slots]).tolist():
                self._left[layer][head, token] = self._seen[layer]
        self._resident[layer] = np.take_along_axis(resident, stays, axis=1)

    def lifetimes(self, layer: int, head: int) -> np.ndarray:
        """Per token, the number of tokens seen when it left a KV head's cache; ``tokens + 1`` if it never left."""
        left = np.full(self.tokens, self.tokens + 1)
        for (of, token), when in self._left[layer].items():
            if of == head:
                left[token] = when
        return left

    def resident(self, layer: int, head: int) -> np.ndarray:
        """Bool ``[tokens - prompt, tokens]``: which tokens each decode step's query could attend to."""
        steps = np.arange(self.prompt + 1, self.tokens + 1)[:, None]
        return (np.arange(self.tokens) < steps) & (self.lifetimes(layer, head) >= steps)


@torch.inference_mode()
def kept_tokens(
    model: PreTrainedModel,
    method: EvictingMethod,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    ends: Collection[int] = (),
) -> KeptTokens:
    """Answer one prompt, greedily if ``sampling`` is ``None``, and record which tokens are kept."""
    with attached(model, method) as handle:
        heads = families.kv_heads(model)
        recorder = handle.count_with(lambda layers: KeptTokens(heads))
        for batch in answers(model, [prompt], max_new_tokens, sampling, ends):
            recorder.prompt, recorder.tokens = len(prompt), batch.lengths[0]
    return recorder
