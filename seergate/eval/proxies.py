"""Cheap proxies of accuracy, measured in minutes on reference generations.

* recall of teacher mass: the share of dense attention's probability on the tokens that a method read;
* next-token KL: KL(dense || method) of the next-token distributions in nats, mean and 99th percentile over tokens;
* perplexity of the reference's tokens, under the method and under dense attention;
* agreement: how often the most probable next token is the same.

A sweep measures every method on the same contexts: windows of dense attention's answers, prefilled up to the window
and then decoded with teacher forcing. Figures can therefore be compared between methods and budgets, even if a
method's own generations would have diverged; two were measured on the same contexts if their hashes ``contexts`` are
equal. Errors that accumulate over more than a window are not seen.

For a method that evicts or shares blocks, the last `REPLAYED_TOKENS` tokens of the answer before the window are
decoded one by one as well, so that it evicts and shares as in generation; only what precedes them is prefilled. That
takes longer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.eval.generation.batch import Batch
from seergate.eval.sampling import check_finite
from seergate.eval.tasks.prompts import encode
from seergate.eval.tasks.task import digest_of
from seergate.methods import CompressingMethod, SelectingMethod
from seergate.models.attach import Handle

WINDOWS, WINDOW_TOKENS = 16, 32
REPLAYED_TOKENS = 1024
ROWS = 4
"""Windows that are decoded together unless another number is known to fit (large vocabularies have large logits)."""


@dataclass(frozen=True)
class Window:
    """A window of a reference's answer.

    Attributes:
        context: tokens before the window, beginning with the prompt.
        tokens: tokens of the window, and one more that is only predicted.
        prompt: number of prompt tokens in the context.
    """

    context: list[int]
    tokens: list[int]
    prompt: int

    def forced(self, most: int) -> int:
        """Number of tokens of the answer before the window, at most ``most``."""
        return min(most, len(self.context) - self.prompt)


def contexts_hash(windows: Sequence[Window]) -> str:
    """Hash (`digest_of`) of windows."""
    return digest_of([[[window.context, window.tokens, window.prompt] for window in windows]])


def windows_of(tokenizer: PreTrainedTokenizerBase, reference: Sequence[dict[str, Any]]) -> list[Window]:
    """Windows of the first reference samples, which together cover all positions evenly: window ``i`` of ``n`` begins
    a fraction ``(i + 1/2) / n`` into the ``i``-th answer. If an answer is shorter than a window, the window is the end
    of prompt and answer together; samples that are shorter even so are left out. The first sample of every problem
    comes before the second of any.
    """
    traces = []
    for sample in sorted(reference, key=lambda sample: sample.get("sample_idx", 0)):
        prompt = encode(tokenizer, sample["prompt"])
        tokens = list(tokenizer(sample["completion"], add_special_tokens=False)["input_ids"])
        if len(tokens) <= WINDOW_TOKENS + 1:
            cut = max(0, len(prompt) + len(tokens) - WINDOW_TOKENS - 1)
            prompt, tokens = prompt[:cut], (prompt + tokens)[cut:]
        if prompt:
            traces.append((prompt, tokens))
        if len(traces) == WINDOWS:
            break
    windows = []
    for i, (prompt, tokens) in enumerate(traces):
        start = int((i + 0.5) / len(traces) * (len(tokens) - WINDOW_TOKENS - 1))
        windows.append(Window(prompt + tokens[:start], tokens[start : start + WINDOW_TOKENS + 1], len(prompt)))
    return windows


@torch.inference_mode()
def measure_proxies(
    handle: Handle, tokenizer: PreTrainedTokenizerBase, reference: Sequence[dict[str, Any]], rows: int | None = None
) -> dict[str, Any] | None:
    """Decode windows of reference generations (`windows_of`) under the attached method and compare with dense
    attention.

    Args:
        rows: windows that are decoded together; ``None`` means `ROWS`.

    Returns:
        ``next_token_kl``, ``next_token_kl_p99``, ``perplexity``, ``dense_perplexity``, ``agreement``; ``recall``,
        ``recall_per_layer`` and ``layers`` (``None`` for methods that do not select blocks: dense reads everything,
        and the attention to evicted tokens is unknown); ``windows``, ``tokens_per_window`` and ``contexts``, their
        hash. ``None``, with a warning, if every prompt and answer together are shorter than a window.
    """
    windows = windows_of(tokenizer, reference)
    if not windows:
        warnings.warn("no recall was measured: prompts and answers are shorter than a window", stacklevel=2)
        return None
    replayed = REPLAYED_TOKENS if handle.storage.lossy or isinstance(handle.method, CompressingMethod) else 0
    rows = rows or ROWS
    before, handle.measure_recall = handle.measure_recall, isinstance(handle.method, SelectingMethod)
    handle.reset_stats()
    model, parts = handle.model, list[Tensor]()
    try:
        for first in range(0, len(windows), rows):
            for window, sparse in _decoded(model, windows[first : first + rows], replayed):
                ids = torch.tensor([window.context + window.tokens], device=model.get_input_embeddings().weight.device)
                dense, targets = dense_logits(model, ids, WINDOW_TOKENS), ids[0, -WINDOW_TOKENS:].to(sparse.device)
                parts.append(compare(dense, sparse, targets))
        stats = handle.stats()
    finally:
        handle.measure_recall = before
        handle.reset_stats()
    each = torch.cat(parts, dim=1)
    kl, loss, dense_loss, agreement = each.mean(1).tolist()
    per_layer = stats.get("recall_per_layer")
    recalls = [value for value in per_layer or [] if value is not None]
    return {
        "next_token_kl": kl,
        "next_token_kl_p99": float(each[0].quantile(0.99)),
        "perplexity": math.exp(loss),
        "dense_perplexity": math.exp(dense_loss),
        "agreement": agreement,
        "recall": sum(recalls) / len(recalls) if recalls else None,
        "recall_per_layer": per_layer,
        "layers": stats["layers"],
        "windows": len(windows),
        "tokens_per_window": WINDOW_TOKENS,
        "contexts": contexts_hash(windows),
    }


def _decoded(model: PreTrainedModel, windows: list[Window], replayed: int) -> list[tuple[Window, Tensor]]:
    """Each window with the method's logits ``[WINDOW_TOKENS, V]`` after all of its tokens but the last. At most
    ``replayed`` tokens of the answer before a window are decoded one by one too.
    """
    waiting = sorted(windows, key=lambda window: -window.forced(replayed))
    batch, running = Batch(model), list[Window]()
    for left in range(waiting[0].forced(replayed), -1, -1):  # steps left until all rows reach their windows
        arriving = [window for window in waiting if window.forced(replayed) == left]
        if arriving and not batch.joinable:  # rows cannot join later: decode one window after the other
            return [pair for window in windows for pair in _decoded(model, [window], replayed)]
        if arriving:
            batch.add([window.context[: len(window.context) - left] for window in arriving])
            running += arriving
        if left:
            batch.step([window.context[-left] for window in running])
    steps = [batch.step([window.tokens[i] for window in running]) for i in range(WINDOW_TOKENS)]
    return list(zip(running, torch.stack(steps, dim=1), strict=True))


def dense_logits(model: PreTrainedModel, ids: Tensor, count: int) -> Tensor:
    """Dense attention's logits ``[count, V]`` of the last tokens of a text ``[1, S]``, from a pass without a cache."""
    return model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=count).logits[0]


def compare(dense: Tensor, sparse: Tensor, targets: Tensor) -> Tensor:
    """For each token: KL(dense || method) in nats, the method's loss, dense attention's loss, and whether the most
    probable next token is the same.

    Args:
        dense, sparse: logits ``[S, V]`` under dense attention and under the method.
        targets: the tokens that follow, ``[S]``.

    Returns:
        float64 ``[4, S]``, on the CPU.

    Raises:
        SeergateError: if one of the first three is not finite.
    """
    p, q = dense.float().log_softmax(-1), sparse.float().log_softmax(-1)
    # clamped per position: KL is not negative; values below zero are rounding
    kl = (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0).sum(-1).clamp(min=0).double()
    loss, dense_loss = (-x.gather(-1, targets[:, None])[:, 0].double() for x in (q, p))
    check_finite(torch.stack((kl, loss, dense_loss)))
    agreement = (p.argmax(-1) == q.argmax(-1)).double()
    return torch.stack((kl, loss, dense_loss, agreement)).cpu()
