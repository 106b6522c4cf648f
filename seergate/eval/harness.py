"""Scores of given continuations under a method, for evaluation harnesses that are not seergate's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from transformers import PreTrainedModel

from seergate.models.score import score

Pair = tuple[Sequence[int], Sequence[int]]


def likelihoods(
    model: PreTrainedModel, pairs: Sequence[Pair], batch_size: int = 1
) -> Iterator[tuple[int, float, bool]]:
    """Log-probabilities of continuations under the attached method (`seergate.score`).

    Of a context, all tokens but the last are prefilled and the last is decoded, so that the method predicts every
    token of the continuation. (After a context of one token the prefill makes the first prediction; it is the same.)

    Args:
        model: with a method attached.
        pairs: token ids of contexts and of their continuations, none of them empty.
        batch_size: how many are scored together.

    Yields:
        The index of a pair, the log-probability of its continuation in nats, and whether every token of it is the most
        probable one; longest pairs first.
    """

    def order(number: int) -> tuple[bool, int]:
        return len(pairs[number][0]) == 1, -sum(map(len, pairs[number]))

    for single, group in groupby(sorted(range(len(pairs)), key=order), key=lambda number: order(number)[0]):
        numbers = list(group)
        for first in range(0, len(numbers), batch_size):
            chosen = numbers[first : first + batch_size]
            before, behind = (max(len(pairs[number][side]) for number in chosen) for side in (0, 1))
            ids = torch.zeros(len(chosen), before + behind, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, number in enumerate(chosen):
                context, continuation = pairs[number]
                place = slice(before - len(context), before + len(continuation))
                ids[row, place], mask[row, place] = torch.tensor([*context, *continuation]), 1
            ids, mask = ids.to(model.device), mask.to(model.device)
            scores = score(model, ids, mask, start=1 if single else before - 1, logits=True)
            assert scores.logits is not None
            best = scores.logits[:, -behind:].argmax(-1) == ids[:, -behind:]
            for row, number in enumerate(chosen):
                length = len(pairs[number][1])
                log_probs = scores.log_probs[row, -behind:][:length].double()
                yield number, float(log_probs.sum()), bool(best[row, :length].all())
