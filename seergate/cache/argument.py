"""The keyword argument for the KV cache in transformers' models: ``cache`` since 5.24, ``past_key_values`` before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The keyword in the installed release; also the field of a model's output and the key in ``model_kwargs``."""


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache from a forward pass's keyword arguments, under either name; ``None`` without one."""
    found = kwargs.get("past_key_values")
    return kwargs.get("cache") if found is None else found
