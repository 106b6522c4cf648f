"""Table of the models that can be gated, and where each family's pre-RoPE queries and keys are hooked.

Everything specific to an architecture is in one row of `FAMILIES`. A row includes the layout of the hooked tensors,
because the layout cannot be inferred from sizes when the sequence is as long as the number of heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from seergate.config import GateConfig
from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.gates.geometry import ModelGeometry
from seergate.models.rope import RopeKind, changing_rope, gate_frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Family:
    """Where the inputs of RoPE are hooked in one architecture, and what RoPE does.

    Attributes:
        hook_point: ``"proj"``: the outputs of ``q_proj`` and ``k_proj``; ``"norm"``: of ``q_norm`` and ``k_norm``;
            ``"fused"``: the output of ``qkv_proj``, split.
        layout: layout of the hooked tensors: ``"flat"`` ``[B, S, heads * D]``, ``"BSHD"`` or ``"BHSD"``.
        rope: how cached keys are computed from keys before RoPE: by RoPE alone, or in another way; see `Rotary`.
        rotates: whether an attention module has RoPE; ``None`` if all have.
    """

    hook_point: Literal["proj", "norm", "fused"]
    layout: Literal["flat", "BSHD", "BHSD"]
    rope: RopeKind = "plain"
    rotates: Callable[[Any], bool] | None = None


_PROJ = Family("proj", "flat")
FAMILIES: dict[str, Family] = {
    "llama": _PROJ,
    "qwen2": _PROJ,
    "qwen2_moe": _PROJ,
    "mistral": _PROJ,
    "ministral3": _PROJ,
    "mixtral": _PROJ,
    "gemma": _PROJ,
    "gemma2": _PROJ,
    "glm4": _PROJ,
    "granite": _PROJ,
    "smollm3": Family("proj", "flat", rotates=lambda attention: attention.use_rope),
    "cohere2": Family("proj", "flat", rotates=lambda attention: attention.sliding_window is not None),
    "seed_oss": _PROJ,
    "ernie4_5": _PROJ,
    "gpt_oss": _PROJ,
    "hunyuan_v1_dense": Family("proj", "flat", "other"),  # its norms come after RoPE
    "qwen3": Family("norm", "BSHD"),
    "qwen3_moe": Family("norm", "BSHD"),
    "qwen3_next": Family("norm", "BSHD"),  # q_proj also emits the output gate
    "qwen3_5_text": Family("norm", "BSHD"),
    "gemma3_text": Family("norm", "BHSD"),
    "gemma4_text": Family("norm", "BSHD", "other"),  # its function that applies RoPE has another signature
    "olmo2": Family("norm", "flat"),
    "olmo3": Family("norm", "flat"),
    "exaone4": Family(
        "norm", "BHSD", rotates=lambda attention: attention.sliding_window is None or attention.is_sliding
    ),
    "phi3": Family("fused", "flat"),
}

_MLA = "it uses multi-head latent attention, which has no per-head keys before RoPE to pool"
REFUSED: dict[str, str] = {
    "llama4_text": "it rotates queries and keys as complex numbers and normalises them after RoPE",
    "minimax_m3": "it already selects blocks with an indexer of its own",
    "gpt2": "it has no rotary positions and no grouped-query attention",
}


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of a model's language part; refuses anything but a language model of transformers."""
    config: Any = getattr(model, "config", None)
    if not (isinstance(model, nn.Module) and hasattr(config, "get_text_config") and hasattr(model, "get_decoder")):
        raise SeergateError(f"model is a {type(model).__name__}; it must be a causal language model of transformers")
    return config.get_text_config()


def base_commit(config: Any) -> str | None:
    """The commit of the Hub repository that a configuration was loaded from; ``None`` if unknown."""
    return getattr(config, "_commit_hash", None)


def family_of(config: Any) -> Family:
    """The row of a model's architecture in `FAMILIES`; refuses an unsupported architecture with the reason."""
    text = config.get_text_config()
    model_type = text.model_type
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = REFUSED.get(model_type, "its attention is not in the table of families in seergate/models/families.py")
    if getattr(text, "kv_lora_rank", None):
        reason = _MLA
    raise SeergateError(
        f"models of type {model_type!r} are not supported: {reason}; supported are {', '.join(sorted(FAMILIES))}"
    )


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The decoder stack, without the LM head."""
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise SeergateError(
            f"{type(model).__name__} has no stack of decoder layers; a causal language model is needed"
        )
    return decoder


def layer_type(config: Any, layer: int) -> str:
    """``"full_attention"``, ``"sliding_attention"``, ``"linear_attention"``, ... of one layer."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return str(types[layer])
    return "sliding_attention" if getattr(config, "sliding_window", None) is not None else "full_attention"


