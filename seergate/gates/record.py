"""What an adapter is: the gates' architecture, what they fit, their tensors, and how they came to be."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seergate.config import DecodeConfig, GateConfig
from seergate.errors import SeergateError, first_line
from seergate.gates.gate import AttnGate
from seergate.geometry import ModelGeometry
from seergate.paths import is_directory, shipped_name

SCHEMA_VERSION = 1
ENTRIES = {
    *("schema_version", "gate", "model", "dtype", "training", "decode_defaults", "results", "license"),
    *("seergate_version", "files"),
}
"""The entries of a `gate_config.json`; the last two are added by the writer of the files."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Signature = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensor name -> shape and dtype."""


@dataclass(frozen=True)
class Adapter:
    """What an adapter directory holds.

    Attributes:
        gate: the gates' architecture.
        geometry: what they fit.
        tensors: ``layers.{i}.{q_proj,k_proj,q_norm,k_norm}.weight``.
        training: how they were trained; free-form JSON.
        decode: fields of `DecodeConfig` that `seergate.load` starts from, such as ``{"compat": "published"}``.
        results: measured results, one mapping each: ``task``, ``method``, ``token_budget``, ``accuracy`` (0..1),
            ``standard_error``, ``samples``; other keys are kept.
        licence: ``license`` and, for one without an identifier, ``license_name`` and ``license_link``.
    """

    gate: GateConfig
    geometry: ModelGeometry
    tensors: dict[str, Tensor]
    training: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    results: tuple[dict[str, Any], ...] = ()
    licence: dict[str, str] = field(default_factory=dict)

    @property
    def signature(self) -> Signature:
        """Shape and dtype of every tensor."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    @property
    def parameters(self) -> int:
        """How many numbers the gates have."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype | None:
        """The tensors' dtype; ``None`` if they have several."""
        kinds = {tensor.dtype for tensor in self.tensors.values()}
        return kinds.pop() if len(kinds) == 1 else None

    def to_record(self) -> dict[str, Any]:
        """The contents of `gate_config.json`, without what only the writer of the files knows."""
        record: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "gate": self.gate.to_dict(),
            "model": {**self.geometry.to_dict(), "base_model": portable_base(self.geometry.base_model)},
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "training": self.training,
        }
        optional = {"decode_defaults": self.decode, "results": list(self.results), "license": self.licence}
        return record | {key: value for key, value in optional.items() if value}


def identity(gate: GateConfig, geometry: ModelGeometry) -> dict[str, Any]:
    """What the tensors mean, whatever the base model is called: it is written into the weights file as well."""
    return {
        "gate": gate.to_dict(),
        "model": replace(geometry, base_model=None, base_revision=None).to_dict(),
    }


def portable_base(name: str | None) -> str | None:
    """A base model's name that does not depend on the working directory.

    A model that ships with seergate keeps its short name, any other directory gets its absolute path, and a Hub id
    stays what it is.
    """
    if name is None or not is_directory(name):
        return name
    return shipped_name(name) or str(Path(name).resolve())


def parse_record(record: Any, where: str, tensors: dict[str, Tensor] | None = None) -> Adapter:
    """Check the contents of a `gate_config.json` and build the adapter they describe, without its tensors.

    Args:
        record: what the file held.
        where: its path, for messages.
        tensors: the adapter's tensors, if they are there already.

    Raises:
        SeergateError: naming the entry, what it is and what it must be.
    """
    if not isinstance(record, dict) or not all(isinstance(record.get(key), dict) for key in ("gate", "model")):
        raise SeergateError(f'{where} must be a JSON object with the objects "gate" and "model"')
    version = record.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise SeergateError(f"{where} has schema_version {version!r}; it must be a positive integer")
    if version > SCHEMA_VERSION:
        warnings.warn(
            f"{where} has schema_version {version}; this seergate knows {SCHEMA_VERSION} and may miss something",
            stacklevel=4,
        )
    unknown = sorted(record.keys() - ENTRIES)
    if unknown:
        warnings.warn(f"{where}: ignoring unknown {', '.join(unknown)}", stacklevel=4)
    adapter = Adapter(
        gate=_build(GateConfig, record["gate"], where),
        geometry=_build(ModelGeometry, record["model"], where),
        tensors=tensors or {},
        training=_entry(record, "training", dict, where),
        decode=_decode_defaults(_entry(record, "decode_defaults", dict, where), where),
        results=tuple(_entry(record, "results", list, where)),
        licence=_entry(record, "license", dict, where),
    )
    check_results(adapter.results, where)
    if not all(isinstance(value, str) for value in adapter.licence.values()):
        raise SeergateError(f"{where}: license must be an object of texts")
    return adapter


