"""Differences between two `Gates`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TensorDiff:
    """Distance between two tensors.

    Attributes:
        largest: largest absolute difference of two elements.
        relative: norm of the difference, divided by the norm of the first tensor.
        cosine: cosine of the angle between them.
    """

    largest: float
    relative: float
    cosine: float

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> TensorDiff:
        """The distance between tensors of the same shape, computed in float64."""
        a, b = first.double().flatten(), second.to(first.device).double().flatten()
        norm, other_norm, distance = a.norm().item(), b.norm().item(), (a - b).norm().item()
        return cls(
            largest=(a - b).abs().max().item(),
            relative=distance / norm if norm else math.inf,
            cosine=a.dot(b).item() / (norm * other_norm) if norm and other_norm else 0.0,
        )


@dataclass(frozen=True)
class GatesDiff:
    """Differences between two `Gates`.

    Attributes:
        fields: sentences about differences in architecture, model, training record and so on.
        tensors: tensor name -> difference, for tensors of the same shape in both that are not equal.
        only_first, only_second: names of tensors that the other one does not have in this shape.
    """

    fields: list[str]
    tensors: dict[str, TensorDiff]
    only_first: list[str]
    only_second: list[str]

    @property
    def same_weights(self) -> bool:
        """True if both hold the same numbers under the same names."""
        return not (self.tensors or self.only_first or self.only_second)
