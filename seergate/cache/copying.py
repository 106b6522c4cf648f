"""Copies of a filled cache, transformers' way to begin several texts with the same tokens."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from seergate.cache.layer import GatedLayer


def copied(layer: GatedLayer, memo: dict[int, Any], *, share_method: bool) -> GatedLayer:
    """What `copy.deepcopy` makes of a layer: its tokens are copied; its method and gates are shared, if asked for.

    Layers with fixed shapes, pages or slow memory share more than that; copies of them are refused when they are used.
    """
    new = memo[id(layer)] = type(layer).__new__(type(layer))
    if share_method:
        parts = [layer.method, layer.rotary]
        parts += [part for part in vars(layer.state or layer).values() if isinstance(part, nn.Module)]
        for part in parts:
            memo.setdefault(id(part), part)  # unless the model and its method are being copied, too
    new.__dict__.update(copy.deepcopy(vars(layer), memo))
    return new
