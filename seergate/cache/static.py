"""FixedLayer: a `GatedLayer` on a static cache that decodes with the same operations at every step.

A compiled step, or one captured in a CUDA graph, may not ask how long a row is: numbers that change from step to step
live in tensors, which are changed in place. Prompts, crops and reordered rows are handled as in any other layer.

Shape suffixes: B batch, K KV heads, S new tokens, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seergate.cache.layer import GatedLayer
from seergate.cache.ordinary import ordinary_tensors
from seergate.decode.stats import DecodeStats, FixedCounts
from seergate.methods.base import FixedStep, Step


class FixedLayer(GatedLayer):
    """See the module's docstring. The method's ``fixed_shapes`` must be true, and ``static_length`` must be given.

    Attributes:
        plain: whether only the usual figures are wanted of a step; others (a trace, recall) need the host.
        counts: where fixed steps are counted; ``None`` if the next single token is not taken in one.
    """

    is_compileable = True
    plain = True

    @ordinary_tensors
    def _clear(self) -> None:
        self._slots = torch.zeros((), dtype=torch.int64)
        self.counts: FixedCounts | None = None
        super()._clear()

    # What the host usually keeps in lists is read back from the tensors where somebody asks for it.
    @property
    def slots(self) -> int:  # type: ignore[override]
        """Tokens seen per row, padding included."""
        return int(self._slots)

    @slots.setter
    def slots(self, value: int) -> None:
        self._slots.fill_(value)

    @property
    def row_lengths(self) -> list[int]:  # type: ignore[override]
        """Tokens of each row."""
        return self.lengths.tolist()

    @row_lengths.setter
    def row_lengths(self, value: list[int]) -> None:
        pass

    @property
    def row_seen(self) -> list[int]:  # type: ignore[override]
        """Tokens of each row: none is ever evicted here."""
        return self.lengths.tolist()

    @row_seen.setter
    def row_seen(self, value: list[int]) -> None:
        pass

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int64))

    def get_seq_length(self) -> Any:
        """Slots seen so far: a tensor, as in transformers' own static layer."""
        return self._slots if self.is_initialized else 0

    # ------------------------------------------------------------------------------------------------ fixed steps

    @ordinary_tensors
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See `GatedLayer`."""
        super().lazy_initialization(key_states, value_states)
        self._slots = self._slots.to(self.device)

    def takes(self, new: int) -> bool:
        """Whether so many new tokens will be a fixed step."""
        return new == 1 and self.counts is not None and self.plain

    def _select_rows(self, index: Tensor) -> None:
        if self.is_initialized and len(index) != len(self.lengths):
            self.counts = None  # they are of as many rows as there were; an ordinary step comes next and settles anew
        super()._select_rows(index)

    def counted_by(self, stats: DecodeStats) -> bool:
        """Whether fixed steps would be counted there. Not where the counters are another handle's, or have been made
        ready for another cache since: then an ordinary step comes first, which settles again.
        """
        return stats.layers[self.layer].fixed is self.counts

    @ordinary_tensors
    def settle(self, stats: DecodeStats) -> None:
        """After a step of another kind: give every tensor its final size, so that fixed steps can follow."""
        assert self.keys is not None and self.values is not None and self.state is not None
        capacity = self.keys.shape[2]
        for name, size in self.state.growing.items():
            self.state.grown(name, capacity // size, limit=capacity // size)
        self.counts = stats.expect_fixed(self.layer, self.keys, self.values, self.block_size, self.state)
        if self.device.type == "cuda":
            own = (self.keys, self.values, self.lengths, self._slots, *self.state.rows.values())
            for tensor in (*own, self.counts.sums):
                torch._dynamo.mark_static_address(tensor)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `GatedLayer`."""
        call = self.call
        if call is None or not self.takes(key_states.shape[2]):
            self.counts = None
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        if self.device.type == "cpu" and not torch.compiler.is_compiling() and self.slots == self.static_length:
            self.raise_full(1)
        self.call = None
        rows = torch.arange(len(key_states), device=self.device)
        self.keys[rows, :, self.lengths] = key_states[:, :, 0].detach().to(self.dtype)
        self.values[rows, :, self.lengths] = value_states[:, :, 0].detach().to(self.dtype)
        self.lengths.add_(1)
        self._slots.add_(1)
        call.take(key_states, [], [])
        return key_states, value_states

    def step(self, **facts: Any) -> Step:
        """See `GatedLayer`."""
        if facts["starts"]:
            return super().step(**facts)
        assert self.keys is not None and self.values is not None
        return FixedStep(keys_BKCD=self.keys, values_BKCD=self.values, **{**facts, "offsets": None})
