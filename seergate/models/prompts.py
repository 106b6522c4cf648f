"""Detects when `generate` prefills a prompt, and where the prompt of assisted decoding ends. Also keeps `generate`
from compiling decode steps that need values on the host.

Prompts must be detected because they and drafted tokens both reach a cache as several tokens at once. A prompt may
also come in chunks, and assisted decoding passes the first drafted tokens together with the prompt.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from seergate.cache.forward import CACHE, ForwardModes

NO_CACHE = (
    "generate runs with use_cache=False, so the attached method has nothing to choose from: every step is dense; "
    "pass use_cache=True, which the model's configuration may deny"
)
WRAPPED = ("generate", "_prefill", "_get_candidate_generator", "_valid_auto_compile_criteria")
"""Methods of transformers' `GenerationMixin`: `generate`, and what it calls to read a prompt, to create the drafter of
an assisted call, which lives as long as the call, and to decide whether to compile decode steps."""


class PromptReader:
    """Its methods replace the model's own that are `WRAPPED`, and call these. Decode steps are not compiled if
    ``compiles()`` is false.
    """

    def __init__(self, model: PreTrainedModel, passes: ForwardModes, compiles: Callable[[], bool]) -> None:
        self.model, self.passes, self._compiles = generating(model), passes, compiles
        self._replaced = vars(self.model).get("generate")  # by the user
        for name in WRAPPED:
            if hasattr(self.model, name):
                setattr(self.model, name, getattr(self, name))

    def remove(self) -> None:
        """Restore the model's own methods. Further calls have no effect."""
        for name in WRAPPED:
            if vars(self.model).get(name) == getattr(self, name):
                delattr(self.model, name)
                if name == "generate" and self._replaced is not None:
                    self.model.generate = self._replaced

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's `generate`, or the user's."""
        with self.passes.one_generate():
            if self._replaced is not None:
                return self._replaced(*args, **kwargs)
            return type(self.model).generate(self.model, *args, **kwargs)

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model's `_prefill` in prefill mode, and warn of a missing cache."""
        cache = model_kwargs.get(CACHE)
        if cache is None and not model_kwargs.get("use_cache", True):
            warnings.warn(NO_CACHE, stacklevel=2)
        cached_tokens = 0 if cache is None else int(cache.get_seq_length())
        self.passes.reads_prompt(cache)
        mask = model_kwargs.get("attention_mask")
        # transformers leaves out a mask that hides nothing, and notes its length.
        length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        whole = length in (None, input_ids.shape[1])  # ids may include those of the cached tokens
        new = input_ids.shape[1] - (cached_tokens if whole else 0)
        one_token = new == 1
        padding = generation_config._pad_token_tensor
        may_be_made = one_token and cached_tokens and whole and mask is not None and padding is not None
        if may_be_made and (mask.bool() == (input_ids != padding)).all():
            self.passes.generating(generation_config, cache)  # `generate` made it from the ids, decoded ones too
        in_chunks = generation_config.prefill_chunk_size is not None and not one_token
        with self.passes.prefilling(in_chunks, cached_tokens + new if in_chunks else 0):
            read = type(self.model)._prefill
            outputs = read(self.model, input_ids, generation_config, model_kwargs, *args, **kwargs)
        if cache is not None:
            self.passes.generating(generation_config, cache)
        return outputs

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return self._compiles() and bool(type(self.model)._valid_auto_compile_criteria(self.model, *args, **kwargs))

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        drafter = type(self.model)._get_candidate_generator(self.model, *args, **kwargs)
        cache = kwargs["model_kwargs"].get(CACHE)
        if cache is not None:
            # If the cache is not empty, assisted decoding passes all ids again.
            embedded = kwargs["model_kwargs"].get("inputs_embeds")  # of a prompt without ids
            new = max(kwargs["input_ids"].shape[1], 0 if embedded is None else embedded.shape[1])
            self.passes.drafting(drafter, cache, int(cache.get_seq_length()) + new)
        return drafter


def generating(model: Any) -> Any:
    """Return the model whose methods `generate` calls: the one inside PEFT's, the compiler's or another wrapper."""
    return next((part for part in model.modules() if isinstance(part, GenerationMixin)), model)
