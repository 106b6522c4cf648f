"""Attaches a method to the gated layers of a loaded model, and detaches it again.

Each gated attention module gets its own copy of the configuration, which names seergate's attention function. The
model's configuration, which determines the masks, is unchanged. Hooks capture q and k before RoPE, and a pre-hook
creates the forward context (`seergate.models.hooks`).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from threading import get_ident
from typing import Any, TypeVar

import transformers
from transformers import PreTrainedModel

from seergate.cache.storage import KVBackend
from seergate.config import DecodeConfig, Rectify
from seergate.decode.compatibility import refuse
from seergate.decode.rectify import Rectification
from seergate.decode.stats import DecodeStats
from seergate.decode.trace import Trace
from seergate.errors import SeergateError
from seergate.methods import Method, SelectingMethod
from seergate.methods.evicting import CompressingMethod
from seergate.models import families
from seergate.models.gate_bank import GateBank
from seergate.models.hooks import Attachment, LayerBinding, SingleThreadGuard
from seergate.models.masks import FLEX
from seergate.models.prompts import PromptReader
from seergate.models.resolving import check_anchors, check_calibration, check_dense_layers, resolve_method

STILL_GENERATES = (
    "another thread is in the model's generate, whose further steps are dense; end it before the method is detached"
)
_HANDLE = "_seergate_handle"
PROMPT_TUNING = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT")  # kinds of PEFT
Counts = TypeVar("Counts", bound=DecodeStats)


class Handle(Attachment):
    """A method attached to a model; `detach` undoes it. `attached` is the same as a context manager. Errors: `attach`.

    Args:
        model: a causal language model of a supported family.
        method: the method to decode with.
        correction: correction of the errors of sparse steps; the method's own if ``None``.
        measure_recall: also compute at each decode step the share of dense attention's probability that is read; slow.
        storage: storage of the KV cache: pages (`Paging`, the default of ``reason_cache``) or slow memory (`Offload`);
            contiguous buffers on the model's device if ``None``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        *,
        correction: Rectify | None = None,
        measure_recall: bool = False,
        storage: KVBackend | None = None,
    ) -> None:
        modules = families.full_attention_modules(model)
        decoder = families.decoder_of(model)
        if getattr(decoder, _HANDLE, None) is not None:
            raise SeergateError(
                "this model has a method attached already; seergate.handle_of(model).detach() takes it off"
            )
        for name, given, kinds, named in (
            ("storage", storage, KVBackend, "a seergate.Offload, a seergate.Paging"),
            ("correction", correction, Rectify, "a seergate.Rectify"),
        ):
            if given is not None and not isinstance(given, kinds):
                raise ValueError(f"{name} is {given!r}; it must be {named}, or None")
        if method.kv_backend is not None:
            storage = resolve_name(method.kv_backend)(method, storage)
        storage = KVBackend() if storage is None else storage
        method = method.read_method
        correction = method.correction if correction is None else correction
        for part in (method, getattr(method, "evictor", None)):
            if (bank := getattr(part, "bank", None)) is not None:
                families.check_gates(model, bank)
        check_calibration(model, method)
        check_dense_layers(method, families.text_config(model).num_hidden_layers)
        check_anchors(method, families.kv_heads(model))
        if model.device.type == "mps":
            raise SeergateError("Apple GPUs (mps) are not supported, as they have no float64; use the CPU")
        tuned = getattr(model, "peft_config", {}).values()  # of a PeftModel
        if any(getattr(config, "peft_type", None) in PROMPT_TUNING for config in tuned):
            raise SeergateError("PEFT puts the tokens of prompt tuning before every step; they are not supported")
        if "flex" in str(families.text_config(model)._attn_implementation):
            raise SeergateError(FLEX)
        tags = {storage.tag: storage.tag, **tags_of_method(method), **tags_of_model(model)}
        if correction is not None:
            tags["rectified"] = "rectification"
            if method.max_rollback is not None and correction.every > method.max_rollback:
                tags["rectified past a block"] = f"rectification of {correction.every} tokens"
        refuse(tags)
        super().__init__(model, method, storage, measure_recall)
        self._make_stats: Callable[[list[int]], DecodeStats] = DecodeStats
        self._guard = SingleThreadGuard(decoder, self)
        self.prompts = PromptReader(model, self.passes, self._generate_compiles)
        try:
            for layer, attention in modules:
                self.bindings.append(LayerBinding(self, layer, attention))
            if correction is not None:
                self.correction = Rectification(correction, decoder, method, list(self.stats_.layers), self.passes)
        except BaseException:
            self.detach()
            raise
        setattr(decoder, _HANDLE, self)

    def __repr__(self) -> str:
        state = "attached" if self.bindings else "detached"
        return f"<Handle: {self.method!r}, {state}, {len(self.stats_.layers)} layers of {type(self.model).__name__}>"

    def _generate_compiles(self) -> bool:
        """Whether `generate` may compile decode steps, which it does on static caches: all layers must allow it."""
        return self.compiles and not any(binding.shared for binding in self.bindings)

    def stats(self) -> dict[str, Any]:
        """Return the statistics of decoding since the handle was created or reset (`DecodeStats.summary`), and of its
        correction and storage. Prefill is dense and not counted, so before the first decode step ``steps`` is 0 and
        ``density`` is ``None``.
        """
        corrected = self.correction.stats() if self.correction is not None else {}
        return {"method": self.method.name, **self.stats_.summary(), **corrected, **self.storage.stats()}

    @contextmanager
    def traced(self, path: str | os.PathLike[str], attention: bool = False) -> Iterator[None]:
        """Write the blocks that decode steps in a ``with`` block read to a Parquet file (`seergate.decode.trace`).

        Args:
            path: path of the file; its directory must exist.
            attention: also record the method's scores and the true attention of all blocks (slow).

        Raises:
            SeergateError: if the file cannot be written, another trace is being written, or ``attention`` is true and
                the method selects no blocks.
        """
        if self.trace is not None:
            raise SeergateError("this handle writes a trace already")
        if attention and not isinstance(self.method, SelectingMethod):
            raise SeergateError(f"the method {self.method.name!r} selects no blocks, so there is nothing to weigh")
        config = families.text_config(self.model)
        about: dict[str, Any] = {"method": repr(self.method), "name": self.method.name, "nominal": self.method.nominal}
        about["model"] = config.name_or_path or config.model_type
        about["block_size"] = int(getattr(self.method, "block_size", 1))
        with Trace(path, about, attention) as self.trace:
            try:
                yield
            finally:
                self.trace = None

    def count_with(self, make: Callable[[list[int]], Counts]) -> Counts:
        """Replace the statistics by those that ``make`` creates for the gated layers, and return them."""
        self._make_stats, self.stats_ = make, (counts := make(list(self.stats_.layers)))
        return counts

    def reset_stats(self) -> None:
        """Reset the statistics of decoding, correction and storage."""
        self.stats_ = self.stats_.anew(self._make_stats)
        if self.correction is not None:
            self.correction.reset()
        self.storage.reset()

    def detach(self) -> None:
        """Restore the model to its original state. Further calls have no effect. Warns if another thread is in the
        model's ``generate`` for more than a second, as its further steps are dense.
        """
        until = time.monotonic() + 1  # a streamer ends shortly before its `generate`
        while set(self.passes.generate_threads) - {get_ident()}:
            if time.monotonic() > until:
                warnings.warn(STILL_GENERATES, stacklevel=2)
                break
            time.sleep(0.01)
        if self.correction is not None:
            self.correction.remove()
            self.correction = None
        self.storage.remove()
        while self.bindings:
            self.bindings.pop().remove()
        self.prompts.remove()
        self._guard.remove()
        self.labels_hook.remove()
        decoder = families.decoder_of(self.model)
        if getattr(decoder, _HANDLE, None) is self:
            delattr(decoder, _HANDLE)


