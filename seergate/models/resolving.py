"""Creates the method from the arguments of `attach`, and checks it against the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from transformers import PreTrainedModel

from seergate.checks import plain_numbers
from seergate.config import SCORERS, DecodeConfig, is_retention
from seergate.errors import SeergateError, did_you_mean
from seergate.fingerprint import fingerprint
from seergate.gates.bank import Gates
from seergate.methods import METHODS, Gate, Method, SelectingMethod, make_method, option_names
from seergate.methods.registry import check_class
from seergate.models.gate_bank import GateBank


def resolve_method(
    method: Gates | Method | str | os.PathLike[str], config: DecodeConfig | None = None, **options: Any
) -> Method:
    """Create the method from the arguments of `attach`; errors are those of `attach`."""
    options = plain_numbers(options)
    if isinstance(method, Gates):
        check_given(config, options, method)
        return method_of(method, config, **options)
    if names_gates(method):
        check_given(config, options)
        return method_of(GateBank.from_pretrained(method), config, **options)
    if isinstance(method, str):
        if config is not None:
            raise SeergateError(f"a DecodeConfig goes with gates; give the options of {method!r} as keywords")
        return make_method(method, **options)
    if isinstance(method, Method):
        if config is not None or options:
            raise SeergateError(f"{method!r} has its options already; give none beside it")
        check_class(type(method))
        return method
    raise SeergateError(f"the method is {method!r}; it must be a GateBank, its directory, a method or a method's name")


def method_of(bank: Gates, config: DecodeConfig | None = None, **options: Any) -> Method:
    """Create the method that decodes with gates.

    Args:
        config: decode options for gates that select blocks; retention gates take none.
        **options: fields of the configuration, or for retention gates the method's options.
    """
    if not bank.config.retention:
        check_decode_options(options, decode_options(bank))
        return Gate.from_config(bank, config or bank.decode_config(**options))
    if config is not None:
        raise SeergateError(f"these gates are for {bank.config.scorer!r}, which takes no DecodeConfig; give keywords")
    return make_method(bank.config.scorer, bank=bank, **options)


def names_gates(method: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether ``method`` is a directory or Hub repository of gates; names of methods have no slash."""
    if isinstance(method, str):
        return method not in METHODS and ("/" in method or os.path.isdir(method))
    return isinstance(method, os.PathLike)


def decode_options(bank: Gates | None = None) -> set[str]:
    """Return the names of the decode options of gates, or of all kinds of gates if ``bank`` is ``None``."""
    kinds = [Gate.name, *filter(is_retention, SCORERS)]
    if bank is not None:
        kinds = [bank.config.scorer if bank.config.retention else Gate.name]
    return set().union(*map(option_names, kinds))


def check_decode_options(names: Iterable[str], options: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise `SeergateError`, with a suggestion from ``options``, for names in neither ``options`` nor ``others``."""
    if "block_size" in names:
        raise SeergateError("block_size is given; gates have the block size that they were trained with: leave it out")
    for name in sorted({*names} - {*options, *others}):
        raise SeergateError(f"there is no decode option {name!r}; {did_you_mean(name, sorted(options))}")


def check_given(config: DecodeConfig | None, given: dict[str, Any], bank: Gates | None = None) -> None:
    """Raise an error for conflicting or unknown decode options and, without ``bank``, for values out of range."""
    if config is not None and not isinstance(config, DecodeConfig):
        raise SeergateError(f"config is a {type(config).__name__}; it must be a DecodeConfig")
    if config is not None and given:
        raise SeergateError(f"config is given beside {', '.join(given)}; put all of it into one")
    check_decode_options(given, decode_options(bank), decode_options())
    if bank is None:
        DecodeConfig(**{name: given[name] for name in option_names(Gate.name) & set(given)})


def check_dense_layers(method: Method, layers: int) -> None:
    """Raise `SeergateError` if ``dense_layers`` names a layer that a model with ``layers`` layers does not have."""
    absent = sorted(set(method.dense_layers) - set(range(layers))) if isinstance(method, SelectingMethod) else []
    if absent:
        raise SeergateError(f"dense_layers names {absent}; the model has layers 0..{layers - 1}")


def check_anchors(method: Method, kv_heads: Mapping[int, int]) -> None:
    """Raise `SeergateError` if an anchor is no layer of the model, selects nothing, or has another number of KV heads
    than the layers that share its selection. ``kv_heads``: layer that can be gated -> number of its KV heads.
    """
    if not isinstance(method, SelectingMethod):
        return
    if absent := [anchor for anchor in method.anchors if anchor not in kv_heads]:
        raise SeergateError(f"anchors names {absent}; the layers with full attention are {list(kv_heads)}")
    if idle := [anchor for anchor in method.anchors if not method.selects_in(anchor)]:
        raise SeergateError(f"anchors names {idle}, for which there are no gates; an anchor must have one")
    for layer, heads in kv_heads.items():
        anchor = method.anchor_of(layer)
        if heads != kv_heads[anchor]:
            raise SeergateError(
                f"layer {layer} has {heads} KV heads and layer {anchor}, the nearest anchor, {kv_heads[anchor]}; "
                "layers that share a choice must have equally many"
            )


def check_calibration(model: PreTrainedModel, method: Method) -> None:
    """Raise `SeergateError` if a method was calibrated on other weights than the model's."""
    if method.calibrated_on is not None and method.calibrated_on != fingerprint(model):
        raise SeergateError(
            f"{method.name!r} was calibrated on a model with other weights than this one, or in another dtype; run "
            "seergate calibrate again"
        )
