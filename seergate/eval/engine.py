"""Generation: stock `model.generate` on left-padded batches, longest prompts first, handed over batch by batch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval.sampling import ForcedTokens, Sampling, SeededSampling


@dataclass(frozen=True)
class Request:
    """One sample to be generated.

    Attributes:
        key: whatever identifies it to the caller.
        prompt: text, special tokens included.
        seed: of its own random numbers.
    """

    key: Any
    prompt: str
    seed: int = 0


@dataclass(frozen=True)
class Generation:
    """A finished sample.

    Attributes:
        request: what was asked.
        completion: the generated text, without end and padding tokens.
        token_ids: the generated tokens, the end token included if there is one.
        n_prompt_tokens: length of the prompt.
        finish_reason: ``"stop"`` (the end token came) or ``"length"`` (the limit came first).
        seconds: its share of the batch's wall-clock time.
    """

    request: Request
    completion: str
    token_ids: tuple[int, ...]
    n_prompt_tokens: int
    finish_reason: str
    seconds: float

    @property
    def n_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> str:
    """The prompt for a conversation, by the model's chat template.

    Raises:
        SeergateError: if the tokenizer has none.
    """
    if not tokenizer.chat_template:
        raise SeergateError("this model's tokenizer has no chat template, so the task's messages cannot be put to it")
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Request],
    *,
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling,
    on_finished: Callable[[list[Generation]], None],
) -> None:
    """Generate all samples.

    Args:
        model: in eval mode; may have a method attached.
        tokenizer: the model's.
        prompts: what to generate.
        batch_size: samples that run together.
        max_new_tokens: limit for each.
        sampling: how tokens are chosen.
        on_finished: gets each batch's samples as soon as it is done, so that an interruption loses one batch at most.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be a positive number")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be a positive number")
    encoded = [(request, encode(tokenizer, request.prompt)) for request in prompts]
    encoded.sort(key=lambda pair: -len(pair[1]))  # stable; what needs most memory runs first
    for start in range(0, len(encoded), batch_size):
        batch = encoded[start : start + batch_size]
        rows, seeds = [ids for _, ids in batch], [request.seed for request, _ in batch]
        began = time.perf_counter()
        tokens = run_batch(model, rows, max_new_tokens, sampling, seeds, pad_id(model, tokenizer))
        seconds = (time.perf_counter() - began) / len(batch)
        ends = end_ids(model, tokenizer)
        finished = []
        for (request, ids), row in zip(batch, tokens.tolist(), strict=True):
            stop = next((i for i, token in enumerate(row) if token in ends), None)
            kept = row if stop is None else row[: stop + 1]
            finished.append(
                Generation(
                    request=request,
                    completion=str(tokenizer.decode(kept if stop is None else kept[:-1], skip_special_tokens=False)),
                    token_ids=tuple(kept),
                    n_prompt_tokens=len(ids),
                    finish_reason="length" if stop is None else "stop",
                    seconds=seconds,
                )
            )
        on_finished(finished)


@torch.inference_mode()
def run_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    pad: int,
    forced: Tensor | None = None,
) -> Tensor:
    """The new tokens of one batch, ``[B, n]`` on the CPU, padded on the right.

    Args:
        model: see `generate`.
        prompts: token ids of each prompt.
        max_new_tokens: see `generate`.
        sampling: see `generate`.
        seeds: one per prompt.
        pad: id of the padding token.
        forced: ``[B, max_new_tokens]`` tokens to be fed whatever the model says.
    """
    width = max(map(len, prompts))
    device = model.get_input_embeddings().weight.device
    input_ids = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    processors = LogitsProcessorList()
    if forced is not None:
        processors.append(ForcedTokens(forced, width))
    elif not sampling.greedy:
        processors.append(SeededSampling(sampling, list(seeds), device))
    config = copy.deepcopy(model.generation_config)
    # Drawing happens in SeededSampling; the model's own sampling parameters would only be warned about.
    config.update(do_sample=False, num_beams=1, temperature=None, top_k=None, top_p=None, min_p=None, typical_p=None)
    config.update(max_new_tokens=max_new_tokens, max_length=None, min_length=None, pad_token_id=pad)
    config.update(return_dict_in_generate=False, output_scores=False, output_attentions=False)
    if forced is not None:
        config.update(eos_token_id=None)
    output = model.generate(
        input_ids=input_ids, attention_mask=mask, generation_config=config, logits_processor=processors
    )
    return output[:, width:].cpu()


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt that already holds its special tokens."""
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    if not ids:
        raise SeergateError("a prompt is empty; there is nothing to continue")
    return ids


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end a generation."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return set(ids) if isinstance(ids, (list, tuple)) else {ids} - {None}


def pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """A padding token; any will do, since it is masked."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return int(min(end_ids(model, tokenizer), default=0))