def attach(
    model: PreTrainedModel,
    method: GateBank | Method | str | os.PathLike[str],
    config: DecodeConfig | None = None,
    *,
    correction: Rectify | None = None,
    measure_recall: bool = False,
    storage: KVBackend | None = None,
    **options: Any,
) -> Handle:
    """Attach a method that determines which tokens the model's decode steps attend to; ``generate`` is unchanged.

    Args:
        model: a causal language model of a supported family.
        method: gates, or their directory or Hub repository ``org/name``; a method; or a method's name, with its
            options as keywords.
        config: decode options for gates. Its fields may be given as keywords instead; the others then have the gates'
            own defaults (``compat="published"`` for imported gates). A ``config`` takes only ``compat`` from gates.
        correction, measure_recall, storage: see `Handle`.
        **options: options of the named method, or fields of `DecodeConfig` for gates.

    Returns:
        The handle; its ``detach()`` restores the model.

    Raises:
        SeergateError: if the model is not supported, a method or option is unknown, or the gates are of another model.
        ValueError: if an option is out of range.
    """
    return Handle(
        model,
        resolve_method(method, config, **options),
        correction=correction,
        measure_recall=measure_recall,
        storage=storage,
    )


@contextmanager
def attached(
    model: PreTrainedModel,
    method: GateBank | Method | str | os.PathLike[str],
    config: DecodeConfig | None = None,
    **options: Any,
) -> Iterator[Handle]:
    """Attach a method for the duration of a ``with`` block; arguments and errors are those of `attach`."""
    handle = attach(model, method, config, **options)
    try:
        yield handle
    finally:
        handle.detach()


def handle_of(model: PreTrainedModel) -> Handle:
    """Return the handle of the method that is attached to a model, for example by `seergate.load`.

    Raises:
        SeergateError: if no method is attached.
    """
    handle = getattr(families.decoder_of(model), _HANDLE, None)
    if handle is None:
        raise SeergateError("no method is attached to this model; seergate.attach attaches one")
    return handle


def tags_of_method(method: Method) -> dict[str, str]:
    """Return a method's tags for the table of `seergate.decode.compatibility`: tag -> name for error messages."""
    kinds = {"selecting": SelectingMethod, "evicting": CompressingMethod}
    tags = {next((tag for tag, kind in kinds.items() if isinstance(method, kind)), "dense"): repr(method.name)}
    if method.splits_groups:
        tags["query heads apart"] = f"{method.name!r} with group_reduction='separate'"
    return {**tags, "moves keys": repr(method.name)} if method.stores_pre_rope else tags


def tags_of_model(model: PreTrainedModel) -> dict[str, str]:
    """Return a model's tags; see `tags_of_method`."""
    config, tags = families.text_config(model), dict[str, str]()
    ungated = [i for i in range(config.num_hidden_layers) if not families.has_full_attention(config, i)]
    one_way = {families.layer_type(config, i) for i in ungated}
    if not transformers.__version__.startswith("5.17."):  # its windows return more between crops than its masks show
        one_way -= {"sliding_attention", "chunked_attention"}
    if stuck := sorted(one_way):
        tags["one-way layers"] = f"layers of kind {', '.join(stuck)} (transformers {transformers.__version__})"
    if any(families.rope_kind(config, each) == "other" for _, each in families.full_attention_modules(model)):
        tags["own rope"] = config.model_type
    sharers = (i for i, each in families.attention_modules(model) if getattr(each, "is_kv_shared_layer", False))
    if any(families.has_full_attention(config, layer) for layer in sharers):
        tags["shared keys"] = config.model_type
    return tags
