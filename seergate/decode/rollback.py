"""Which layers can take tokens back: what drafts and dense second passes over a cache need."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from seergate.errors import SeergateError
from seergate.hf import families


def refuse_layers_without_return(model: PreTrainedModel, what: str) -> None:
    """Refuse a model with layers whose state cannot be rolled back.

    Raises:
        SeergateError: naming their kind.
    """
    config = families.text_config(model)
    kinds = {families.layer_type(config, layer) for layer in range(config.num_hidden_layers)}
    if stuck := sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"}):
        raise SeergateError(
            f"{what} takes tokens back, which layers of kind {', '.join(stuck)} cannot do; "
            f"decode this {config.model_type} model without it"
        )


def layers_without_return(cache: Cache | None) -> list[str]:
    """The kinds of a cache's layers that cannot take tokens back, such as a static one with a window."""
    layers = [] if cache is None else cache.layers
    return sorted({type(layer).__name__ for layer in layers if not hasattr(layer, "crop")})


def refuse_changing_angles(model: PreTrainedModel) -> None:
    """Refuse RoPE whose angles depend on how far a pass reaches: tokens verified together would get other ones.

    Raises:
        SeergateError: naming the kind.
    """
    rope = getattr(families.text_config(model), "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if changing := sorted(kinds & {"dynamic", "longrope"}):
        raise SeergateError(
            f"lossless decoding verifies several tokens in one pass, and {changing[0]} RoPE turns a token by how "
            "far a pass reaches; decode this model without it"
        )
