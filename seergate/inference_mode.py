"""Decorators that set PyTorch's mode of recording gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def without_gradients(function: Function) -> Function:
    """Run a function without gradients. `torch.no_grad` as a decorator does the same, and costs some microseconds even
    where gradients are off already, as in a decode step.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


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
