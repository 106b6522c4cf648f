"""Choice of the layers that stay dense (`DecodeConfig.dense_layers`): those whose sparsity damages answers most.

A few layers can lose the facts of a text while the others lose nothing (docs/recipe_study.md, "Where facts are lost").
Each prompt is prefilled once with dense attention. Its right answer is then decoded from that cache with teacher
forcing, once per choice of dense layers, and the next-token distributions are compared with dense attention's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from seergate.cache.forward import CACHE
from seergate.cache.layer import GatedLayer
from seergate.checks import check_count
from seergate.errors import SeergateError
from seergate.eval.proxies import compare
from seergate.eval.tasks.prompts import encode, prompt_text, reply_ids
from seergate.eval.tasks.task import Task
from seergate.methods.selecting import SelectingMethod
from seergate.models import families
from seergate.models.attach import attached

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its continuation."""


def answered(tokenizer: PreTrainedTokenizerBase, task: Task) -> list[Text]:
    """The prompts and right answers of a task; a `SeergateError` if an answer has fewer than two tokens."""
    texts = list[Text]()
    for problem in task.bound(tokenizer).problems():
        prompt = prompt_text(tokenizer, problem)
        reply = reply_ids(tokenizer, prompt, problem.reply) if problem.reply else ()
        if len(reply) < 2:  # the first token follows from the prompt, which is read densely
            raise SeergateError(
                f"the problem {problem.problem_id} of the task {task.name!r} has no right answer of two tokens or "
                "more to compare on; take variable_tracking, whose right answers are several words"
            )
        texts.append((encode(tokenizer, prompt), reply))
    return texts


@torch.no_grad()
def distances(
    model: PreTrainedModel, method: SelectingMethod, texts: Sequence[Text], plans: Sequence[tuple[int, ...]]
) -> Tensor:
    """Distance from dense attention for several choices (``plans``) of dense layers.

    Args:
        model: in eval mode, nothing attached.
        method: a method that selects blocks; its own ``dense_layers`` are ignored.
        texts: prompts, and the continuations to decode after them.

    Returns:
        float64 ``[len(plans), len(texts)]``: KL(dense || method) of the next token in nats, mean over the decoded
        tokens.
    """
    method = replace(method, dense_layers=())
    kl = torch.zeros(len(plans), len(texts), dtype=torch.float64)
    for column, (prompt, reply) in enumerate(texts):
        cache = DynamicCache(config=model.config)
        prompt_ids, given = (torch.tensor([list(ids)], device=model.device) for ids in (prompt, reply[:-1]))
        targets = torch.tensor(list(reply[1:]), device=model.device)
        with attached(model, method):
            model(input_ids=prompt_ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        dense = _decoded(model, method, cache, given, "dense")
        for row, layers in enumerate(plans):
            sparse = _decoded(model, replace(method, dense_layers=layers), cache, given, "decode")
            kl[row, column] = compare(dense, sparse, targets)[0].mean()
    return kl


def _decoded(
    model: PreTrainedModel, method: SelectingMethod, cache: Cache, ids: Tensor, mode: Literal["dense", "decode"]
) -> Tensor:
    """Logits ``[S, V]`` of the tokens ``ids [1, S]`` after those in a cache, which is not modified."""
    again = copy.deepcopy(cache)
    with attached(model, method) as handle, handle.passes.forced(mode):
        for layer in again.layers:
            if isinstance(layer, GatedLayer):  # its state does not depend on which layers are dense
                layer.method = handle.method
        return model(input_ids=ids, **{CACHE: again}, use_cache=True).logits[0]


def find_dense_layers(
    model: PreTrainedModel,
    method: SelectingMethod,
    texts: Sequence[Text],
    count: int,
    report: Callable[[tuple[int, ...], Tensor], object] = lambda plan, kl: None,
) -> tuple[int, ...]:
    """Choose greedily the layers that stay dense: each choice brings the method as close to dense as one layer can.

    Args:
        model, method, texts: see `distances`.
        count: number of layers, from 1 to the number of layers in which the method selects.
        report: called with every choice that was tried and its distance on each text, ``[len(texts)]``.

    Raises:
        SeergateError: if the method reads all of every text, so that all choices are equal, or if it has anchors; if a
            text is longer than the model allows.
    """
    method = replace(method, dense_layers=())
    if method.anchors:
        raise SeergateError(
            f"the method has anchors {list(method.anchors)}; find dense layers with gates for every layer first"
        )
    layers = [layer for layer, _ in families.full_attention_modules(model) if method.selects_in(layer)]
    check_count("count", count, 1, len(layers))
    longest = max(len(prompt) + len(reply) - 1 for prompt, reply in texts)
    families.check_length(families.text_config(model), longest, "the longest text")
    if method.reads_all(longest):
        raise SeergateError(
            f"the longest text has {longest} tokens, all of which {method.name} ({method.nominal}) reads; give longer "
            "texts, or a smaller budget"
        )
    chosen = tuple[int, ...]()
    for _ in range(count):
        plans = [tuple(sorted((*chosen, layer))) for layer in layers if layer not in chosen]
        tried = [*([] if chosen else [()]), *plans]
        measured = distances(model, method, texts, tried)
        for plan, kl in zip(tried, measured, strict=True):
            report(plan, kl)
        chosen = plans[int(measured[-len(plans) :].mean(1).argmin())]
    return chosen
