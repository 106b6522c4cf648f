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
from seergate.cache.rows import Rows
from seergate.inference_mode import outside_inference_mode
from seergate.methods.base import FixedStep, Step
from seergate.stats import DecodeStats, FixedCounts


class FixedRows(Rows):
    """Rows whose lengths are known in tensors only; where a list or a number is asked for, it is read from these.

    No token is ever evicted here, so `total` is `resident`.

    Attributes:
        width: int64 scalar, the number of slots.
    """

    def __init__(self, batch: int = 0, device: torch.device | None = None) -> None:
        self.width = torch.zeros((), dtype=torch.int64, device=device)
        super().__init__(batch, device)

    @property
    def slots(self) -> int:  # type: ignore[override]
        """Columns of the padded batch so far."""
        return int(self.width)

    @slots.setter
    def slots(self, value: int) -> None:
        self.width.fill_(value)

    @property
    def resident(self) -> list[int]:  # type: ignore[override]
        """Tokens of each row."""
        return self.lengths.tolist()

    @resident.setter
    def resident(self, value: list[int]) -> None:
        pass

    @property
    def total(self) -> list[int]:  # type: ignore[override]
        """Tokens of each row."""
        return self.lengths.tolist()

    @total.setter
    def total(self, value: list[int]) -> None:
        pass

    def set_resident(self, lengths: list[int]) -> None:
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int64))

    def add_one(self) -> None:
        """Count one new token per row."""
        self.lengths.add_(1)
        self.width.add_(1)


class FixedLayer(GatedLayer):
    """See the module's docstring. The method's ``fixed_shapes`` must be true, and the storage that of a static cache.

    Attributes:
        allows_fixed_steps: false if a trace or recall is wanted of a step, which need lengths on the host.
        counts: counters of the fixed-shape steps; ``None`` if the next token takes the dynamic path.
        room: number of slots known to be free.
    """

    is_compileable = True
    allows_fixed_steps = True
    rows: FixedRows
    new_rows = FixedRows

    def _clear(self) -> None:
        self.counts: FixedCounts | None = None
        self.room = 0
        super()._clear()

    def get_seq_length(self) -> Any:
        """Slots seen so far: a tensor, as in transformers' own static layer."""
        return self.rows.width if self.is_initialized else 0

    def is_fixed_step(self, new: int) -> bool:
        """True if so many new tokens take the fixed-shape path."""
        return new == 1 and self.counts is not None and self.allows_fixed_steps

    def _select_rows(self, index: Tensor) -> None:
        if self.is_initialized and len(index) != len(self.rows):
            self.counts = (
                None  # they are of as many rows as there were; the next step is dynamic and prepares them anew
            )
        super()._select_rows(index)

    def counts_into(self, stats: DecodeStats) -> bool:
        """True if fixed steps would be counted there. Not where the counters are another handle's, or have been made
        ready for another cache since: then a dynamic step comes first, which prepares them again.
        """
        return stats.layers[self.layer].fixed is self.counts

    @outside_inference_mode
    def prepare_fixed_steps(self, stats: DecodeStats) -> None:
        """After a step of another kind: give every tensor its final size, so that fixed steps can follow."""
        assert self.state is not None
        keys, values = self.storage.keys, self.storage.values
        for name, size in self.state.tokens_per_entry.items():
            self.state.grown(name, keys.shape[2] // size, limit=keys.shape[2] // size)
        self.counts = stats.expect_fixed(self.layer, keys, values, self.block_size, self.state)
        if self.device.type == "cuda":
            own = (keys, values, self.rows.lengths, self.rows.width, *self.state.rows.values())
            for tensor in (*own, self.counts.lengths, self.counts.blocks):
                torch._dynamo.mark_static_address(tensor)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens: one per row in a fixed step, or any number as in `GatedLayer`."""
        context = self.context
        if context is None or not self.is_fixed_step(key_states.shape[2]):
            self.counts, self.room = None, 0
            return super().update(key_states, value_states, *args, **kwargs)
        if torch.compiler.is_compiling():
            self.room = 0  # compiled steps are not counted
        else:
            self._take_room()
        self.context = None
        batch = torch.arange(len(key_states), device=self.device)
        for buffer, new in ((self.storage.keys, key_states), (self.storage.values, value_states)):
            buffer[batch, :, self.rows.lengths] = new[:, :, 0].detach().to(self.dtype)
        self.rows.add_one()
        context.take(key_states, [], [])
        return key_states, value_states

    def _take_room(self) -> None:
        """Raise before a token is written that has no room: on a GPU the write itself would end the process's CUDA.

        The length lies on the device, and asking for it waits: so what is known to be free is counted down, and asked
        for again when it is used up.
        """
        if not self.room:
            assert self.static_length is not None
            self.room = self.static_length - self.rows.slots
            if not self.room:
                self.raise_full(1)
        self.room -= 1

    def step(self, **facts: Any) -> Step:
        """The `Step` that a method sees; a fixed step has no lengths on the host."""
        if facts["starts"]:
            return super().step(**facts)
        return FixedStep(keys_BKCD=self.storage.keys, values_BKCD=self.storage.values, **{**facts, "offsets": None})
