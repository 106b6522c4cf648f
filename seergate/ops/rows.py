"""The rows of a decode step: their lengths, and what follows from the lengths alone.

All layers of a step have the same lengths, so positions, rotations, masks and index tables are made by the first layer
that needs them and used by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seergate.ops.arguments import readable


class RowLengths:
    """Lengths of the rows of a decode step. Ops take it in place of the tensor ``lengths``; they then do not check
    their arguments, which seergate has made itself.

    Attributes:
        tensor: int64 ``[B]``, tokens of each row, the current one included; not changed while this object is used.
        host: the same on the host; ``None`` if only the device knows them.
    """

    def __init__(self, tensor: Tensor, host: Sequence[int] | None = None) -> None:
        self.tensor, self.host = tensor, host
        self._made: dict[Any, tuple[Any, Any]] = {}

    @classmethod
    def of(cls, lengths: Tensor | RowLengths) -> RowLengths:
        """The lengths that an op was given."""
        if isinstance(lengths, RowLengths):
            return lengths
        return cls(lengths, lengths.tolist() if readable(lengths) else None)

    def once(self, key: Any, make: Callable[[], Any], source: Any = None) -> Any:
        """The value of ``make``, which depends on the lengths, on ``key`` and on the object ``source`` only."""
        entry = self._made.get(key)
        if entry is None or entry[0] is not source:
            entry = self._made[key] = source, make()
        return entry[1]

    @property
    def even(self) -> int:
        """Tokens of every row, if all have the same number and the host knows it; otherwise 0."""
        return self.host[0] if self.host and len(set(self.host)) == 1 else 0

    @property
    def each(self) -> Tensor:
        """Index of each row, ``[B]``."""
        return self.once("each", lambda: torch.arange(len(self.tensor), device=self.tensor.device))

    def room(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """A buffer that all layers of the step use in turn; its values are those of its last user."""
        count = shape[0] * shape[1]
        buffer = self._made.get(("room", like.dtype), (None, None))[1]
        if buffer is None or buffer.numel() < count:
            buffer = like.new_empty(count)
            self._made["room", like.dtype] = None, buffer
        return self.once(("part", shape, like.dtype), lambda: buffer[:count].view(shape), buffer)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowLengths:
        """The lengths alone."""
        return RowLengths(self.tensor.clone(), self.host)

    @property
    def positions(self) -> Tensor:
        """Position of each row's current token, ``[B, 1]``."""
        return self.once("positions", lambda: (self.tensor - 1)[:, None])

    def tokens(self, counts: Tensor, block_size: int) -> Tensor:
        """Number of tokens ``[B, K]`` of ``counts [B, K]`` blocks, the last of which is the row's current one."""
        return (counts - 1) * block_size + self.positions % block_size + 1
