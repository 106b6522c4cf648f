"""The base model's RoPE: frequencies for a gate, and rotation of cached keys to other positions."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seergate.errors import SeergateError
from seergate.ops.rows import RowLengths

RopeKind = Literal["plain", "none", "other"]
CHANGING = ("dynamic", "longrope")
"""Types of RoPE whose frequencies depend on the length of the text."""


def gate_frequencies(
    decoder: nn.Module, config: Any, layer_type: str, gate_dim: int
) -> tuple[tuple[float, ...], float]:
    """RoPE frequencies (radians per position) for a gate, and the base model's attention factor.

    A gate as wide as the model's rotated part uses the model's frequencies, including scaling such as YaRN, llama3 or
    per layer type. A gate of another width uses unscaled frequencies of the same base.
    """
    rotary = decoder.get_submodule("rotary_emb")
    prefix, own = model_frequencies(rotary, layer_type)
    if own.device.type != "meta" and own.numel() * 2 == gate_dim:
        return tuple(own.detach().float().cpu().tolist()), float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    parameters = config.rope_parameters
    parameters = parameters.get(layer_type, parameters)
    exponents = torch.arange(0, gate_dim, 2, dtype=torch.float32) / gate_dim
    return tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0


def changing_rope(config: Any) -> tuple[str, int] | None:
    """Find RoPE whose frequencies depend on the length of the text: dynamic NTK and LongRoPE scaling.

    Such frequencies are those of the longest row of a batch, and cached keys keep those of an earlier length.

    Args:
        config: configuration of a language model, with RoPE parameters of all layers or per layer type.

    Returns:
        The type of RoPE, and the maximum length in tokens of a text for which its frequencies stay the same; ``None``
        if they always do.
    """
    rope, own = getattr(config, "rope_parameters", None) or {}, getattr(config, "max_position_embeddings", None)
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    limits = list[tuple[str, int]]()
    for part in parts:
        kind, given = str(part.get("rope_type")), part.get("original_max_position_embeddings")
        length = own if kind == "dynamic" or given is None else given
        if kind in CHANGING and length is not None:
            limits.append((kind, int(length)))
    return min(limits, key=lambda each: each[1], default=None)


def model_frequencies(rotary: nn.Module, layer_type: str) -> tuple[str, Tensor]:
    """The prefix of a layer type's attributes in a rotary module, and the layer type's frequencies."""
    prefix = f"{layer_type}_" if hasattr(rotary, f"{layer_type}_inv_freq") else ""
    original = getattr(rotary, f"{prefix}original_inv_freq", None)
    return prefix, getattr(rotary, f"{prefix}inv_freq") if original is None else original


def modeling_module(attention: nn.Module) -> Any:
    """The transformers file that defines an attention class; it also has the family's eager attention and RoPE."""
    return sys.modules[type(attention).__module__]


class Rotary:
    """Rotates tensors as the base model would at given positions.

    Args:
        decoder: the stack that owns ``rotary_emb``.
        attention: a layer; its file defines ``apply_rotary_pos_emb``.
        layer_type: type of the layer, for models with RoPE parameters per layer type.
        kind: ``"plain"`` if cached keys are the hooked keys after RoPE; ``"none"`` for a layer without RoPE;
            ``"other"`` for anything else, which `rotate` and `unrotate` refuse with a `SeergateError`.
    """

    def __init__(self, decoder: nn.Module, attention: nn.Module, layer_type: str, kind: RopeKind = "plain") -> None:
        self.kind = kind
        self._embedding = decoder.get_submodule("rotary_emb")
        self._apply = getattr(modeling_module(attention), "apply_rotary_pos_emb", None)
        self._family, self._layer_type = type(attention).__name__, layer_type
        takes_type = "layer_type" in inspect.signature(self._embedding.forward).parameters
        self._kwargs = {"layer_type": layer_type} if takes_type else {}
        self._changing = changing_rope(getattr(decoder, "config", None))
        self._query_scale = getattr(modeling_module(attention), "get_llama_4_attn_scale", None)  # Ministral 3

    def rotate(self, x: Tensor, positions: Tensor, rows: RowLengths | None = None) -> Tensor:
        """Apply RoPE to ``x [B, heads, S, D]`` at ``positions [B, S]``, or ``[1, S]`` for all rows. Layers of a step
        that pass the same ``positions`` object and its ``rows`` share the angles.
        """
        if self.kind == "none":
            return x
        if rows is None:
            return self._turn(x, *self._angles(x, positions))
        key = "angles", self._embedding, self._layer_type, x.dtype
        return self._turn(x, *rows.once(key, lambda: self._angles(x, positions), positions))

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The inverse of `rotate`, up to rounding. If angles depend on the text's length, see `check_recoverable`."""
        if self.kind == "none":
            return x
        cos, sin = (angles.float() for angles in self._angles(x, positions))
        # Rotating there and back scales each pair by cos^2 + sin^2: the squared attention factor, and bf16 rounding.
        stretch = self._turn(self._turn(torch.ones_like(x[:, :1], dtype=torch.float32), cos, sin), cos, -sin)
        return (self._turn(x.float(), cos, -sin) / stretch).to(x.dtype)

    def scale_queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """Multiply rotated queries ``[B, heads, S, D]`` by the model's factor for the last S ``positions``, if any."""
        if self._query_scale is None:
            return q
        rope: Any = self._embedding.config.rope_parameters  # type: ignore[union-attr]
        newest = positions[:, -q.shape[2] :]
        scale = self._query_scale(newest, rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
        return q * scale.to(q.dtype)

    def check_recoverable(self, tokens: int) -> None:
        """Raise `SeergateError` if keys before RoPE cannot be recovered from the cache of a text of so many tokens."""
        if self._changing is not None and tokens > self._changing[1]:
            raise SeergateError(
                f"tokens are taken back from a text of {tokens:,}, whose keys before RoPE cannot be recovered: "
                f"{self._changing[0]} RoPE has other frequencies beyond {self._changing[1]:,} tokens"
            )

    def frequencies(self) -> Tensor:
        """RoPE frequencies in radians per position, one per rotated pair."""
        return model_frequencies(self._embedding, self._layer_type)[1]

    def _angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if getattr(self._embedding, "mrope_section", None) is not None:
            positions = positions.expand(3, -1, -1)  # older releases need three position axes for text too
        cos, sin = self._embedding(x, positions, **self._kwargs)
        return cos.to(x.device), sin.to(x.device)  # the module may be on another device

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.kind == "other" or self._apply is None:
            raise SeergateError(f"keys of {self._family} cannot be re-positioned: its RoPE has a form of its own")
        return self._apply(x, x[:, :0], cos, sin)[0]
