"""Tells `generate`'s prompts from drafted tokens that are being verified.

Both reach a cache as several tokens at once. Within `generate` it is known which they are, however short, and in
however many chunks they come: prompts are read densely. Elsewhere the attention function goes by their number.
Assisted decoding passes the first drafted tokens along with the prompt.
"""

from __future__ import annotations

import warnings
from threading import get_ident
from typing import Any
from weakref import ref

from torch import Tensor
from transformers import PreTrainedModel

NO_CACHE = (
    "generate runs with use_cache=False, so the attached method has nothing to choose from: every step is dense; "
    "leave use_cache out"
)
_METHOD = "_prefill"  # of transformers' generation loops
_DRAFTER = "_get_candidate_generator"  # makes what drafts during one assisted `generate`, and is dropped at its end


class PromptReader:
    """Stands in for a model's `_prefill`, which reads a prompt, and says whether it is being run; and for what makes
    the drafter of assisted decoding, to know where its prompt ends.

    Args:
        model: to which a method is being attached.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = generating(model)
        self._reading: dict[int, bool] = {}  # threads that read a prompt, and whether it was cut into chunks
        self._assisted: tuple[Any, Any, int] | None = None  # weakly, drafter and cache; slots that the prompt takes
        if hasattr(self.model, _METHOD):
            setattr(self.model, _METHOD, self)
        if hasattr(self.model, _DRAFTER):
            setattr(self.model, _DRAFTER, self._make_drafter)

    def remove(self) -> None:
        """Give the model its own method back. May be called again without effect."""
        if vars(self.model).get(_METHOD) is self:
            delattr(self.model, _METHOD)
        if vars(self.model).get(_DRAFTER) == self._make_drafter:
            delattr(self.model, _DRAFTER)

    def __call__(self, input_ids: Tensor, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a prompt."""
        cache = model_kwargs.get("past_key_values")
        if cache is None and not model_kwargs.get("use_cache", True):
            warnings.warn(NO_CACHE, stacklevel=2)
        known = 0 if cache is None else int(cache.get_seq_length())
        one_token = input_ids.shape[1] in (1, known + 1)  # with or without those that the cache has
        self._reading[get_ident()] = generation_config.prefill_chunk_size is not None and not one_token
        try:
            read = getattr(type(self.model), _METHOD)
            return read(self.model, input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            self._reading.pop(get_ident(), None)

    def holds(self, tokens: int) -> bool:
        """Whether tokens that arrive together are part of a prompt: several at once, or a chunk of a single one. (One
        that comes alone goes on with a text.)
        """
        if not self._reading:  # a compiled step does not ask further
            return False
        in_chunks = self._reading.get(get_ident())
        return in_chunks is not None and (tokens > 1 or in_chunks)

    def drafted(self, cache: Any, slots: int, new: int) -> int | None:
        """How many of the tokens that arrive together assisted decoding has drafted, or accepted after the prompt.

        Args:
            cache: where they arrive.
            slots: tokens that it has, padding included.
            new: how many arrive.

        Returns:
            The number of the last ones that are no part of the prompt; ``None`` if no assisted decoding is under way
            on this cache.
        """
        if self._assisted is None:
            return None
        drafter, filled, prompt = self._assisted
        if drafter() is None or filled() is not cache:
            return None
        return max(0, min(new, slots + new - prompt))

    def _make_drafter(self, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(type(self.model), _DRAFTER)(self.model, *args, **kwargs)
        cache = kwargs["model_kwargs"].get("past_key_values")
        if cache is not None:
            # Of a cache that is filled, assisted decoding passes all ids again.
            prompt = int(cache.get_seq_length()) + kwargs["input_ids"].shape[1]
            self._assisted = ref(drafter), ref(cache), prompt
        return drafter


def generating(model: Any) -> Any:
    """The model whose own methods `generate` runs: what is inside of a PEFT or compiled wrapper."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model
