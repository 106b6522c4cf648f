"""Hooks that catch the queries and keys of an attention module, and take the place of its attention function.

Shape suffixes: B batch, S new tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from seergate.errors import SeergateError
from seergate.methods.base import LayerSpec
from seergate.models import families
from seergate.models.rope import Rotary, modeling_module

ATTENTION_NAME = "seergate"


def seergate_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function of the modules whose configuration names ``"seergate"``: that of their `AttentionSwap`.

    Args:
        query: ``[B, H, S, D]``. key, value: ``[B, K, T, D]``.

    Returns:
        Output ``[B, S, H, D]``, and attention weights or ``None``.
    """
    swapped: Any = module.seergate_attention
    return swapped(query, key, value, attention_mask, **kwargs)


AttentionInterface.register(ATTENTION_NAME, seergate_attention)  # here, as unpickled models need it


def layer_spec(model: PreTrainedModel, layer: int, attention: Any) -> LayerSpec:
    """Return the `LayerSpec` of a layer for one row, from which a method creates its state."""
    config = families.text_config(model)
    heads, kind = int(config.num_attention_heads), families.rope_kind(config, attention)
    rotary = Rotary(families.decoder_of(model), attention, families.layer_type(config, layer), kind)
    kv_heads = heads // int(attention.num_key_value_groups)
    return LayerSpec(layer, 1, heads, kv_heads, int(attention.head_dim), model.dtype, model.device, rotary)


def attention_input(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states ``[B, S, W]`` from the arguments of an attention module."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


REPLACED = (
    "the code of {}{} is not transformers' own, or was replaced, as by unsloth, so the attention function that its "
    "configuration names may not be called; load the model without trust_remote_code and without patches of its "
    "attention"
)


class QKHook:
    """Captures the RoPE inputs of one attention module as ``[B, heads, S, D]`` views, without a copy.

    Its hooks are on modules inside of the attention module; `follow` finds out when these were replaced.
    """

    def __init__(self, model: PreTrainedModel, attention: nn.Module) -> None:
        module: Any = attention
        config = families.text_config(model)
        family, heads = families.family_of(config), int(config.num_attention_heads)
        self._heads = {"q": heads, "k": heads // int(module.num_key_value_groups)}
        self._head_dim, self._layout = int(module.head_dim), family.layout
        self._caught: dict[str, Tensor] = {}
        self._attention, self._catching = attention, dict[str, Any]()
        rope = getattr(modeling_module(attention), "apply_rotary_pos_emb", None)
        if getattr(rope, "__module__", "").startswith("liger_kernel"):
            raise SeergateError(
                "Liger's RoPE overwrites the queries and keys that it rotates, which gates and methods read before; "
                "patch the model with rope=False (apply_liger_kernel_to_...(rope=False))"
            )
        kinds = type(getattr(attention, "_orig_mod", attention)).__mro__  # what a subclass adds is checked as it runs
        codes = [inspect.unwrap(vars(kind)["forward"]) for kind in kinds if "forward" in vars(kind)]
        if not any(str(getattr(code, "__module__", "")).startswith("transformers.") for code in codes):
            raise SeergateError(REPLACED.format(type(attention).__name__, ""))
        if family.hook_point == "fused":
            self._catching["qkv_proj"] = self._catch_fused
        else:
            self._catching |= {f"{name}_{family.hook_point}": partial(self._catch, name) for name in self._heads}
        self._hook()

    def _hook(self) -> None:
        self._modules = {name: self._attention.get_submodule(name) for name in self._catching}
        self._handles = [self._modules[name].register_forward_hook(catch) for name, catch in self._catching.items()]

    def follow(self) -> None:
        """Move the hooks to the modules that have replaced the hooked ones, as when PEFT adds or merges adapters."""
        if any(getattr(self._attention, name) is not module for name, module in self._modules.items()):
            self.remove()
            self._hook()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return and release the queries ``[B, H, S, D]`` and keys ``[B, K, S, D]`` of the current call."""
        caught, self._caught = self._caught, {}
        return caught["q"], caught["k"]

    def forget(self) -> None:
        """Release what a pass without `take` has left."""
        self._caught = {}

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have no part in a forward pass."""
        return {**vars(self), "_caught": {}}

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _catch(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self._caught[name] = self._heads_first(output, self._heads[name])

    def _catch_fused(self, module: nn.Module, args: Any, output: Tensor) -> None:
        q_width, k_width = (heads * self._head_dim for heads in self._heads.values())
        self._caught["q"] = self._heads_first(output[..., :q_width], self._heads["q"])
        self._caught["k"] = self._heads_first(output[..., q_width : q_width + k_width], self._heads["k"])

    def _heads_first(self, x: Tensor, heads: int) -> Tensor:
        x = x.detach() if x.requires_grad else x
        if self._layout == "BHSD":
            return x
        batch, new = x.shape[:2]
        if new == 1:
            return x.view(batch, heads, 1, self._head_dim)
        return x.view(batch, new, heads, self._head_dim).transpose(1, 2)


class AttentionSwap:
    """Replaces the attention function of one module, by its own configuration that names `seergate_attention`.

    Args:
        attention: the module.
        pre_hook: ``(module, args, kwargs) -> (args, kwargs)``, called before the module.
        function: takes ``(query, key, value, attention_mask, **kwargs)``; as `seergate_attention`.
    """

    def __init__(self, attention: nn.Module, pre_hook: Any, function: Callable[..., Any]) -> None:
        self._attention, self._config = attention, attention.config
        own: Any = copy.copy(attention.config)
        own._attn_implementation_internal = ATTENTION_NAME
        self._swapped = vars(attention).get("seergate_attention")  # of a method that is attached while gates train
        attention.config, attention.seergate_attention = own, function  # type: ignore[assignment]
        self._handle = attention.register_forward_pre_hook(pre_hook, with_kwargs=True)

    def dense(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The model's original attention; arguments as in ``function``.

        Some implementations read their own name from the module's configuration, so it is set there while they run.
        """
        config, own = cast(Any, self._config), cast(Any, self._attention.config)
        name = str(config._attn_implementation)
        eager = getattr(modeling_module(self._attention), "eager_attention_forward", None)
        own._attn_implementation_internal = name
        try:
            return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)(self._attention, *args, **kwargs)
        finally:
            own._attn_implementation_internal = ATTENTION_NAME

    def undo(self) -> None:
        """Remove the pre-hook and restore the module's configuration and attention function."""
        self._handle.remove()
        self._attention.config = self._config
        del self._attention.seergate_attention
        if self._swapped is not None:
            self._attention.seergate_attention = self._swapped
