"""Arithmetic on gates: average, subset of layers, change of dtype, difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from seergate.checks import is_int
from seergate.errors import SeergateError
from seergate.gates.bank import Gates

G = TypeVar("G", bound=Gates)


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
class GatesDiff:
    """Differences between two banks of gates.

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


def average(banks: Sequence[G], weights: Sequence[float] | None = None) -> G:
    """The weighted mean of gates for the same model, tensor by tensor, computed in fp32 or wider.

    Args:
        banks: two or more of the same architecture, for the same base model.
        weights: one number each; divided by their sum. Equal by default.

    Returns:
        Gates in the dtypes of the first ones, without results: those of the parts do not hold for the mean.

    Raises:
        SeergateError: if they do not belong together, naming each field that differs.
        ValueError: for bad weights.
    """
    if len(banks) < 2:
        raise SeergateError(f"{len(banks)} adapters are given; an average needs two or more")
    given = [1.0] * len(banks) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(banks) or not all(map(math.isfinite, given)) or sum(given) <= 0:
        raise ValueError(f"weights is {weights!r}; it must be {len(banks)} numbers with a positive sum")
    shares = [weight / sum(given) for weight in given]
    first, states = banks[0], [bank.state_dict() for bank in banks]
    for number, other in enumerate(banks[1:], start=2):
        if problems := _architecture_fields(first, other):
            raise SeergateError(f"gates {number} cannot be averaged with the first: {'; '.join(problems)}")
    tensors = {}
    for name, tensor in states[0].items():
        wide = torch.promote_types(tensor.dtype, torch.float32)
        parts = [state[name].to(tensor.device, wide) * share for state, share in zip(states, shares, strict=True)]
        tensors[name] = torch.stack(parts).sum(0).to(tensor.dtype)
    training = {"average_of": [bank.training_record for bank in banks], "weights": shares}
    return first.derived(tensors, training=training, results=())


def subset(bank: G, layers: Iterable[int]) -> G:
    """The gates of some layers, without results; the other layers of the model stay dense.

    Raises:
        SeergateError: for a layer that has no gate, or none at all.
    """
    wanted = sorted(set(layers))
    absent = [layer for layer in wanted if not is_int(layer) or layer not in bank.geometry.layers]
    if absent or not wanted:
        raise SeergateError(f"layers is {absent or wanted}; it must name some of {list(bank.geometry.layers)}")
    tensors = {name: x for name, x in bank.state_dict().items() if int(name.split(".")[1]) in wanted}
    return bank.derived(tensors, geometry=replace(bank.geometry, layers=tuple(wanted)), results=())


def with_anchors(bank: G, anchors: Sequence[int], **training: Any) -> G:
    """The gates of the anchors alone, which choose for the layers above them wherever the gates are loaded.

    Args:
        training: added to the record of how the gates were made.
    """
    defaults = {**bank.decode_defaults, "anchors": list(anchors)}
    return subset(bank, anchors).derived(decode_defaults=defaults, training={**bank.training_record, **training})


def cast(bank: G, dtype: torch.dtype) -> G:
    """A copy in another precision.

    Raises:
        SeergateError: for a dtype that gates cannot have, or one in which a number is no longer finite.
    """
    return bank.derived({name: tensor.to(dtype) for name, tensor in bank.state_dict().items()})


def diff(first: Gates, second: Gates) -> GatesDiff:
    """Compare two banks of gates, whatever they are for."""
    ours, theirs = first.state_dict(), second.state_dict()
    shared = [name for name, tensor in ours.items() if name in theirs and theirs[name].shape == tensor.shape]
    found = _architecture_fields(first, second)
    named = {"dtype": "dtype", "training": "training_record", "decode": "decode_defaults"}
    for name, attribute in (named | {"results": "results", "licence": "licence"}).items():
        own, other = getattr(first, attribute), getattr(second, attribute)
        if own != other:
            found.append(f"{name} differs" if name in ("training", "results") else f"{name} is {own} and {other}")
    tensors = {}
    for name in shared:
        a, b = ours[name].double().flatten(), theirs[name].to(ours[name].device).double().flatten()
        if not torch.equal(a, b):
            norm, other_norm = a.norm().item(), b.norm().item()
            distance = (a - b).norm().item()
            tensors[name] = TensorDiff(
                largest=(a - b).abs().max().item(),
                relative=distance / norm if norm else math.inf,
                cosine=a.dot(b).item() / (norm * other_norm) if norm and other_norm else 0.0,
            )
    return GatesDiff(found, tensors, sorted(ours.keys() - shared), sorted(theirs.keys() - shared))


def _architecture_fields(first: Gates, second: Gates) -> list[str]:
    """The fields in which the gates or the models they are for differ, as sentences."""
    found = []
    for own, other in ((first.config, second.config), (first.geometry, second.geometry)):
        for entry in fields(own):
            a, b = getattr(own, entry.name), getattr(other, entry.name)
            if a != b:
                found.append(f"{entry.name} differs" if entry.name == "inv_freq" else f"{entry.name} is {a} and {b}")
    return found
