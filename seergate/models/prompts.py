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
_GENERATE = "generate"
_METHOD = "_prefill"  # method of transformers' `GenerationMixin` that reads a prompt
_DRAFTER = "_get_candidate_generator"  # method that creates the drafter, which exists for one assisted `generate`
_COMPILES = "_valid_auto_compile_criteria"  # method that decides whether `generate` compiles decode steps


class PromptReader:
    """Wraps `generate`, and the methods that it calls to prefill, to create the drafter of assisted decoding, and to
    decide whether to compile decode steps. Decode steps are not compiled if ``compiles()`` is false.
    """

    def __init__(self, model: PreTrainedModel, passes: ForwardModes, compiles: Callable[[], bool]) -> None:
        self.model, self.passes, self._allowed = generating(model), passes, compiles
        self._replaced = vars(self.model).get(_GENERATE)  # by the user
        if hasattr(self.model, _GENERATE):
            setattr(self.model, _GENERATE, self._generate)
        if hasattr(self.model, _METHOD):
            setattr(self.model, _METHOD, self)
        if hasattr(self.model, _DRAFTER):
            setattr(self.model, _DRAFTER, self._make_drafter)
        if hasattr(self.model, _COMPILES):
            setattr(self.model, _COMPILES, self._compiles)

    def remove(self) -> None:
        """Restore the model's own methods. Further calls have no effect."""
        if vars(self.model).get(_GENERATE) == self._generate:
            delattr(self.model, _GENERATE)
            if self._replaced is not None:
                setattr(self.model, _GENERATE, self._replaced)
        if vars(self.model).get(_METHOD) is self:
            delattr(self.model, _METHOD)
        if vars(self.model).get(_DRAFTER) == self._make_drafter:
            delattr(self.model, _DRAFTER)
        if vars(self.model).get(_COMPILES) == self._compiles:
            delattr(self.model, _COMPILES)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.passes.one_generate():
            if self._replaced is not None:
                return self._replaced(*args, **kwargs)
            return getattr(type(self.model), _GENERATE)(self.model, *args, **kwargs)

    def __call__(self, input_ids: Tensor, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
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
        one_token = input_ids.shape[1] - (cached_tokens if whole else 0) == 1
        padding = generation_config._pad_token_tensor
        may_be_made = one_token and cached_tokens and whole and mask is not None and padding is not None
        if may_be_made and (mask.bool() == (input_ids != padding)).all():
            self.passes.generating(generation_config, cache)  # `generate` made it from the ids, decoded ones too
        with self.passes.prefilling(in_chunks=generation_config.prefill_chunk_size is not None and not one_token):
            read = getattr(type(self.model), _METHOD)
            outputs = read(self.model, input_ids, generation_config, model_kwargs, *args, **kwargs)
        if cache is not None:
            self.passes.generating(generation_config, cache)
        return outputs

    def _compiles(self, *args: Any, **kwargs: Any) -> bool:
        return self._allowed() and bool(getattr(type(self.model), _COMPILES)(self.model, *args, **kwargs))

    def _make_drafter(self, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(type(self.model), _DRAFTER)(self.model, *args, **kwargs)
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
