"""The inverse of a server's rotary embedding: keys and queries before RoPE from those after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seergate.errors import SeergateError


class Unrotation:
    """Undoes a layer's rotary embedding, whatever scaling it has: its own table of cosines and sines is inverted.

    Args:
        rotary: the server's module; ``None`` for a layer without RoPE.
    """

    def __init__(self, rotary: Any) -> None:
        if rotary is not None and not isinstance(getattr(rotary, "cos_sin_cache", None), Tensor):
            raise SeergateError(
                f"this model's RoPE is a {type(rotary).__name__}, which has no table of cosines and sines; seergate "
                "cannot compute keys before RoPE"
            )
        self.rotary = rotary

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [..., D]`` before RoPE, in float32.

        Args:
            x: after RoPE.
            positions: int64, broadcast to ``x.shape[:-1]``.
        """
        x = x.float()
        if self.rotary is None:
            return x
        cos, sin = self.rotary.cos_sin_cache[positions].float().chunk(2, -1)
        turned, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
        first, second = turned.chunk(2, -1) if self.rotary.is_neox_style else (turned[..., ::2], turned[..., 1::2])
        square = cos.square() + sin.square()  # the squared attention factor: 1 without YaRN
        pair = (first * cos + second * sin) / square, (second * cos - first * sin) / square
        plain = torch.cat(pair, -1) if self.rotary.is_neox_style else torch.stack(pair, -1).flatten(-2)
        return torch.cat((plain, rest), -1) if rest.shape[-1] else plain
