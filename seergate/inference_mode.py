"""A decorator for functions whose tensors are used after a call that may be in inference mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def outside_inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function outside of `torch.inference_mode`, without gradients.

    A tensor that is made inside of that mode may never be written to outside of it. Caches and counters are filled in
    one call and go on in another.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapper
