"""Hooks of gated layers.

The pre-hook of an attention module finds the cache layer and determines the real (not padding) tokens and the mode of
the forward pass: the `ForwardContext`. The module then runs without a cache and calls its attention function, which
stores the new tokens and attends (`seergate.decode.step`). A module whose keys and values later layers read stores
them earlier, by `LayerBinding.update`.

Shape suffixes: B batch, S new tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from seergate.cache.forward import PROMPT, TWO_THREADS, ForwardContext, ForwardModes, cache_keyword, cache_of
from seergate.cache.layer import GatedLayer
from seergate.cache.storage import KVBackend
from seergate.decode.compatibility import refuse
from seergate.decode.rectify import Rectification
from seergate.decode.stats import DecodeStats
from seergate.decode.step import check_continuation, gated_attention
from seergate.decode.trace import Trace
from seergate.errors import SeergateError
from seergate.methods.base import LayerSpec, Method
from seergate.methods.evicting import CompressingMethod
from seergate.models import families
from seergate.models.masks import hide_what_is_masked, refuse_masked, valid_tokens
from seergate.models.rope import Rotary, modeling_module

ATTENTION_NAME = "seergate"
TRANSFORMERS_PAGES = (
    'transformers\' own paged cache (generate_batch, cache_implementation="paged") is read densely: the attached '
    "method knows nothing of it; use generate, with attach(storage=seergate.Paging()) for pages"
)
LABELS = (
    "several tokens at once are read densely, like a prompt, so a loss of them is dense attention's and says nothing "
    "of {!r}; seergate.score gives the log-probabilities of a text under the method"
)


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


_REPLACED = (
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
            raise SeergateError(_REPLACED.format(type(attention).__name__, ""))
        if family.hook_point == "fused":
            self._catching["qkv_proj"] = self._catch_fused
        else:
            self._catching |= {f"{name}_{family.hook_point}": partial(self._catch, name) for name in self._heads}
        self._hook()

    def _hook(self) -> None:
        self._modules = {name: self._attention.get_submodule(name) for name in self._catching}
        self._handles = [self._modules[name].register_forward_hook(catch) for name, catch in self._catching.items()]

    def follow(self) -> None:
        """Move the hooks to the modules that have replaced the hooked ones, as when PEFT adds or merges adapters, and
        behind hooks that were added later, which may change the output.
        """
        replaced = any(getattr(self._attention, name) is not module for name, module in self._modules.items())
        if replaced or not (is_compiling() or all(map(_is_last, self._modules.values(), self._handles))):
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


def _is_last(module: nn.Module, handle: RemovableHandle) -> bool:
    return next(reversed(module._forward_hooks), None) == handle.id


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


class WithoutBackward(torch.autograd.Function):
    """Returns the output of a layer whose cached keys and values have no gradient; a backward pass fails."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SeergateError(
            "no gradient flows through decoded or cached tokens under an attached method; pass a whole text at once, "
            "with a new dynamic cache or none"
        )


class SingleThreadGuard:
    """Refuses a second thread while the decoder's forward pass runs, since the hooks would mix up their tensors, and
    releases what a failed pass has left in the hooks.
    """

    def __init__(self, decoder: nn.Module, handle: Attachment) -> None:
        self._decoder, self._handle, self._passes, self._thread = decoder, handle, handle.passes, get_ident()
        # A forward hook with always_call would see the end of a pass, but torch.compile would recompile per handle.
        self._hook = decoder.register_forward_pre_hook(self._enter)

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if is_compiling():  # a compiled graph runs as one call
            return
        if module is not self._decoder:
            raise SeergateError("DataParallel shares an attached method among replicas; use one process per GPU")
        thread = get_ident()
        before, self._thread = self._thread, thread
        if self._passes.thread not in (None, thread) or (before != thread and _runs(before, module)):
            self._thread = before
            raise SeergateError(TWO_THREADS)
        for binding in self._handle.bindings:
            binding.forget()


def _runs(thread: int, module: nn.Module) -> bool:
    """Return whether a thread is inside a call of the module."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_locals.get("self") is not module:
        frame = frame.f_back
    return frame is not None


class Attachment:
    """A method attached to a model: the part that layers use. `attach.Handle` is the public subclass."""

    def __init__(self, model: PreTrainedModel, method: Method, storage: KVBackend, measure_recall: bool) -> None:
        layers = [layer for layer, _ in families.full_attention_modules(model)]
        self.model, self.method, self.measure_recall = model, method, measure_recall
        self.storage, self.stats_ = storage.bind(model, method, layers), DecodeStats(layers)
        self.passes = ForwardModes(decodes_drafts=not isinstance(method, CompressingMethod))
        self.correction: Rectification | None = None
        self.trace: Trace | None = None
        self.bindings: list[LayerBinding] = []
        self.labels_hook = model.register_forward_pre_hook(self._warn_of_labels, with_kwargs=True)

    @property
    def compiles(self) -> bool:
        """Whether decode steps may be compiled: the method, a trace, recall, other statistics or a correction may need
        values on the host.
        """
        observed = self.trace is not None or self.measure_recall or type(self.stats_) is not DecodeStats
        return self.method.fixed_shapes and not observed and self.correction is None

    def _warn_of_labels(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Warn once of a forward pass with labels, since its loss is computed with dense attention."""
        if kwargs.get("labels") is not None and self.method.name != "dense":
            warnings.warn(LABELS.format(self.method.name), stacklevel=2)
            self.labels_hook.remove()


