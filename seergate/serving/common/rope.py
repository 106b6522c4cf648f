"""The inverse of a server's rotary embedding, which recovers keys and queries before RoPE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seergate.errors import SeergateError


class Unrotation:
    """Undoes the rotary embedding of a layer, if it has one, with any RoPE scaling, by inverting the server's table of
    cosines and sines. Raises `SeergateError` if there is no such table.
    """

    def __init__(self, rotary: Any) -> None:
        if rotary is not None and not isinstance(getattr(rotary, "cos_sin_cache", None), Tensor):
            raise SeergateError(
                f"this model's RoPE is a {type(rotary).__name__}, which has no table of cosines and sines; seergate "
                "cannot compute keys before RoPE"
            )
        self.rotary = rotary

    def at(self, positions: Tensor) -> tuple[Tensor, ...] | None:
        """The inverse rotation at int64 positions: cosine and sine ``[..., d]``, one number per rotated channel, and
        the divisor of the result; ``None`` without RoPE. The sine is negated for one channel of each pair.
        """
        if self.rotary is None:
            return None
        cos, sin = self.rotary.cos_sin_cache[positions].float().chunk(2, -1)
        square = cos.square() + sin.square()  # the squared attention factor: 1 without YaRN
        pairs = torch.stack((cos, cos, sin, -sin, square, square), -2).unflatten(-2, (3, 2))  # [..., 3, 2, d / 2]
        channels = pairs if self.rotary.is_neox_style else pairs.transpose(-1, -2)
        return channels.flatten(-2).unbind(-2)

    def undo(self, x: Tensor, inverse: tuple[Tensor, ...] | None) -> Tensor:
        """Return ``x [..., D]`` before RoPE, in float32; ``inverse`` comes from `at` and is broadcast to ``x``."""
        x = x.float()
        if inverse is None:
            return x
        cos, sin, square = inverse
        half, width = square.shape[-1] // 2, square.shape[-1]
        turned = x if width == x.shape[-1] else x[..., :width]
        if self.rotary.is_neox_style:  # the channels of a pair are half of them apart; else they are adjacent
            partner = turned.roll(half, -1)
        else:
            partner = turned.unflatten(-1, (half, 2)).flip(-1).flatten(-2)
        back = (turned * cos).add_(partner * sin).div_(square)
        return back if width == x.shape[-1] else torch.cat((back, x[..., width:]), -1)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return ``x [..., D]`` before RoPE, in float32; positions are int64, broadcast to ``x.shape[:-1]``."""
        return self.undo(x, self.at(positions))
