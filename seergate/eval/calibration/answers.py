"""Answers of a model to the prompts that a calibration measures on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from transformers import PreTrainedModel

from seergate.eval.generation.batch import Batch
from seergate.eval.sampling import SampledRow, Sampling, TokenChooser


def answers(
    model: PreTrainedModel,
    prompts: Iterable[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None,
    ends: Collection[int],
) -> Iterator[Batch]:
    """Answer prompts one by one with the attached method; yield each finished answer's batch of one row."""
    choose = TokenChooser(sampling or Sampling())
    for number, ids in enumerate(prompts):
        row, batch = SampledRow(list(ids), number), Batch(model)
        logits = batch.add([ids])
        while len(row.tokens) < max_new_tokens:
            row.tokens += choose(logits, [row])
            if row.tokens[-1] in ends or len(row.tokens) == max_new_tokens:
                break
            logits = batch.step(row.tokens[-1:])
        yield batch