class LayerBinding:
    """One gated layer of an attached model."""

    def __init__(self, handle: Attachment, layer: int, attention: nn.Module) -> None:
        self.handle, self.layer, self.attention = handle, layer, attention
        self.first = layer == next(iter(handle.stats_.layers))
        decoder: Any = families.decoder_of(handle.model)
        self.decoder_config, self.num_layers = decoder.config, len(decoder.layers)
        self.spec = layer_spec(handle.model, layer, attention)
        self.window = families.window_of(handle.model, layer)  # as long as all positions, if any
        self.shared = bool(getattr(attention, "store_full_length_kv", False))  # later layers read its keys and values
        self.qk_hook = QKHook(handle.model, attention)
        self.arriving: tuple[GatedLayer, ForwardContext] | None = None  # set by the pre-hook, used by `attend`
        self.swap = AttentionSwap(attention, self.before_forward, self.attend)
        self._after = attention.register_forward_hook(self.after_forward)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have no part in a forward pass."""
        return {**vars(self), "arriving": None}

    def forget(self) -> None:
        """Release the tensors of a forward pass."""
        self.arriving = None
        self.qk_hook.forget()

    def remove(self) -> None:
        """Remove all hooks and restore the module's configuration."""
        self.swap.undo()
        self._after.remove()
        self.qk_hook.remove()

    def before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Make the forward context, and let the module run without the cache: `attend` stores its new tokens. A module
        whose keys and values later layers read (Gemma 4) stores them by `update` instead, to pass on those of all
        slots.
        """
        self.qk_hook.follow()
        cache, self.arriving = cache_of(kwargs), None
        if paged := cache is not None and not isinstance(cache, Cache):
            warnings.warn(TRANSFORMERS_PAGES, stacklevel=2)
        if cache is None or paged:
            return args, kwargs
        hidden = attention_input(args, kwargs)
        new = hidden.shape[1]
        layer, valid = self.cache_layer(cache, new), None
        on_host = not self._is_compiled(layer, new)
        slots, passes = layer.rows.slots if on_host else None, self.handle.passes
        if self.first:
            passes.begin(slots)
        if slots is not None:
            for index, held in self._ungated_lengths(cache, new) if self.first else [(self.layer, slots)]:
                if passes.slots is not None and held != passes.slots:
                    crop = "" if self.first else "crop the cache to the smaller number, or "
                    raise SeergateError(
                        f"layer {index} of this cache holds {held:,} tokens and others {passes.slots:,}: a pass "
                        f"failed or was interrupted; {crop}start a new one"
                    )
            if self.window is not None and slots + new > self.window:
                raise SeergateError(
                    f"the text has {slots + new:,} tokens, more than layer {self.layer} attends to (its "
                    f"sliding_window is {self.window:,}) and than the model has positions"
                )
            shown = self._shown_slots(cache, layer, kwargs.get("attention_mask"), hidden)
            if shown is not None:
                if slots:
                    hide_what_is_masked(layer, shown[:, :slots])
                valid = None if bool(shown[:, slots:].all()) else shown[:, slots:]
            if valid is not None and new == 1:
                refuse_masked(layer, valid)
        mode = PROMPT if layer.reading else passes.mode(cache, slots or 0, new)
        if valid is not None and new > 1 and not valid[:, new - mode.decoded :].all():
            raise SeergateError(
                "the attention_mask hides tokens that are to be decoded; only a prompt may have padding"
            )
        check_continuation(layer, mode, new)
        positions = kwargs.get("position_ids")
        self.arriving = layer, ForwardContext(mode, valid, positions, hidden, on_host, passes)
        return args, {**kwargs, cache_keyword(kwargs): self if layer.shared else None}

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Refuse a module that did not come to `attend`; it has attended to its new tokens only."""
        if self.arriving is not None:
            raise SeergateError(_REPLACED.format(type(module).__name__, f" of layer {self.layer}"))

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens as a cache does, for a module whose keys and values later layers read."""
        assert self.arriving is not None
        layer, context = self.arriving
        context.take(*self.qk_hook.take())
        return layer.store(context, key, value)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The module's attention function, as `seergate_attention`."""
        arriving, self.arriving = self.arriving, None
        if arriving is None:
            self.qk_hook.take()
            return self.swap.dense(query, key, value, attention_mask, **kwargs)
        layer, context = arriving
        if context.rows is None:
            context.take(*self.qk_hook.take())
        output, weights = gated_attention(
            self.handle, layer, context, self.swap.dense, query, key, value, attention_mask, **kwargs
        )
        reads_cache = context.mode.decoded or layer.static_length is not None or any(context.starts)
        inputs = query, key, value
        if torch.is_grad_enabled() and reads_cache and context.on_host and any(x.requires_grad for x in inputs):
            output = WithoutBackward.apply(output, *inputs)
        return output, weights

    def _ungated_lengths(self, cache: Cache, new: int) -> list[tuple[int, int]]:
        """Ungated attention layers of a cache, and the tokens that they held before the pass, in the first gated layer
        of it. A cache may have more layers than the model runs.
        """
        kinds = DynamicLayer, StaticSlidingWindowLayer
        run = min(self.num_layers, self.decoder_config.num_hidden_layers)
        ungated = [(i, x) for i, x in enumerate(cache.layers[:run]) if isinstance(x, kinds)]
        return [(i, int(x.get_seq_length()) - new * (i < self.layer)) for i, x in ungated]

    def _shown_slots(self, cache: Cache, layer: GatedLayer, mask: Tensor | None, hidden: Tensor) -> Tensor | None:
        """Return `valid_tokens`. A mask that agrees with the first layer's cache is not read again in the others."""
        handle, new, slots = self.handle, hidden.shape[1], layer.rows.slots
        if mask is None or (not self.first and handle.passes.agreed is not None and handle.passes.agreed() is mask):
            return None
        if new == 1 and handle.passes.generates(cache):
            return None  # `generate` extends the mask of the prompt by ones; reading it would wait for the device
        if layer.static_length is not None and slots + new > layer.static_length:
            return None  # the layer refuses the tokens
        real = layer.rows.real_slots() if slots else hidden.new_ones(len(hidden), 0, dtype=torch.bool)
        shown = valid_tokens(mask, real, new)
        handle.passes.agreed = ref(mask) if shown is None else None
        return shown

    def _is_compiled(self, layer: Any, new: int) -> bool:
        """Return whether this is a compiled decode step, in which values that change are not available on the host."""
        if not is_compiling() or new > 1 or not isinstance(layer, GatedLayer) or layer.counts is None:
            return False
        if self.handle.passes.in_chunks or self.handle.passes.phase == "dense":  # read as a prompt
            return False
        return layer.counts is self.handle.stats_.layers[self.layer].compiled and self.handle.compiles

    def cache_layer(self, cache: Cache, new: int = 1) -> GatedLayer:
        """Return this layer of a cache that gets ``new`` tokens; an empty layer is replaced by a `GatedLayer`."""
        if getattr(cache, "offloading", False):
            raise SeergateError(
                "this cache offloads its layers, which seergate does not support; leave it out, and attach with "
                "storage=seergate.Offload(...)"
            )
        layers, method = cache.layers, self.handle.method
        while len(layers) <= self.layer:  # a cache without a configuration creates its layers on demand
            if cache.layer_class_to_replicate is None:
                raise SeergateError(
                    f"this cache has {len(layers)} layers, fewer than the model; make it for this model"
                )
            layers.append(cache.layer_class_to_replicate())
        layer = layers[self.layer]
        if self._is_compiled(layer, new):
            return layer
        if not isinstance(layer, GatedLayer) or layer.rows.slots == 0:
            layers[self.layer] = layer = self._new_layer(cache)
        elif layer.method is not method and layer.method != method:
            raise SeergateError(f"this cache was filled under {layer.method!r}; start a new one for {method!r}")
        else:
            layer.storage.resume(self.handle.storage)
        return layer

    def _new_layer(self, cache: Cache) -> GatedLayer:
        """Create the gated layer that replaces an empty layer of a cache."""
        layer, handle = cache.layers[self.layer], self.handle
        if isinstance(layer, GatedLayer):
            static_length = layer.static_length
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            static_length = None
        elif type(layer) in (StaticLayer, StaticSlidingWindowLayer):
            static_length = layer.max_cache_len
        else:
            raise SeergateError(
                f"layer {self.layer} of the cache is a {type(layer).__name__}; seergate replaces DynamicLayer and "
                "StaticLayer"
            )
        if int(layer.get_seq_length()) > 0:
            raise SeergateError(
                "this cache was filled by the plain model, so the method has not seen its tokens; start a new one"
            )
        if static_length is not None:
            refuse({handle.storage.tag: handle.storage.tag, "static": "static"})
        method, correction = handle.method, handle.correction
        compiles = static_length is not None and method.fixed_shapes and correction is None and not self.shared
        storage = handle.storage.new(self.layer, cache.layers, static_length)
        anchor = method.anchor_of(self.layer)
        readers = (layer for layer in handle.stats_.layers if method.anchor_of(layer) == anchor)
        facts = storage, method, self.layer, self.spec.num_heads, self.spec.rotary
        return GatedLayer(*facts, self.shared, compiles, anchor, max(readers, default=self.layer))
