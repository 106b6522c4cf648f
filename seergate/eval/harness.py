"""A model with a method attached, for evaluation harnesses that are not seergate's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.eval.settings import MethodSpec
from seergate.models.attach import attach
from seergate.models.gate_bank import GateBank
from seergate.models.loading import load_base
from seergate.models.score import score
from seergate.pretrained import load_tokenizer


def attached_model(
    name: str, spec: MethodSpec, gates: str | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, GateBank | None]:
    """Load a model and gates from directories or Hub ids and attach a method; return the model, its tokenizer and the
    gates. ``options`` are those of `seergate.models.loading.load_base`: ``device``, ``dtype``, ...
    """
    bank = None if gates is None else GateBank.from_pretrained(gates)
    method = spec.method(bank)
    tokenizer = load_tokenizer(name)
    model = load_base(name, **options)
    attach(model, method, correction=spec.correction)
    return model, tokenizer, bank


Pair = tuple[Sequence[int], Sequence[int]]


def likelihoods(
    model: PreTrainedModel, pairs: Sequence[Pair], batch_size: int = 1
) -> Iterator[tuple[int, float, bool]]:
    """Log-probabilities of continuations under the attached method (`seergate.score`).

    Of a context, all tokens but the last are prefilled and the last is decoded, so that the method predicts every
    token of the continuation. (After a context of one token the prefill makes the first prediction; it is the same.)

    Args:
        model: from `attached_model`.
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
