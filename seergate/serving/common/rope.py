"""The inverse of a server's rotary embedding, which recovers keys and queries before RoPE."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seergate.errors import SeergateError


class Angles(NamedTuple):
    """A rotation of pairs of channels: ``x * cos + partner * sin``.

    Attributes:
        cos, sin: ``[..., d]``, one number per channel; the sine is negated for one channel of each pair.
        neox: whether the channels of a pair are ``d / 2`` apart instead of adjacent.
    """

    cos: Tensor
    sin: Tensor
    neox: bool = True

    def rotate(self, x: Tensor) -> Tensor:
        """Return ``x [..., d]``, rotated."""
        half = x.shape[-1] // 2
        partner = x.roll(half, -1) if self.neox else x.unflatten(-1, (half, 2)).flip(-1).flatten(-2)
        return (x * self.cos).add_(partner * self.sin)


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

    def at(self, positions: Tensor) -> tuple[Angles, Tensor] | None:
        """The inverse rotation at int64 positions, and the divisor of its result; ``None`` without RoPE."""
        if self.rotary is None:
            return None
        cos, sin = self.rotary.cos_sin_cache[positions].float().chunk(2, -1)
        square = cos.square() + sin.square()  # the squared attention factor: 1 without YaRN
        pairs = torch.stack((cos, cos, sin, -sin, square, square), -2).unflatten(-2, (3, 2))  # [..., 3, 2, d / 2]
        channels = pairs if self.rotary.is_neox_style else pairs.transpose(-1, -2)
        cos, sin, square = channels.flatten(-2).unbind(-2)
        return Angles(cos, sin, self.rotary.is_neox_style), square

    @staticmethod
    def undo(x: Tensor, inverse: tuple[Angles, Tensor] | None) -> Tensor:
        """Return ``x [..., D]`` before RoPE, in float32; ``inverse`` comes from `at` and is broadcast to ``x``."""
        x = x.float()
        if inverse is None:
            return x
        angles, square = inverse
        width = square.shape[-1]
        if width == x.shape[-1]:
            return angles.rotate(x).div_(square)
        return torch.cat((angles.rotate(x[..., :width]).div_(square), x[..., width:]), -1)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return ``x [..., D]`` before RoPE, in float32; positions are int64, broadcast to ``x.shape[:-1]``."""
        return self.undo(x, self.at(positions))
