"""attach / detach: turns the gated layers of a live model over to a method, and back, leaving everything else alone.

Per gated attention module: its own copy of the configuration names our attention function (the model's configuration,
which decides how masks are made, stays as it is), taps catch pre-RoPE q and k, and a pre-hook passes the cache layer
along.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from seergate.cache.layer import GatedLayer
from seergate.cache.offload import Offload, OffloadedLayer
from seergate.cache.static import FixedLayer
from seergate.config import DecodeConfig
from seergate.decode.break_even import resolved
from seergate.decode.dense_pass import attend_densely
from seergate.decode.lossless import Lossless
from seergate.decode.rectify import Rectifier
from seergate.decode.stats import DecodeStats
from seergate.decode.step import ATTENTION_NAME, CALL_KEYWORD, attend, dense_function, register
from seergate.decode.trace import Trace, TracedStats
from seergate.errors import SeergateError
from seergate.hf import families
from seergate.hf.bank import GateBank
from seergate.hf.call import Arrival, refuse_masked, valid_tokens
from seergate.hf.hiding import hide_what_is_masked
from seergate.hf.prompts import PromptReader
from seergate.hf.resolving import check_calibration, check_dense_layers, check_gates, resolve_method
from seergate.hf.rope import Rotary
from seergate.methods import Gate, GateOnEvictor, Method, SelectingMethod
from seergate.reason.method import ReasonCache
from seergate.reason.paged_layer import CachePages, PagedLayer, Paging
from seergate.reason.pager import Pager
from seergate.reason.sharing import give_up

_HANDLE = "_seergate_handle"
Counts = TypeVar("Counts", bound=DecodeStats)
TRANSFORMERS_PAGES = (
    'transformers\' own paged cache (generate_batch, cache_implementation="paged") is read densely: the attached '
    "method knows nothing of it; use generate, with attach(paging=...) for pages"
)


class AttentionSwap:
    """Puts one attention module's own configuration on our attention function, with a pre-hook; `undo` restores both.

    Args:
        attention: the module.
        pre_hook: ``(module, args, kwargs) -> (args, kwargs)``.
    """

    def __init__(self, attention: nn.Module, pre_hook: Any) -> None:
        register()
        self._attention, self._config = attention, attention.config
        own: Any = copy.copy(attention.config)
        own._attn_implementation_internal = ATTENTION_NAME
        attention.config = own
        self._handle = attention.register_forward_pre_hook(pre_hook, with_kwargs=True)

    def undo(self) -> None:
        """Take everything back."""
        self._handle.remove()
        self._attention.config = self._config


class DecodeBinding:
    """One gated layer under a handle."""

    def __init__(self, handle: Handle, layer: int, attention: nn.Module) -> None:
        model = handle.model
        config = families.text_config(model)
        self.handle, self.layer, self.attention = handle, layer, attention
        self.num_heads = int(config.num_attention_heads)
        kind = families.rope_kind(config, attention)
        self.rotary = Rotary(families.decoder_of(model), attention, families.layer_type(config, layer), kind)
        if kind == "other" and handle.method.stores_pre_rope:
            raise SeergateError(
                f"the method {handle.method.name!r} re-positions keys, which {config.model_type} models do not allow: "
                "their RoPE has a form of its own"
            )
        self.tap = families.tap(model, attention)
        self.swap = AttentionSwap(attention, self.before_forward)
        self._running: tuple[int, Any] | None = None  # the thread that runs the module; weakly, what it has come with

    def remove(self) -> None:
        """Take everything back."""
        self.swap.undo()
        self.tap.remove()

    def _enter(self, hidden: Tensor) -> None:
        """Refuse a second thread: what is caught on the way through the module would be mixed up.

        Args:
            hidden: what the module is called with. Where it is gone, an error has ended the call.

        Raises:
            SeergateError: saying so.
        """
        if self._running is not None:
            thread, others = self._running
            if thread != get_ident() and others() is not None:
                raise SeergateError(
                    "two threads run this model at once, and the attached method can serve one request at a time; "
                    "hold a lock around generate, or put the requests into one batch"
                )
        self._running = get_ident(), ref(hidden)

    def _leaving(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        finally:
            self._running = None

    def before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Announce the new tokens to the cache layer and pass the call along to the attention function."""
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        alone = torch.compiler.is_compiling()  # a graph is one call
        if not alone:
            self._enter(hidden)
        call = self._announce(hidden.shape[1], kwargs)
        return args, {**kwargs, CALL_KEYWORD: call if alone else partial(self._leaving, call)}

    def _announce(self, new: int, kwargs: dict[str, Any]) -> Any:
        """What the attention function is to call for so many new tokens."""
        implementation = families.text_config(self.handle.model)._attn_implementation
        dense = dense_function(implementation)
        cache = kwargs.get("past_key_values")
        if cache is None:
            if kwargs.get("cache") is not None:
                warnings.warn(TRANSFORMERS_PAGES, stacklevel=2)
            return partial(_without_cache, self.tap, dense)
        layer = self.cache_layer(cache)
        valid = drafted = None
        if not layer.takes(new):  # else no number may be asked for that a compiled step does not know
            hide_what_is_masked(layer, kwargs.get("attention_mask"), new)
            valid = valid_tokens(kwargs.get("attention_mask"), new, layer.slots)
            refuse_masked(layer, valid, new)
            drafted = self.handle.prompts.drafted(cache, layer.slots, new)
        layer.arrival = Arrival(valid, self.tap.take, kwargs.get("position_ids"), drafted)
        prompt = self.handle.prompts.holds(new)
        if prompt:
            layer.decoding = False
        left_over = prompt and new == 1 and isinstance(layer.method, SelectingMethod)
        if self.handle.dense_pass or left_over:
            return partial(attend_densely, layer, dense)
        return partial(attend, layer, self.handle.recorder, self.handle.measure_recall, dense)

    def cache_layer(self, cache: Cache) -> GatedLayer:
        """This layer of the cache, put into our form if it is still empty."""
        if getattr(cache, "offloading", False):
            raise SeergateError("this cache offloads its layers, which seergate does not support; use a plain cache")
        layers = cache.layers
        while len(layers) <= self.layer:  # a cache without a configuration makes its layers as they are needed
            layers.append(cache.layer_class_to_replicate())
        found = layers[self.layer]
        method = self.handle.method
        if isinstance(found, FixedLayer):
            found.plain = self.handle.plain and found.counted_by(self.handle.stats_)
            if found.takes(1) and found.method is method:
                return found
        if isinstance(found, GatedLayer) and found.slots > 0:
            if found.method is not method:
                raise SeergateError(
                    f"this cache was filled under the method {found.method.name!r}; start a new one for "
                    f"{method.name!r}"
                )
            if isinstance(found, PagedLayer):
                self.handle.go_on_with(found.pages)
            return found
        if isinstance(found, GatedLayer):
            static_length = found.static_length
        elif type(found) is DynamicLayer:
            static_length = None
        elif type(found) is StaticLayer:
            static_length = found.max_cache_len
        else:
            raise SeergateError(
                f"layer {self.layer} of the cache is a {type(found).__name__}; seergate replaces DynamicLayer and "
                "StaticLayer"
            )
        filled = found.get_seq_length()
        if int(filled) > 0:
            raise SeergateError(
                "this cache was filled by the plain model, so the method has not seen its tokens; start a new one"
            )
        shared = bool(getattr(self.attention, "store_full_length_kv", False))
        make: Any = GatedLayer
        if self.handle.pager is not None:
            first = self.handle.bindings[0]
            make = self.handle.pager.layer_class(None if first is self else layers[first.layer])
        elif self.handle.offload is not None:
            assert isinstance(method, SelectingMethod)  # `Offload.check` made sure
            sharers = [binding for binding in self.handle.bindings if method.selects_in(binding.layer)]
            make = partial(OffloadedLayer, self.handle.offload, len(sharers))
        elif static_length is not None and method.fixed_shapes and self.handle.correction is None and not shared:
            make = FixedLayer
        layers[self.layer] = make(method, self.layer, self.num_heads, self.rotary, static_length, shared)
        return layers[self.layer]