def window_of(model: PreTrainedModel, layer: int) -> int | None:
    """Sliding window of one layer in tokens, its own included; ``None`` without one, also in a model whose code has no
    windows, whatever its configuration says.
    """
    config, decoder = text_config(model), decoder_of(model)
    kinds = type(getattr(decoder, "_orig_mod", decoder)).__mro__  # a user's class may be a subclass
    masked = any(hasattr(sys.modules[kind.__module__], "create_sliding_window_causal_mask") for kind in kinds)
    return int(config.sliding_window) if masked and layer_type(config, layer) == "sliding_attention" else None


def has_full_attention(config: Any, layer: int) -> bool:
    """True if a layer attends to the whole text, also through a window that is at least as long as all positions.

    With RoPE parameters per layer type, layers of a window differ in more than the window, and do not count.
    """
    kind, positions = layer_type(config, layer), model_positions(config)
    if kind != "sliding_attention":
        return kind == "full_attention"
    own_rope = kind in (getattr(config, "rope_parameters", None) or {})
    return positions is not None and not own_rope and int(config.sliding_window) >= positions


def model_positions(text: Any) -> int | None:
    """Maximum number of positions, including RoPE scaling; ``None`` if the configuration does not have it."""
    own, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    if own is None:
        return None
    return max(int(own), int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or own)))


def check_positions(text: Any, tokens: int, what: str) -> None:
    """Raise `SeergateError` if ``what`` has more ``tokens`` than the model has positions."""
    positions = model_positions(text)
    if positions is not None and tokens > positions:
        raise SeergateError(f"{what} has {tokens:,} tokens; the model has {positions:,} positions")


def check_angles(text: Any, tokens: int, what: str) -> None:
    """Raise `SeergateError` if ``what`` has so many ``tokens`` that RoPE's frequencies change (`changing_rope`)."""
    if (changing := changing_rope(text)) is not None and tokens > changing[1]:
        raise SeergateError(f"{what} has {tokens:,} tokens; {why_no_longer(text)}")


def check_length(text: Any, tokens: int, what: str) -> None:
    """`check_positions` and `check_angles`."""
    check_positions(text, tokens, what)
    check_angles(text, tokens, what)


def usable_positions(text: Any) -> int | None:
    """Maximum length in tokens of a text that seergate decodes, scores or trains on: the model's positions, or fewer
    if its RoPE frequencies change beyond them (`changing_rope`); ``None`` if the configuration has no limit.
    """
    positions, changing = model_positions(text), changing_rope(text)
    if positions is None or changing is None:
        return positions
    return min(positions, changing[1])


def why_no_longer(text: Any) -> str:
    """The reason for `usable_positions`, in words."""
    positions, changing = model_positions(text), changing_rope(text)
    if changing is None or (positions is not None and positions <= changing[1]):
        return f"the model has {positions} positions"
    return (
        f"the model's {changing[0]} RoPE has other frequencies beyond {changing[1]} tokens, where cached keys and "
        "the rows of a batch would no longer fit together"
    )


def why_one_sequence(config: Any) -> str | None:
    """Why sequences of a model with this text ``config`` cannot be packed into one; ``None`` if they can."""
    layers = {layer_type(config, layer) for layer in range(config.num_hidden_layers)}
    stateful = sorted(layers - {"full_attention", "sliding_attention"})
    if not stateful:
        return None
    return f"the {', '.join(stateful)} layers of this {config.model_type} model carry a state from token to token"


def attention_modules(model: PreTrainedModel) -> Iterator[tuple[int, nn.Module]]:
    """Pairs of layer index and attention module, for every layer with softmax attention."""
    for layer, block in enumerate(decoder_of(model).layers):  # type: ignore[arg-type]
        attention = getattr(block, "self_attn", None)
        if attention is not None:
            yield layer, attention


