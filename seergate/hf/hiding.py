"""Masks that hide tokens which a cache holds: what a row said after its end, while others of the batch went on.

The next turn of a chat comes with such a mask. The row is cropped to what is still visible, its slots become padding.
"""

from __future__ import annotations

from torch import Tensor

from seergate.cache.layer import GatedLayer
from seergate.errors import SeergateError
from seergate.hf.call import visible_slots
from seergate.methods.evicting import CompressingMethod
from seergate.reason.paged_layer import PagedLayer


def hide_what_is_masked(layer: GatedLayer, mask: Tensor | None, new: int) -> None:
    """Forget what a later mask hides.

    Args:
        layer: the cache.
        mask: see `valid_tokens`.
        new: number of new slots; one that is decoded alone hides nothing that was read before.

    Raises:
        SeergateError: if later tokens of the row stay, or if the layer cannot take back those of one row.
    """
    slots = layer.slots if new > 1 and mask is not None else 0
    if not slots or mask is None or (mask.ndim == 2 and mask.shape[1] < slots + new):  # or it is of the new ones only
        return
    known = layer.real_slots()
    hidden = known & ~visible_slots(mask)[:, :slots].to(layer.device)
    if bool(hidden.any()):
        _forget(layer, known, hidden)


def _forget(layer: GatedLayer, known: Tensor, hidden: Tensor) -> None:
    real = known & ~hidden
    after = real.sum(1)
    later = (known.cumsum(1) * real).amax(1) > after  # the place of the last one that stays
    row = int((later if later.any() else hidden.any(1)).int().argmax())
    held = f"the attention_mask hides tokens of row {row} that the cache holds"
    if later.any():
        raise SeergateError(
            f"{held}, and shows later ones; only the newest tokens of a row can be taken back, so start a new cache"
        )
    if isinstance(layer.method, CompressingMethod) or isinstance(layer, PagedLayer):
        raise SeergateError(
            f"{held}, which a {type(layer).__name__} under {layer.method.name!r} cannot take back; start a new one, "
            "or leave them visible"
        )
    layer.valid = real
    layer.shorten(after.tolist())
