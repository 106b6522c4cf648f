"""Checks of a server's model and gates before it loads any weights."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.methods import SelectingMethod
from seergate.models.families import check_gates, full_attention_modules, kv_heads, layer_type, rope_kind, text_config
from seergate.models.loading import skeleton
from seergate.models.resolving import check_anchors
from seergate.models.rope import RopeKind, changing_rope


def check_model(hf_config: Any, bank: Gates | None, method: SelectingMethod) -> None:
    """Refuse gates for another model, layers that the model lacks, and attention that cannot be made sparse."""
    model, text, dense_layers = skeleton(hf_config), hf_config.get_text_config(), method.dense_layers
    kinds, layers = rope_kinds(model), text.num_hidden_layers
    if bank is not None:
        check_gates(model, bank)
    if absent := [layer for layer in dense_layers if layer >= layers]:
        raise SeergateError(f"seergate.dense_layers holds {absent}; the model has the layers 0..{layers - 1}")
    if not set(kinds) - set(dense_layers):
        raise SeergateError(f"seergate.dense_layers holds {list(dense_layers)}; that leaves no layer to make sparse")
    check_anchors(method, kv_heads(model))
    if any(layer_type(text, layer) == "sliding_attention" for layer in kinds):
        raise SeergateError(
            f"sliding_window is {text.sliding_window}, as long as the model's positions; inside a server it must be "
            "null in the model's configuration, which computes the same"
        )
    if (changing_rope(text) or ("",))[0] == "longrope":
        raise SeergateError(
            "models with longrope are not supported inside a server: its table of angles has another form"
        )
    if "other" in kinds.values():
        raise SeergateError(
            f"models of type {text.model_type!r} are not supported inside a server: their "
            "cached keys are not simply rotated ones, so the keys before RoPE cannot be computed from them"
        )


def check_keys(bank: Gates) -> None:
    """Refuse gates that do not keep exactly one compressed key per block and KV head."""
    if bank.config.retention or next(iter(bank))[1].entry_tokens != bank.config.block_size:
        raise SeergateError(
            f"these gates have the scorer {bank.config.scorer!r}; a server's cache keeps all tokens and has room for "
            "one compressed key per block and KV head: train gates with --scorer attn_gate"
        )


def rope_kinds(model: PreTrainedModel) -> dict[int, RopeKind]:
    """Full-attention layer -> how its cached keys follow from keys before RoPE. Refuses attention-sink logits."""
    modules = full_attention_modules(model)
    if any(getattr(attention, "sinks", None) is not None for _, attention in modules):
        raise SeergateError(
            f"models of type {text_config(model).model_type!r} are not supported inside a server: its paged kernels "
            "take attention sinks for all heads together, and each KV head is a sequence of its own here"
        )
    return {layer: rope_kind(text_config(model), attention) for layer, attention in modules}
