"""Dense attention on seergate's cache: the reference row of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from seergate.methods.base import LayerSpec, LayerState, Method


@dataclass(kw_only=True)
class Dense(Method):
    """Read everything."""

    name: ClassVar[str] = "dense"

    @property
    def fixed_shapes(self) -> bool:
        """See `Method`."""
        return True

    def new_state(self, spec: LayerSpec) -> LayerState:
        """See `Method`."""
        return LayerState(spec)
