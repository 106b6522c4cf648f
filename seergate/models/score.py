"""Log-probabilities of a given text under the attached method: prefill up to a token, then decode."""

from __future__ import annotations

from contextlib import nullcontext
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from seergate.cache.forward import CACHE, VERIFIED_TOKENS
from seergate.errors import SeergateError
from seergate.models.attach import handle_of
from seergate.models.families import check_angles, check_eval_mode, text_config


class Scores(NamedTuple):
    """Result of `score`.

    Attributes:
        log_probs: float32 ``[B, S - start]``, log-probabilities in nats of tokens from ``start`` on; NaN for padding.
        logits: ``[B, S - start, V]``, the logits that predict these tokens; ``None`` unless requested.
    """

    log_probs: Tensor
    logits: Tensor | None


@torch.no_grad()
def score(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    start: int,
    logits: bool = False,
) -> Scores:
    """Score a text as if the model had generated it (teacher forcing): prefill the tokens before ``start`` densely and
    decode all later ones with the attached method. The log-probability of token ``start`` comes from the prefill, like
    that of the first token in ``generate``. Without an attached method, everything is dense.

    With methods that select, 32 tokens pass through the model at once, each with its own selection; with methods that
    evict or share blocks, and with `Rectify`, one. ``handle.stats()`` counts them like generated tokens, padding on
    the right too: for the density of a text, score it alone.

    Args:
        model: a model in eval mode, with or without an attached method.
        input_ids: ``[B, S]``.
        attention_mask: ``[B, S]``, 0 for padding, which may be on the left (before ``start``) and on the right (after
            it); ``None`` without padding.
        start: index of the first token to score, 1 to S - 1.
        logits: also return the logits, which take ``4 B (S - start) V`` bytes in float32.

    Raises:
        ValueError: if a shape, ``start`` or the mask is invalid.
        SeergateError: if the model is in training mode, or a text is so long that the frequencies of dynamic or
            LongRoPE scaling change.
    """
    check_eval_mode(model)
    start = index(start)
    real = _checked(input_ids, attention_mask, start)
    longest = int(real.sum(1).max())
    check_angles(text_config(model), longest, "a text")
    try:
        handle = handle_of(model)
    except SeergateError:  # the plain model
        handle = None
    one_by_one = handle and (not handle.passes.decodes_drafts or handle.correction or handle.storage.lossy)
    at_once = 1 if one_by_one else VERIFIED_TOKENS
    seen = real.clone()
    seen[:, start:] = True  # padding after a row's end is decoded, too, without effect on earlier tokens
    positions = (seen.cumsum(1) - 1).clamp(0, longest - 1)
    cache, padded = DynamicCache(config=model.config), not bool(seen.all())

    def read(begin: int, end: int) -> Tensor:
        output = model(
            input_ids=input_ids[:, begin:end],
            attention_mask=seen[:, :end].long() if padded else None,
            position_ids=positions[:, begin:end],
            **{CACHE: cache},
            use_cache=True,
            logits_to_keep=1 if begin == 0 else end - begin,
        )
        return output.logits[:, -1:] if begin == 0 else output.logits

    chunk_log_probs, kept = list[Tensor](), list[Tensor]()
    ends = [start, *range(start + at_once, input_ids.shape[1] - 1, at_once), input_ids.shape[1] - 1]
    for begin, end in zip([0, *ends], dict.fromkeys(ends), strict=False):
        with nullcontext() if begin == 0 or handle is None or one_by_one else handle.passes.forced("decode"):
            given = read(begin, end)
        first = start if begin == 0 else begin + 1
        targets = input_ids[:, first : first + given.shape[1], None]
        chunk_log_probs.append(given.float().log_softmax(-1).gather(-1, targets)[..., 0])
        kept += [given] if logits else []
    log_probs = torch.cat(chunk_log_probs, dim=1).masked_fill(~real[:, start:], torch.nan)
    return Scores(log_probs, torch.cat(kept, dim=1) if logits else None)


def _checked(input_ids: Tensor, attention_mask: Tensor | None, start: int) -> Tensor:
    """Check the arguments and return which tokens are real (not padding), bool ``[B, S]``."""
    shape = tuple(getattr(input_ids, "shape", ()))
    if len(shape) != 2 or not 1 <= start < shape[1]:
        raise ValueError(
            f"input_ids has the shape {shape} and start is {start}; it must be a tensor [B, S], start 1..S - 1"
        )
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}; it must be that of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    real = attention_mask.bool()
    steps = real.int().diff(dim=1)
    if not real[:, start - 1 : start + 1].all() or (steps[:, : start - 1] < 0).any() or (steps[:, start:] > 0).any():
        raise ValueError(
            f"attention_mask has padding inside of a row, or right at start, {start}; it must be on the left, before "
            "start, or on the right, behind it"
        )
    return real