def expected_shapes(gate: GateConfig, geometry: ModelGeometry) -> dict[str, tuple[int, ...]]:
    """The tensors of the gates that a configuration describes: name -> shape.

    Raises:
        ValueError: if there can be no such gate.
    """
    with torch.device("meta"):
        one = AttnGate(
            gate,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            inv_freq=torch.empty(len(geometry.inv_freq)) if gate.rope else None,
            attention_scaling=geometry.attention_scaling,
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in one.state_dict().items()}
    return {f"layers.{layer}.{name}": shape for layer in geometry.layers for name, shape in shapes.items()}


def check_tensors(adapter: Adapter, found: Signature, source: str) -> None:
    """Account for every tensor: none missing, none left over, each of the right shape and of a floating-point dtype.

    Args:
        adapter: what is described; its tensors are not looked at.
        found: what is there.
        source: for messages.

    Raises:
        SeergateError: naming the first tensor that is wrong.
    """
    try:
        expected = expected_shapes(adapter.gate, adapter.geometry)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # torch's own for absurd sizes
        raise SeergateError(f"{source}: {first_line(error)}") from error
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise SeergateError(f"{source}: the tensor {name} is missing; its shape must be {expected[name]}")
        if name not in expected:
            raise SeergateError(f"{source}: the tensor {name} belongs to no gate that its configuration describes")
        shape, dtype = found[name]
        if shape != expected[name]:
            raise SeergateError(f"{source}: the tensor {name} has shape {shape}; it must be {expected[name]}")
        if dtype not in DTYPES:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)
            raise SeergateError(f"{source}: the tensor {name} has dtype {dtype}; it must be one of {kinds}")


def check_results(results: Iterable[Any], where: str) -> None:
    """Refuse results that no table could show.

    Raises:
        SeergateError: naming the entry.
    """
    for result in results:
        if not isinstance(result, dict):
            raise SeergateError(f"{where}: results holds {result!r}; it must be a list of objects")
        for name in ("token_budget", "accuracy", "standard_error", "samples", "mean_tokens"):
            value = result.get(name)
            if value is not None and not _is_number(value):
                shown = reprlib.repr(value)
                raise SeergateError(f"{where}: {name} of a result is {shown}; it must be a number or null")


def check_finite(adapter: Adapter, source: str) -> None:
    """Refuse tensors with infinities or NaN.

    Raises:
        SeergateError: naming the first one.
    """
    for name, tensor in adapter.tensors.items():
        if not bool(tensor.isfinite().all()):
            raise SeergateError(f"{source}: the tensor {name} holds values that are not finite numbers")


def _is_number(value: Any) -> bool:
    """Whether a value of JSON can be written in a table."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        float(value)
    except OverflowError:  # an integer of hundreds of digits
        return False
    return True


def _build(kind: type, values: dict[str, Any], where: str) -> Any:
    unknown = sorted(set(values) - {f.name for f in fields(kind)})
    if unknown:
        warnings.warn(f"{where}: ignoring unknown {', '.join(unknown)}", stacklevel=5)
    try:
        return kind.from_dict(values)  # type: ignore[attr-defined]
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise SeergateError(f"{where}: {error}") from error


def _decode_defaults(values: dict[str, Any], where: str) -> dict[str, Any]:
    known = {f.name for f in fields(DecodeConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        warnings.warn(f"{where}: ignoring unknown {', '.join(unknown)} in decode_defaults", stacklevel=5)
    values = {key: value for key, value in values.items() if key in known}
    try:
        DecodeConfig(**values)
    except (TypeError, ValueError) as error:
        raise SeergateError(f"{where}: decode_defaults: {error}") from error
    if values.get("dense_below") == "auto":
        raise SeergateError(
            f'{where}: decode_defaults: dense_below is "auto", which gates cannot ask for: it must be 0'
        )
    return values


def _entry(record: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = record.get(key)
    value = kind() if value is None else value
    if not isinstance(value, kind):
        raise SeergateError(f"{where}: {key} is {value!r}; it must be {'a list' if kind is list else 'an object'}")
    return value
