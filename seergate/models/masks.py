"""Padding as attention masks show it: which slots of the cache and which new tokens are real.

Shape suffixes: B batch, S new tokens, T slots, H query heads, R some of the new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from seergate.cache.layer import GatedLayer
from seergate.errors import SeergateError
from seergate.methods.evicting import CompressingMethod

HIDDEN = -1e4
"""An additive mask hides what it adds this or less to."""
MASK_PIECE = 2**26
"""Number of elements of a mask that are compared at a time."""
FLEX = (
    "the model's attention is flex_attention, whose masks do not tell padding; load it with "
    'attn_implementation "sdpa", "eager" or "flash_attention_2"'
)


def valid_tokens(mask: Tensor, real: Tensor, new: int) -> Tensor | None:
    """Determine which slots transformers' mask for this layer shows. Reads the mask on the host, once.

    Args:
        mask: 2D ``[B, T]`` (flash backends), or 4D ``[B, 1, S, T]`` or ``[B, H, S, T]``, bool or additive.
        real: bool ``[B, slots]``, which slots before the new ones hold real tokens.
        new: number of new slots.

    Returns:
        Bool ``[B, slots + new]``; ``None`` if these are the real ones and all new ones, so that nothing is hidden.

    Raises:
        SeergateError: for a 4D mask that is not causal over the slots that its last row shows, or shows slots that the
            cache does not hold.
    """
    if not isinstance(mask, Tensor):  # the implementation was changed after a method was attached
        raise SeergateError(FLEX)
    (batch, slots), real = real.shape, real.to(mask.device)
    causal = torch.ones((), dtype=torch.bool, device=mask.device)
    if mask.ndim == 2:
        shown = mask if mask.dtype == torch.bool else mask > 0
        before = shown[:, :slots] if mask.shape[1] >= slots + new else real  # it may cover only the new tokens
        shown = torch.cat((before, shown[:, -new:]), dim=1)
    elif mask.ndim != 4 or mask.shape[-1] < slots + new or mask.shape[-2] != new:
        raise SeergateError(
            f"the attention_mask has the shape {tuple(mask.shape)}; for {new} new tokens after {slots} slots of the "
            f"cache it must be [B, 1, {new}, {slots + new}]"
        )
    else:
        shown, causal = causal_slots(mask, slots)
        shown = shown.expand(batch, -1)
    if (shown == pad(real, (0, new), value=True)).all() & causal:
        return None
    if not causal:
        raise SeergateError(
            "the 4D attention_mask is not that of a text with padding: each token must see all real tokens up to "
            "itself (0 or True) and nothing else (-inf or False); other patterns (trees, images, several texts "
            "in a row, biases, head by head) cannot be kept in the cache, so pass a 2D mask, and one text per row"
        )
    if (shown[:, :slots] & ~real).any():
        raise SeergateError(
            "the attention_mask shows tokens that were padding when they came, which the cache does not hold; start a "
            "new cache with the mask that shows them"
        )
    return shown


def causal_slots(mask: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Read a 4D mask of the tokens after ``slots`` slots.

    Returns:
        The slots that the last row shows, bool ``[B, slots + S]``; and whether the mask is causal over these, bool
        scalar. A token that is none of them is padding, and sees nothing, everything or itself.
    """
    new, width = mask.shape[-2:]
    shown_BT = _shown(mask[:, 0, -1])
    causal = torch.ones((), dtype=torch.bool, device=mask.device)
    places_T = torch.arange(width, device=mask.device)
    size, begin = max(1, MASK_PIECE // (mask.numel() // new)), slots
    for piece_BHRT in mask.split(size, dim=2):
        end = begin + piece_BHRT.shape[2]
        seen_BHRT, own_R1 = _shown(piece_BHRT), places_T[begin:end, None]
        if mask.is_floating_point():
            causal = causal & ((piece_BHRT == 0) | (piece_BHRT <= HIDDEN)).all()
        causal_BRT = shown_BT[:, None] & (places_T <= own_R1)
        right_BHR = (seen_BHRT == causal_BRT[:, None]).all(-1)
        alone_BHR = (seen_BHRT == (places_T == own_R1)).all(-1) | ~seen_BHRT.any(-1) | seen_BHRT.all(-1)
        padding_B1R = ~shown_BT[:, None, begin:end]
        causal = causal & (right_BHR | (alone_BHR & padding_B1R)).all()
        begin = end
    return shown_BT[:, : slots + new], causal


def _shown(mask: Tensor) -> Tensor:
    return mask == 0 if mask.is_floating_point() else mask.bool()


def refuse_masked(layer: GatedLayer, valid: Tensor) -> None:
    """Raise `SeergateError` if a decoded token is masked, ``valid [B, 1]``, and the method evicts, since it uses every
    token's query.
    """
    if not isinstance(layer.method, CompressingMethod):
        return
    rows = zip(valid[:, 0].tolist(), layer.rows.total, strict=False)  # none in a new cache
    for row, (real, total) in enumerate(rows):
        if not real and total > 0:
            raise SeergateError(
                f"the attention_mask hides the token that row {row} decodes, and {layer.method.name!r} counts every "
                "one; drop the row from the batch instead (cache.batch_select_indices)"
            )


def hide_what_is_masked(layer: GatedLayer, shown: Tensor) -> None:
    """Remove tokens from the cache layer that the mask of a later forward pass hides.

    Args:
        shown: bool ``[B, slots]``, the slots that the mask shows (`valid_tokens`).

    Raises:
        SeergateError: if the row has later tokens that stay visible, or the layer cannot remove tokens of one row.
    """
    cached = layer.rows.real_slots()
    hidden = cached & ~shown.to(layer.device)
    if not hidden.any():
        return
    real = cached & ~hidden
    after = real.sum(1)
    later = (cached.cumsum(1) * real).amax(1) > after  # rows in which a token that stays follows a hidden one
    row = int((later if later.any() else hidden.any(1)).int().argmax())
    fault = f"the attention_mask hides tokens of row {row} that the cache holds"
    if later.any():
        raise SeergateError(
            f"{fault}, and shows later ones; only the newest tokens of a row can be taken back, so start a new cache"
        )
    if isinstance(layer.method, CompressingMethod) or not layer.storage.shortens_rows:
        raise SeergateError(
            f"{fault}, which a {type(layer).__name__} under {layer.method.name!r} cannot take back; start a new one, "
            "or leave them visible"
        )
    layer.hide(real)
