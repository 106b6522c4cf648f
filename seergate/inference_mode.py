"""A decorator for functions that create long-lived tensors and may be called in inference mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def outside_inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function outside of `torch.inference_mode`, without gradients.

    A tensor created in inference mode cannot be modified outside of it, but later calls update caches and counters.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapper
