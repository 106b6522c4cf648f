"""Lossless decoding: the sparse model drafts, one dense pass verifies (self-speculation, as in SparseSpec).

An attached model keeps the stock `generate`, but greedy decoding and sampling use the loop of this module. All other
forward passes and ways of generating are dense, so no emitted token depends on the method.

Drafts and the dense model share one cache. The keys and values of drafted tokens come from sparse hidden states. They
are cropped before the verification, which stores dense ones in their place and passes them to the method. After every
cycle, cache and method state are as if the accepted tokens had been decoded densely.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    GenerationMode,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GENERATION_MODES_MAPPING

from seergate.cache.argument import CACHE
from seergate.cache.batching import layers_without_return
from seergate.cache.forward import ForwardModes
from seergate.cache.layer import GatedLayer
from seergate.config import Lossless
from seergate.decode.speculation import VERIFYING_COST, DraftLength, accept_greedy, accept_sampled, cycle_cost
from seergate.methods.base import Method
from seergate.methods.selecting import SelectingMethod
from seergate.stats import token_bytes

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

NOT_OURS = (
    "custom_generate",
    "assistant_model",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "num_beam_groups",
)
"""Arguments of `generate` that select another decoding loop. Such calls are passed on unchanged."""

EXPERTS = ("num_experts", "num_local_experts")
"""Configuration fields that give the number of experts per layer."""

GUESSED_SHARE = 0.1
"""Share of keys and values that a threshold or top-p is assumed to read, until drafts have measured it."""


class LosslessDecoding:
    """Lossless decoding of one attached model: replaces ``generate``, makes all passes but drafts dense, and counts.

    ``kv_totals`` returns the bytes that decode steps have read so far, and those that dense attention would have read.
    """

    def __init__(
        self,
        options: Lossless,
        model: PreTrainedModel,
        method: Method,
        passes: ForwardModes,
        kv_totals: Callable[[], tuple[float, float]],
    ) -> None:
        assert isinstance(method, SelectingMethod)
        if options.draft_tokens is not None and options.draft_tokens > method.block_size:
            raise ValueError(
                f"draft_tokens is {options.draft_tokens}; with block_size {method.block_size} it must be at most that"
            )
        self.options, self.model, self.method, self.passes = options, model, method, passes
        self.kv_totals = kv_totals
        self.weight_bytes = weights_read(model)
        self.reset()
        self.install()

    def install(self) -> None:
        """Replace the model's ``generate``."""
        self.passes.phase = "verify"
        self.theirs = vars(self.model).get("generate")  # set on the instance by other code
        self.model.generate = self  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        """Restore the model's own ``generate``."""
        vars(self.model).pop("generate", None)
        if self.theirs is not None:
            self.model.generate = self.theirs  # type: ignore[method-assign]
        self.passes.phase = None

    def reset(self) -> None:
        """Set all counters to zero."""
        self.cycles = self.plain_steps = 0
        self.drafted = 0  # drafted tokens per row
        self.tried = self.accepted = 0  # drafted tokens, all rows together
        self.steps = 0  # emitted tokens per row
        self.bytes_read = self.bytes_dense = 0.0  # weights, keys and values
        self.cost = 0.0  # bytes read, plus the cost of verifying several tokens
        self.draft_seconds = self.verify_seconds = 0.0

    def stats(self) -> dict[str, Any]:
        """Return the figures so far.

        Returns:
            Under ``"lossless"``: ``cycles`` of drafting and verifying, and ``plain_steps`` without a draft;
            ``draft_tokens`` (mean per cycle); ``acceptance`` (accepted share of the drafted tokens whose predecessors
            were accepted); ``tokens_per_dense_pass`` (per row); ``bytes_per_token`` and ``dense_bytes_per_token``
            (weights, keys and values read per token of the batch, here and in dense decoding); ``expected_speedup``
            (dense bytes over the cost model's); ``draft_seconds`` and ``verify_seconds``.
        """
        passes = self.cycles + self.plain_steps
        return {
            "lossless": {
                "cycles": self.cycles,
                "plain_steps": self.plain_steps,
                "draft_tokens": self.drafted / self.cycles if self.cycles else 0.0,
                "acceptance": self.accepted / self.tried if self.tried else None,
                "tokens_per_dense_pass": self.steps / passes if passes else None,
                "bytes_per_token": self.bytes_read / self.steps if passes else None,
                "dense_bytes_per_token": self.bytes_dense / self.steps if passes else None,
                "expected_speedup": self.bytes_dense / self.cost if passes else None,
                "draft_seconds": self.draft_seconds,
                "verify_seconds": self.verify_seconds,
            }
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stock ``generate``, with this module's loop for greedy decoding and sampling."""
        model = self.model
        kwargs |= zip(list(signature(type(model).generate).parameters)[1:], args, strict=False)
        if all(kwargs.get(name) in (None, 1) for name in NOT_OURS):  # one beam group is no group
            streamer, synced = kwargs.get("streamer"), bool(kwargs.get("synced_gpus"))  # not passed to custom loops
            kwargs["custom_generate"] = partial(self.decode, streamer=streamer, synced_gpus=synced)
            _take_stop_strings(model, kwargs)
        if self.theirs is not None:
            return self.theirs(**kwargs)
        return type(model).generate(model, **kwargs)

    def decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        streamer: BaseStreamer | None,
        synced_gpus: bool,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Decoding loop that `generate` calls instead of its own; same arguments and result as transformers' loops."""
        mode = generation_config.get_generation_mode()
        can_draft = (
            mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and model_kwargs.get("use_cache")
            and not layers_without_return(model_kwargs.get(CACHE))
            and not synced_gpus  # processes would need different numbers of forward passes
            and not (generation_config.output_attentions or generation_config.output_hidden_states)
            and not any(isinstance(p, ONCE_A_TOKEN) for p in logits_processor)
        )
        if not can_draft:
            stock = getattr(type(model), GENERATION_MODES_MAPPING[mode])
            rest = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
            return stock(model, input_ids, logits_processor, stopping_criteria, generation_config, **rest)
        run = _Run(self, model, logits_processor, stopping_criteria, generation_config, streamer)
        return run(input_ids, model_kwargs)


ONCE_A_TOKEN = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
"""Processors that must run exactly once per token: one runs the model itself, one keeps a state."""


def _take_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Turn ``stop_strings`` into a stopping criterion: `generate` does not pass ``tokenizer`` to a custom loop."""
    tokenizer, config = kwargs.get("tokenizer"), kwargs.get("generation_config") or model.generation_config
    strings = kwargs.get("stop_strings") or getattr(config, "stop_strings", None)
    if tokenizer is None or strings is None:
        return  # `generate` raises an error that names the missing one
    del kwargs["tokenizer"]
    kwargs.pop("stop_strings", None)
    if getattr(config, "stop_strings", None) is not None:
        config = kwargs["generation_config"] = copy.deepcopy(config)
        config.stop_strings = None
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])


class _Run:
    """One call of `generate`."""

    def __init__(
        self,
        lossless: LosslessDecoding,
        model: Any,
        processor: LogitsProcessorList,
        stopping: StoppingCriteriaList,
        config: Any,
        streamer: BaseStreamer | None,
    ) -> None:
        self.lossless, self.model, self.config, self.streamer = lossless, model, config, streamer
        self.processor, self.stopping = processor, stopping
        self.has_end = any(hasattr(criterion, "eos_token_id") for criterion in stopping)
        self.pad = config._pad_token_tensor
        self.scores: list[Tensor] | None = [] if config.return_dict_in_generate and config.output_scores else None
        self.logits: list[Tensor] | None = [] if config.return_dict_in_generate and config.output_logits else None
        per_token = VERIFYING_COST.get(model.device.type, 0.0)
        self.length = DraftLength(lossless.options.draft_tokens, lossless.method.block_size, per_token)
        self.more_read = 1.0  # share that the last drafts read, over the expected one

    def __call__(self, ids: Tensor, model_kwargs: dict[str, Any]) -> GenerateDecoderOnlyOutput | Tensor:
        self.ids, self.kwargs = ids, model_kwargs
        self.unfinished = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
        if self.pad is not None:
            self.pad = self.pad.to(ids.device)
        outputs = self.model._prefill(ids, self.config, model_kwargs, is_first_iteration=not self.config.is_assistant)
        self._advance(outputs, 1)
        self.cache: Cache = self.kwargs[CACHE]
        self.lossless.passes.drafting(self, self.cache, int(self.cache.get_seq_length()))
        self.records_past = hasattr(self.cache, "activate_past_recording") and any(
            hasattr(layer, "activate_past_recording") for layer in self.cache.layers
        )
        if self.records_past:
            self.cache.activate_past_recording()
        raw = outputs.logits[:, -1:].to(copy=True, dtype=torch.float32, device=ids.device)
        del outputs  # the logits of a prompt may be large
        scores = self._processed(ids, raw)
        self._emit(self._draw(scores[:, -1])[:, None], 1, raw, scores)
        while self.unfinished.any():
            self._cycle()
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,
            scores=None if self.scores is None else tuple(self.scores),
            logits=None if self.logits is None else tuple(self.logits),
            **{CACHE: self.cache},
        )

    def _cycle(self) -> None:
        """Draft, verify, and keep the accepted tokens."""
        counted = self.lossless
        selectable, fixed = cache_bytes(self.cache)
        fixed += counted.weight_bytes
        dense_bytes = fixed + selectable
        expected = self._expected_share()
        length = self.length.choose(dense_bytes, fixed + selectable * min(1.0, expected * self.more_read))
        room = self.config.max_length - self.ids.shape[1] - 1
        length = max(0, min(length, room))
        held, before, began = int(self.cache.get_seq_length()), self.ids.shape[1], time.perf_counter()
        try:
            outputs, per_row, drafted, share = self._draft_and_verify(length, held)
        finally:  # after an error too, the cache must hold emitted tokens only
            emitted = self.ids.shape[1] - before
            self._crop_to(held + emitted)
        self._advance(outputs, emitted)
        counted.draft_seconds += drafted - began
        counted.verify_seconds += time.perf_counter() - drafted
        counted.cycles += length > 0
        counted.plain_steps += length == 0
        counted.steps += emitted
        draft_bytes = fixed + selectable * share
        counted.bytes_read += length * draft_bytes + dense_bytes
        counted.cost += cycle_cost(length, dense_bytes, draft_bytes, self.length.per_token)
        counted.bytes_dense += emitted * dense_bytes
        if length:
            self.more_read = share / expected
            counted.drafted += length
            counted.accepted += sum(per_row)
            counted.tried += sum(min(length, found + 1) for found in per_row)
            self.length.verified(length, min(per_row))

    def _draft_and_verify(self, length: int, held: int) -> tuple[Any, list[int], float, float]:
        """Draft ``length`` tokens on a cache of ``held`` tokens; emit the accepted ones and the token after them.

        Returns:
            The output of the dense pass; the number of accepted tokens per row; the time at which drafting ended; and
            the share of keys and values that a drafting pass read.
        """
        ids, kwargs, drafter, share = self._draft(length, held)
        drafted = time.perf_counter()
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=length + 1, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = length + 1
        outputs = self.model(**inputs, return_dict=True)
        raw = outputs.logits[:, -length - 1 :].to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self._processed(ids, raw)
        guesses = ids[:, ids.shape[1] - length :]
        if self.config.do_sample:
            target = scores.softmax(-1)
            tokens, accepted = accept_sampled(guesses, target[:, :0] if drafter is None else drafter, target)
        else:
            tokens, accepted = accept_greedy(guesses, scores.argmax(-1))
        # All rows continue from the same slot, so the row with the fewest accepted tokens decides. Accepted tokens of
        # other rows beyond it are dropped and drawn again. Finished rows emit padding; without an end token they
        # continue, as they do in the stock loop.
        per_row = (accepted[self.unfinished] if self.has_end else accepted).tolist()
        self._emit(tokens, min(per_row) + 1, raw, scores)
        return outputs, per_row, drafted, share

    def _expected_share(self) -> float:
        """Share of keys and values that a draft is expected to read: from the budget, or `GUESSED_SHARE`."""
        lengths = [max(layer.rows.resident) for layer in self.cache.layers if isinstance(layer, GatedLayer)]
        method, longest = self.lossless.method, max(lengths, default=1)
        budget, size = method.block_budget, method.block_size
        return GUESSED_SHARE if budget is None else min(1.0, size * budget.read(-(-longest // size)) / longest)

    def _draft(self, length: int, held: int) -> tuple[Tensor, dict[str, Any], Tensor | None, float]:
        """Decode ``length`` tokens sparsely, and crop their keys and values from the cache.

        Returns:
            The tokens so far with the drafted ones; the model's keyword arguments after them; the sampling
            probabilities ``[B, N, V]``, ``None`` without sampling; and the share of keys and values that a pass read.
        """
        ids, kwargs, probabilities = self.ids, dict(self.kwargs), list[Tensor]()
        before = self.lossless.kv_totals() if length else (0.0, 0.0)
        with self.lossless.passes.forced("decode"):
            for _ in range(length):
                inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
                outputs = self.model(**inputs, return_dict=True)
                kwargs = self.model._update_model_kwargs_for_generation(outputs, kwargs)
                raw = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=ids.device)
                scores = self.processor(ids, raw)
                if self.config.do_sample:
                    probabilities.append(scores.softmax(-1))
                ids = torch.cat((ids, self._or_pad(self._draw(scores))[:, None]), 1)
        share = 1.0
        if length:
            self._crop_to(held)
            read, seen = (now - then for now, then in zip(self.lossless.kv_totals(), before, strict=True))
            share = read / seen
        return ids, kwargs, torch.stack(probabilities, 1) if probabilities else None, share

    def _processed(self, ids: Tensor, raw_BMV: Tensor) -> Tensor:
        """Logits of each position after the logits processors, which see the tokens before it: ``[B, M, V]``."""
        first = ids.shape[1] - raw_BMV.shape[1] + 1
        return torch.stack(
            [self.processor(ids[:, : first + i], raw_BMV[:, i].clone()) for i in range(raw_BMV.shape[1])], 1
        )

    def _draw(self, scores_BV: Tensor) -> Tensor:
        """The next token of each row ``[B]``."""
        if self.config.do_sample:
            return torch.multinomial(scores_BV.softmax(-1), 1)[:, 0]
        return scores_BV.argmax(-1)

    def _or_pad(self, tokens_B: Tensor) -> Tensor:
        return torch.where(self.unfinished, tokens_B, self.pad) if self.has_end else tokens_B

    def _emit(self, tokens_BM: Tensor, count: int, raw_BMV: Tensor, scores_BMV: Tensor) -> None:
        """Emit the first ``count`` tokens, one by one, until all rows have ended."""
        for i in range(count):
            token = self._or_pad(tokens_BM[:, i])
            self.ids = torch.cat((self.ids, token[:, None]), 1)
            if self.scores is not None:
                self.scores.append(scores_BMV[:, i])
            if self.logits is not None:
                self.logits.append(raw_BMV[:, i])
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            scores = None if self.scores is None else tuple(self.scores)
            self.unfinished = self.unfinished & ~self.stopping(self.ids, scores)  # type: ignore[arg-type]
            if not self.unfinished.any():
                return

    def _advance(self, outputs: Any, tokens: int) -> None:
        self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs, num_new_tokens=tokens)

    def _crop_to(self, slots: int) -> None:
        """Crop every layer to ``slots`` slots. After an error, layers may differ in length."""
        for layer in self.cache.layers:
            beyond = max(0, int(layer.get_seq_length()) - slots)
            if beyond or self.records_past:  # layers that record what they drop release it when they are cropped
                layer.crop(-beyond)


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of weights that a pass over one token reads: all but the input embeddings, unless they are tied to the
    head, and only as many experts as a token is routed to.
    """
    config = model.config.get_text_config()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), 1)
    read = getattr(config, "num_experts_per_tok", None) or experts
    everything = sum(
        parameter.nbytes * read // experts if ".experts." in name else parameter.nbytes
        for name, parameter in model.named_parameters()
    )
    tied = head is not None and head.weight is embeddings.weight
    return everything - (0 if tied else sum(parameter.nbytes for parameter in embeddings.parameters()))


def cache_bytes(cache: Cache) -> tuple[int, int]:
    """Bytes of stored keys and values that a dense pass reads: in gated layers, and in the other layers."""
    selectable = fixed = 0
    for layer in cache.layers:
        keys, values = layer.keys, layer.values
        if keys is None or values is None:
            continue
        if isinstance(layer, GatedLayer):
            selectable += sum(layer.rows.resident) * keys.shape[1] * token_bytes(keys, values)
        else:
            fixed += keys.nbytes + values.nbytes
    return selectable, fixed