class Handle:
    """A method attached to a model. Detach it, or use `attached` as a context manager.

    Args:
        model: a causal language model of a supported family.
        method: what to decode with.
        measure_recall: also compute, at each decode step, how much of dense attention's probability was read (slow).
        paging: keep keys and values in pages (`Paging`). ``reason_cache`` does so by itself.
        offload: keep keys and values in slow memory (`Offload`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        *,
        measure_recall: bool = False,
        paging: Paging | None = None,
        offload: Offload | None = None,
    ) -> None:
        modules = families.full_attention_modules(model)
        if getattr(model, _HANDLE, None) is not None:
            raise SeergateError("this model has a method attached already; detach it first")
        for name, given, kind in (("paging", paging, Paging), ("offload", offload, Offload)):
            if given is not None and not isinstance(given, kind):
                raise ValueError(f"{name} is {given!r}; it must be a seergate.{kind.__name__} or None")
        paged, attached_method = paging is not None or isinstance(method, ReasonCache), method
        method = method.reading if isinstance(method, ReasonCache) else method
        if isinstance(method, (Gate, GateOnEvictor)):
            check_gates(model, method.bank)
        check_calibration(model, method)
        check_dense_layers(method, families.text_config(model).num_hidden_layers)
        implementation = families.text_config(model)._attn_implementation
        if "flex" in str(implementation):
            raise SeergateError(
                f"the model's attention is {implementation!r}, whose masks do not tell padding; load it with "
                'attn_implementation "sdpa", "eager" or "flash_attention_2"'
            )
        method = resolved(method, model, modules, ordinary_cache=not paged and offload is None)
        self.model, self.method, self.measure_recall = model, method, measure_recall
        self.stats_: DecodeStats = DecodeStats([layer for layer, _ in modules])
        self.bindings: list[DecodeBinding] = []
        self.correction: Lossless | Rectifier | None = None
        self.dense_pass = False  # whether forward passes leave the method out
        self._trace: Trace | None = None
        self.pager: Pager | None = None
        if offload is not None and paged:
            raise SeergateError("a paged cache cannot be offloaded; give either paging or offload")
        if offload is not None:
            offload.check(method)
        self.offload = offload
        if paged and isinstance(method, SelectingMethod) and (method.rule.lossless or method.rule.rectify_every):
            raise SeergateError("lossless decoding and rectification need an ordinary cache; leave paging out")
        self.prompts = PromptReader(model)
        try:
            self.pager = Pager(model, attached_method, paging) if paged else None
            for layer, attention in modules:
                self.bindings.append(DecodeBinding(self, layer, attention))
            if isinstance(method, SelectingMethod) and method.rule.lossless:
                self.correction = Lossless(self)
            elif isinstance(method, SelectingMethod) and method.rule.rectify_every is not None:
                self.correction = Rectifier(self, method.rule.rectify_every)
        except BaseException:
            self.detach()
            raise
        setattr(model, _HANDLE, self)

    def go_on_with(self, pages: CachePages) -> None:
        """Take a paged cache as it was left, perhaps by another handle."""
        if self.pager is not None and self.pager.sharing is not None:
            self.pager.sharing.take_over(pages)
        else:
            give_up(pages)

    def stats(self) -> dict[str, Any]:
        """What decoding read and held since the handle was made or reset (`DecodeStats.summary`), and what `Lossless`
        or `Rectifier` did.
        """
        corrected = self.correction.stats() if self.correction is not None else {}
        paged = self.pager.stats() if self.pager is not None else {}
        return {"method": self.method.name, **self.stats_.summary(), **corrected, **paged}

    @property
    def plain(self) -> bool:
        """Whether nothing but the usual figures is wanted of a decode step, and nobody takes it back."""
        asked = self._trace is not None or self.measure_recall or type(self.stats_) is not DecodeStats
        return not asked and self.correction is None

    @property
    def recorder(self) -> Any:
        """Where decode steps are counted, and traced if they are."""
        return self.stats_ if self._trace is None else TracedStats(self.stats_, self._trace)

    @contextmanager
    def traced(self, path: str | os.PathLike[str], every: int = 1) -> Iterator[None]:
        """While it lasts, which blocks decode steps read is written to a Parquet file (`seergate.decode.trace`).

        Args:
            path: of the file.
            every: write every so many steps of each layer.
        """
        if self._trace is not None:
            raise SeergateError("this handle writes a trace already")
        config = families.text_config(self.model)
        about = {"method": repr(self.method), "model": config.name_or_path or config.model_type}
        about["block_size"] = int(getattr(self.method, "block_size", 1))
        with Trace(path, about, every) as self._trace:
            try:
                yield
            finally:
                self._trace = None

    def count_with(self, make: Callable[[list[int]], Counts]) -> Counts:
        """Count decode steps with statistics of another kind from now on.

        Args:
            make: ``(gated layers) -> statistics``.
        """
        self.stats_ = counts = make(list(self.stats_.layers))
        return counts

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.stats_ = self.stats_.anew()
        if self.correction is not None:
            self.correction.reset()
        if self.pager is not None:
            self.pager.reset()

    def detach(self) -> None:
        """Give the model back as it was. May be called again without effect."""
        if self.correction is not None:
            self.correction.remove()
            self.correction = None
        if self.pager is not None:
            self.pager.remove()
            self.pager = None
        while self.bindings:
            self.bindings.pop().remove()
        self.prompts.remove()
        if getattr(self.model, _HANDLE, None) is self:
            delattr(self.model, _HANDLE)


def attach(
    model: PreTrainedModel,
    method: GateBank | Method | str | os.PathLike[str],
    config: DecodeConfig | None = None,
    *,
    measure_recall: bool = False,
    paging: Paging | None = None,
    offload: Offload | None = None,
    **options: Any,
) -> Handle:
    """Let a method decide what the model's decode steps attend to; ``generate`` itself stays the stock one.

    Args:
        model: a causal language model of a supported family.
        method: gates, or the directory or Hub repository ``org/name`` that holds them; a method; or a method's name,
            with its options as keywords.
        config: how to decode with gates. Its fields may be given as keywords instead; what is not given is as the
            gates ask for (``compat="published"`` of imported ones); of a ``config``, its ``compat`` is.
        measure_recall, paging, offload: see `Handle`.
        **options: for a method given by name, or fields of `DecodeConfig` for gates.

    Returns:
        The handle; ``detach()`` undoes it.

    Raises:
        SeergateError: for an unsupported model, an unknown method or option, or gates of another model.
        ValueError: for a value out of range.
    """
    return Handle(
        model, resolve_method(method, config, **options), measure_recall=measure_recall, paging=paging, offload=offload
    )


@contextmanager
def attached(
    model: PreTrainedModel,
    method: GateBank | Method | str | os.PathLike[str],
    config: DecodeConfig | None = None,
    *,
    measure_recall: bool = False,
    paging: Paging | None = None,
    offload: Offload | None = None,
    **options: Any,
) -> Iterator[Handle]:
    """`attach` for the duration of a ``with`` block."""
    handle = attach(model, method, config, measure_recall=measure_recall, paging=paging, offload=offload, **options)
    try:
        yield handle
    finally:
        handle.detach()


def handle_of(model: PreTrainedModel) -> Handle:
    """The handle that is attached to a model, for instance by `seergate.load`.

    Raises:
        SeergateError: if none is.
    """
    handle = getattr(model, _HANDLE, None)
    if handle is None:
        raise SeergateError("no method is attached to this model; seergate.attach attaches one")
    return handle


def _without_cache(tap: families.Tap, dense: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A forward without a cache has nothing to decode from: plain dense attention."""
    tap.take()
    return dense(module, *args, **kwargs)
