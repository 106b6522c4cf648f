"""Tensors that outlive the call that makes them, whatever mode that call is in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from seergate.methods.base import LayerState, Step


def ordinary_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function outside of `torch.inference_mode`, without gradients.

    What is made inside of that mode may never be written to outside of it, and a cache or a counter is filled in one
    call and goes on in another.
    """

    @wraps(function)
    def ordinary(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return ordinary


@ordinary_tensors
def show(state: LayerState, step: Step) -> None:
    """Let a method see the tokens of a step, of which it keeps something."""
    state.append(step)