def full_attention_modules(model: PreTrainedModel) -> list[tuple[int, nn.Module]]:
    """Pairs of layer index and attention module, for the layers that can be gated: all with full attention
    (`has_full_attention`) that do not share the keys and values of others. Refuses a model without such layers, and
    tensor parallelism.
    """
    config = text_config(model)
    family_of(config)
    parts = getattr(model, "tp_size", None)  # set by transformers' loader
    if isinstance(parts, int) and parts > 1:
        raise SeergateError(
            f"this model is split over {parts} devices by tensor parallelism, so a device has only part of each "
            "layer's heads, which seergate does not support; load it without tp_plan"
        )
    gated_layers = [
        (layer, attention)
        for layer, attention in attention_modules(model)
        if has_full_attention(config, layer) and not getattr(attention, "is_kv_shared_layer", False)
    ]
    for layer, attention in gated_layers:
        if not hasattr(attention, "num_key_value_groups"):
            raise SeergateError(
                f"layer {layer} has {type(attention).__name__} as its attention, which is not transformers' own; load "
                "the model without what replaced it (such as PEFT's adaption prompts)"
            )
    if not gated_layers:
        raise SeergateError(
            f"no layer of this {config.model_type} model has full attention (sliding_window is "
            f"{getattr(config, 'sliding_window', None)}), so there is nothing to make sparse"
        )
    return gated_layers


def kv_heads(model: PreTrainedModel) -> dict[int, int]:
    """Layer index -> number of KV heads, for layers that can be gated. Works on a model without weights."""
    heads = int(text_config(model).num_attention_heads)
    return {
        layer: heads // int(attention.num_key_value_groups)  # type: ignore[arg-type]
        for layer, attention in full_attention_modules(model)
    }


def rope_kind(config: Any, attention: Any) -> RopeKind:
    """Return whether and how an attention module rotates its keys; `Rotary` explains the values."""
    family = family_of(config)
    return family.rope if family.rotates is None or family.rotates(attention) else "none"


def head_dim_of(model: PreTrainedModel) -> int:
    """Head dimension of the layers that can be gated."""
    return int(full_attention_modules(model)[0][1].head_dim)  # type: ignore[arg-type]


def gate_geometry(model: PreTrainedModel, config: GateConfig) -> ModelGeometry:
    """The geometry that gates for this model must have. Refuses KV heads that do not divide the query heads."""
    base, modules = text_config(model), full_attention_modules(model)
    layer, attention = modules[0]
    own = base.per_layer_config[layer] if hasattr(base, "per_layer_config") else base  # each layer may have its own
    heads, kv_heads = base.num_attention_heads, getattr(own, "num_key_value_heads", None)
    if kv_heads and heads % kv_heads:  # transformers rounds down, then fails in the forward pass
        raise SeergateError(
            f"num_attention_heads is {heads} and num_key_value_heads is {kv_heads}; the first must be a multiple of "
            "the second"
        )
    inv_freq, scaling = (
        gate_frequencies(decoder_of(model), base, layer_type(base, layer), config.gate_dim)
        if config.rope
        else ((), 1.0)
    )
    return ModelGeometry(
        model_type=base.model_type,
        num_heads=heads,
        num_kv_heads=heads // int(attention.num_key_value_groups),  # type: ignore[arg-type]
        head_dim=int(attention.head_dim),  # type: ignore[arg-type]
        layers=tuple(layer for layer, _ in modules),
        inv_freq=inv_freq,
        attention_scaling=scaling,
        hidden_size=base.hidden_size,
        num_layers=base.num_hidden_layers,
        base_model=None if hasattr(model, "peft_config") else model.config.name_or_path or None,
        base_revision=base_commit(model.config),
    )


def check_eval_mode(model: PreTrainedModel) -> None:
    """Refuse a model in training mode, in which dropout may be active, or with parts that drop out by themselves."""
    parts = (each for each in model.modules() if isinstance(each, nn.Dropout) or hasattr(each, "attention_dropout"))
    if model.training or any(each.training for each in parts):
        raise SeergateError("the base model is in training mode; call model.eval() first")


def check_gates(model: PreTrainedModel, bank: Gates) -> None:
    """Refuse gates that were trained for another model."""
    problems = bank.geometry.mismatches(gate_geometry(model, bank.config))
    if problems:
        raise SeergateError(f"these gates are for another model: {'; '.join(problems)}")
