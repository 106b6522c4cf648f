"""Recall of teacher mass: what share of dense attention's probability fell on the tokens that a method read.

Every method is measured on the same contexts: windows of one fixed set of reference generations (the dense model's
own, where there are any), fed to it token by token. So recalls can be compared between methods and budgets even where
a method would have lost its way, and the measurement is short enough to accompany every run.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.eval.engine import encode, pad_id, run_batch
from seergate.eval.sampling import Sampling
from seergate.host import Handle

WINDOWS, WINDOW_TOKENS = 16, 32


def measure_recall(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, handle: Handle, reference: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Decode windows of reference generations under the attached method and look at what it reads.

    Window ``i`` of ``n`` begins a fraction ``(i + 1/2) / n`` into the ``i``-th reference, so that together they cover
    all positions evenly.

    Args:
        model: with the method attached.
        tokenizer: the model's.
        handle: of the method.
        reference: samples (``prompt``, ``completion``); the first ones that are long enough are used.

    Returns:
        ``mean``, ``per_layer``, ``layers`` (their indices), ``windows`` and ``tokens_per_window``; ``None`` if no
        reference is longer than a window.
    """
    traces = []
    for sample in reference:
        prompt, completion = (
            encode(tokenizer, sample["prompt"]),
            tokenizer(sample["completion"], add_special_tokens=False),
        )
        tokens = list(completion["input_ids"])
        if len(tokens) > WINDOW_TOKENS:
            traces.append((prompt, tokens))
        if len(traces) == WINDOWS:
            break
    if not traces:
        return None
    prompts, forced = [], []
    for i, (prompt, tokens) in enumerate(traces):
        start = int((i + 0.5) / len(traces) * (len(tokens) - WINDOW_TOKENS))
        prompts.append(prompt + tokens[:start])
        forced.append(tokens[start : start + WINDOW_TOKENS])
    before, handle.measure_recall = handle.measure_recall, True
    handle.reset_stats()
    try:
        run_batch(
            model,
            prompts,
            WINDOW_TOKENS,
            Sampling(),
            [0] * len(prompts),
            pad_id(model, tokenizer),
            forced=torch.tensor(forced),
        )
        stats = handle.stats()
    finally:
        handle.measure_recall = before
        handle.reset_stats()
    per_layer = stats["recall_per_layer"]
    measured = [value for value in per_layer if value is not None]
    return {
        "mean": sum(measured) / len(measured),
        "per_layer": per_layer,
        "layers": stats["layers"],
        "windows": len(traces),
        "tokens_per_window": WINDOW_TOKENS,
    }
