"""`ModelGeometry`: the properties of a base model that its gates depend on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from seergate.checks import check, check_count, is_int, is_number


@dataclass(frozen=True)
class ModelGeometry:
    """Shape and RoPE of a base model; saved in the adapter, and compared with a model when gates are attached to it.

    Attributes:
        model_type: the architecture's name in transformers, such as ``"qwen3"``.
        num_heads, num_kv_heads, head_dim: query heads, KV heads and head dimension of the gated layers.
        layers: indices of the gated layers, ascending.
        inv_freq: RoPE frequencies of the gate, ``gate_dim / 2`` in radians per position; empty if it has no RoPE.
        attention_scaling: the base model's RoPE attention factor.
        hidden_size, num_layers: size of the model; distinguishes models with attention of the same shape.
        base_model: Hub id or directory that the model was loaded from, if known.
        base_revision: commit of the base model, if known.
    """

    model_type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    inv_freq: tuple[float, ...] = ()
    attention_scaling: float = 1.0
    hidden_size: int | None = None
    num_layers: int | None = None
    base_model: str | None = None
    base_revision: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON types."""
        return {**asdict(self), "layers": list(self.layers), "inv_freq": list(self.inv_freq)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelGeometry:
        """Inverse of `to_dict`, with a `ValueError` for a wrong value; unknown keys are ignored."""
        arguments = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for name in ("layers", "inv_freq"):
            value = arguments.get(name, ())
            check(name, value, isinstance(value, (list, tuple)), "a list of numbers")
            arguments[name] = tuple(value)
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_count(name, arguments.get(name), 1)
        layers = arguments["layers"]
        right = bool(layers) and all(is_int(layer) and layer >= 0 for layer in layers)
        check("layers", list(layers), right, "a list of layer indices")
        check("layers", list(layers), list(layers) == sorted(set(layers)), "ascending, each layer once")
        for name in ("hidden_size", "num_layers"):
            if arguments.get(name) is not None:
                check_count(name, arguments[name], 1)
        for name in ("model_type", "base_model", "base_revision"):
            value = arguments.get(name)
            check(name, value, isinstance(value, str) or (value is None and name != "model_type"), "a text")
        for value in (arguments.get("attention_scaling", 1.0), *arguments["inv_freq"]):
            if not (is_number(value) and 0 <= value <= 1e6):
                raise ValueError(f"inv_freq and attention_scaling must be numbers in 0..1e6, but one is {value!r}")
        return cls(**arguments)

    def mismatches(self, other: ModelGeometry) -> list[str]:
        """Sentences about what keeps these gates from fitting ``other``, a model's geometry; empty if they fit."""
        names = ("model_type", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        problems = [
            f"{name} is {getattr(other, name)!r} in the model and {getattr(self, name)!r} in the gates"
            for name in names
            if getattr(self, name) != getattr(other, name) and None not in (getattr(self, name), getattr(other, name))
        ]
        own, its = (self.attention_scaling, *self.inv_freq), (other.attention_scaling, *other.inv_freq)
        # A model converted with `.to(bfloat16)` has rounded frequencies; another RoPE base changes them by far more.
        if self.inv_freq and (
            len(own) != len(its) or any(not math.isclose(a, b, rel_tol=1e-2) for a, b in zip(own, its, strict=True))
        ):
            problems.append("the model's RoPE frequencies are not those that the gates were trained with")
        missing = sorted(set(self.layers) - set(other.layers))
        if missing:
            problems.append(f"the gates cover layers {missing}, which the model has not or has without full attention")
        return problems
