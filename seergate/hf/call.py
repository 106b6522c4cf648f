"""How tokens reach a cache layer: announced before the attention module runs, picked up by the attention function.

Shape suffixes: B batch, S new tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seergate.errors import SeergateError
from seergate.methods.evicting import CompressingMethod

if TYPE_CHECKING:
    from seergate.cache.layer import GatedLayer


class Arrival:
    """What the attention module's pre-hook announces about the tokens that are about to reach the cache.

    Attributes:
        valid: bool ``[B, S]``, which new tokens are real; ``None`` if all are.
        taps: callable that returns ``q_pre [B, H, S, D]`` and ``k_pre [B, K, S, D]``.
        position_ids: ``[B, S]`` or ``[1, S]``, where the model puts the new tokens; ``None`` if it did not say.
        drafted: how many of them, the last ones, are to be decoded; ``None`` if that is not known.
    """

    def __init__(
        self, valid: Tensor | None, taps: Any, position_ids: Tensor | None = None, drafted: int | None = None
    ) -> None:
        self.valid, self.position_ids, self.drafted = valid, position_ids, drafted
        self.order = None if valid is None else torch.argsort((~valid).int(), dim=1, stable=True)
        self.counts = None if valid is None else valid.sum(1).tolist()
        self.taps = taps

    def first_positions(self, batch: int) -> list[int]:
        """Where the model puts each row's first real token."""
        if self.position_ids is None:
            return [0] * batch
        positions = self.position_ids.expand(batch, -1)
        if self.order is not None:
            positions = positions.gather(1, self.order)
        return positions[:, 0].tolist()

    def compact(self, x_BhSD: Tensor) -> Tensor:
        """Move each row's real tokens to the front."""
        if self.order is None:
            return x_BhSD
        index = self.order[:, None, :, None].expand(-1, x_BhSD.shape[1], -1, x_BhSD.shape[3])
        return x_BhSD.gather(2, index)


class Appended:
    """The tokens that the last `update` stored, for the attention function to pick up."""

    def __init__(
        self, arrival: Arrival, q_pre: Tensor, k_pre: Tensor, k: Tensor, starts: list[int], counts: list[int]
    ) -> None:
        self.compact, self.aligned, self.drafted = arrival.compact, arrival.valid is None, arrival.drafted
        self.q_pre, self.k_pre, self.k, self.starts, self.counts = q_pre, k_pre, k, starts, counts


def pick_up(layer: GatedLayer) -> Appended:
    """The tokens that a layer's `update` has just stored. They can be picked up once.

    Raises:
        SeergateError: if the layer's method has not seen all of its tokens.
    """
    appended, layer.appended = layer.appended, None
    if layer.state is None or appended is None:
        raise SeergateError(
            "this cache was used by the plain model in between, so the method has not seen all of its tokens; start a "
            "new one"
        )
    return appended


def valid_tokens(mask: Tensor | None, new: int, slots: int) -> Tensor | None:
    """Which of the new tokens are real, from the mask that transformers made for this layer.

    Args:
        mask: ``None``; 2D ``[B, T]`` (flash backends); or 4D ``[B, 1, S, T]``, bool or additive, of which the last
            query row sees every real token.
        new: number of new slots.
        slots: number of slots before them.

    Returns:
        Bool ``[B, new]``, or ``None`` if all are real.
    """
    if mask is None or (new == 1 and slots > 0 and mask.device.type != "cpu"):
        return None  # reading the mask would make the host wait; a token that is being decoded is real
    real = visible_slots(mask)
    real = real[:, slots : slots + new] if mask.ndim == 4 else real[:, -new:]
    return None if bool(real.all()) else real


def visible_slots(mask: Tensor) -> Tensor:
    """Which slots a mask shows, bool ``[B, T]``; see `valid_tokens` for its forms."""
    row = mask if mask.ndim == 2 else mask[:, 0, -1]
    if row.dtype == torch.bool:
        return row
    return row > 0 if mask.ndim == 2 else row == 0


def refuse_masked(layer: GatedLayer, valid: Tensor | None, new: int) -> None:
    """Refuse a decoded token that is masked, if the method evicts: it learns from every one's query.

    Raises:
        SeergateError: naming the row.
    """
    if valid is None or new > 1 or not isinstance(layer.method, CompressingMethod):
        return
    for row, real in enumerate(valid[:, 0].tolist()):
        if not real and layer.row_seen[row] > 0:
            raise SeergateError(
                f"the attention_mask hides the token that row {row} decodes, and {layer.method.name!r} counts every "
                "one; drop the row from the batch instead (cache.batch_select_indices)"
            )
