"""Arithmetic on adapters: average, subset of layers, change of dtype, difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from seergate.config import is_int
from seergate.errors import SeergateError
from seergate.gates.record import DTYPES, Adapter


@dataclass(frozen=True)
class TensorDiff:
    """Distance between two tensors.

    Attributes:
        largest: largest absolute difference of two numbers.
        relative: norm of the difference, divided by the norm of the first tensor.
        cosine: cosine of the angle between them.
    """

    largest: float
    relative: float
    cosine: float


@dataclass(frozen=True)
class AdapterDiff:
    """Differences between two adapters.

    Attributes:
        fields: sentences about architecture, model, training record and so on.
        tensors: name -> difference, of the tensors that both have in the same shape and that are not equal.
        only_first, only_second: names of tensors that the other one lacks or has in another shape.
    """

    fields: list[str]
    tensors: dict[str, TensorDiff]
    only_first: list[str]
    only_second: list[str]

    @property
    def same_weights(self) -> bool:
        """True if both hold the same numbers under the same names."""
        return not (self.tensors or self.only_first or self.only_second)


def average(adapters: Sequence[Adapter], weights: Sequence[float] | None = None) -> Adapter:
    """The weighted mean of adapters for the same model, tensor by tensor, computed in fp32 or wider.

    Args:
        adapters: two or more of the same architecture, for the same base model.
        weights: one number each; divided by their sum. Equal by default.

    Returns:
        An adapter in the dtypes of the first one; results measured with the parts do not hold for the mean.

    Raises:
        SeergateError: if they do not belong together, naming each field that differs.
        ValueError: for bad weights.
    """
    if len(adapters) < 2:
        raise SeergateError(f"{len(adapters)} adapters are given; an average needs two or more")
    shares = [1.0] * len(adapters) if weights is None else [float(weight) for weight in weights]
    if len(shares) != len(adapters) or not all(map(math.isfinite, shares)) or sum(shares) <= 0:
        raise ValueError(f"weights is {weights!r}; it must be {len(adapters)} numbers with a positive sum")
    first = adapters[0]
    for number, other in enumerate(adapters[1:], start=2):
        problems = _architecture_fields(first, other)
        if problems:
            raise SeergateError(f"gates {number} cannot be averaged with the first: {'; '.join(problems)}")
    tensors = {}
    for name, tensor in first.tensors.items():
        wide = torch.promote_types(tensor.dtype, torch.float32)
        parts = [
            a.tensors[name].to(tensor.device, wide) * (s / sum(shares)) for a, s in zip(adapters, shares, strict=True)
        ]
        tensors[name] = torch.stack(parts).sum(0).to(tensor.dtype)
    training = {"average_of": [a.training for a in adapters], "weights": [share / sum(shares) for share in shares]}
    return replace(first, tensors=tensors, training=training, results=())


def subset(adapter: Adapter, layers: Iterable[int]) -> Adapter:
    """The gates of some layers; the other layers of the model stay dense.

    Raises:
        SeergateError: for a layer that has no gate, or none at all.
    """
    wanted = sorted(set(layers))
    absent = [layer for layer in wanted if not is_int(layer) or layer not in adapter.geometry.layers]
    if absent or not wanted:
        raise SeergateError(f"layers is {absent or wanted}; it must name some of {list(adapter.geometry.layers)}")
    tensors = {name: x for name, x in adapter.tensors.items() if int(name.split(".")[1]) in wanted}
    return replace(adapter, geometry=replace(adapter.geometry, layers=tuple(wanted)), tensors=tensors, results=())


def cast(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    """The same gates in another precision.

    Raises:
        ValueError: for a dtype that gates cannot have, or one in which a number is no longer finite.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    tensors = {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"the tensor {name} has numbers that are too large for {dtype}")
    return replace(adapter, tensors=tensors)


def diff(first: Adapter, second: Adapter) -> AdapterDiff:
    """Compare two adapters, whatever they are for."""
    shared = [
        name
        for name, tensor in first.tensors.items()
        if name in second.tensors and second.tensors[name].shape == tensor.shape
    ]
    found = _architecture_fields(first, second)
    for name in ("dtype", "training", "decode", "results", "licence"):
        own, other = getattr(first, name), getattr(second, name)
        if own != other:
            found.append(f"{name} differs" if name in ("training", "results") else f"{name} is {own} and {other}")
    tensors = {}
    for name in shared:
        a = first.tensors[name].double().flatten()
        b = second.tensors[name].to(a.device).double().flatten()
        if not torch.equal(a, b):
            norm, other_norm = a.norm().item(), b.norm().item()
            distance = (a - b).norm().item()
            tensors[name] = TensorDiff(
                largest=(a - b).abs().max().item(),
                relative=distance / norm if norm else math.inf,
                cosine=a.dot(b).item() / (norm * other_norm) if norm and other_norm else 0.0,
            )
    return AdapterDiff(found, tensors, sorted(first.tensors.keys() - shared), sorted(second.tensors.keys() - shared))


def _architecture_fields(first: Adapter, second: Adapter) -> list[str]:
    """Field by field, what the gates or the models they are for differ in."""
    found = []
    for own, other in ((first.gate, second.gate), (first.geometry, second.geometry)):
        for entry in fields(own):
            a, b = getattr(own, entry.name), getattr(other, entry.name)
            if a != b:
                found.append(f"{entry.name} differs" if entry.name == "inv_freq" else f"{entry.name} is {a} and {b}")
    return found
