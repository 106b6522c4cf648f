"""The adapter: architecture and tensors of gates, the geometry of their model, and their training record."""

from __future__ import annotations

import reprlib
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seergate.config import DecodeConfig, GateConfig, is_int
from seergate.errors import SeergateError, first_line
from seergate.gates.scorers import make_scorer
from seergate.geometry import ModelGeometry
from seergate.paths import is_local_model, shipped_name

SCHEMA_VERSION = 1
ENTRIES = {
    *("schema_version", "gate", "model", "dtype", "training", "decode_defaults", "results", "license"),
    *("seergate_version", "files"),
}
"""The entries of a `gate_config.json`; the last two are added by the writer of the files."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Adapter:
    """Contents of an adapter directory.

    Attributes:
        gate: the gates' architecture.
        geometry: what they fit.
        tensors: ``layers.{i}.`` and the names of the scorer, such as ``q_proj.weight``.
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
    def parameters(self) -> int:
        """Number of parameters."""
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


def portable_base(name: str | None) -> str | None:
    """A base model's name that does not depend on the working directory.

    A model that ships with seergate keeps its short name, any other directory or GGUF file gets its absolute path,
    and a Hub id stays what it is.
    """
    if name is None or not is_local_model(name):
        return name
    return shipped_name(name) or str(Path(name).resolve())


def parse_record(record: Any, where: str) -> Adapter:
    """Check the contents of a `gate_config.json` and build the adapter they describe, without its tensors.

    Args:
        record: what the file held.
        where: its path, for messages.

    Raises:
        SeergateError: naming the entry, what it is and what it must be.
    """
    if not isinstance(record, dict) or not all(isinstance(record.get(key), dict) for key in ("gate", "model")):
        raise SeergateError(f'{where} must be a JSON object with the objects "gate" and "model"')
    version: Any = record.get("schema_version")
    if not is_int(version) or version < 1:
        raise SeergateError(f"{where} has schema_version {version!r}; it must be a positive integer")
    if version > SCHEMA_VERSION:
        message = f"{where} has schema_version {version}; this seergate knows {SCHEMA_VERSION} and may miss something"
        warnings.warn(message, stacklevel=2)
    _warn_of_unknown(record, ENTRIES, where)
    decode = _entry(record, "decode_defaults", dict, where)
    try:
        for values, kind in ((record["gate"], GateConfig), (record["model"], ModelGeometry), (decode, DecodeConfig)):
            _warn_of_unknown(values, {f.name for f in fields(kind)}, where)
        decode = {f.name: decode[f.name] for f in fields(DecodeConfig) if f.name in decode}
        DecodeConfig(**decode)
        gate, geometry = GateConfig.from_dict(record["gate"]), ModelGeometry.from_dict(record["model"])
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise SeergateError(f"{where}: {error}") from error
    licence = _entry(record, "license", dict, where)
    if not all(isinstance(value, str) for value in licence.values()):
        raise SeergateError(f"{where}: license must be an object of texts")
    training, results = _entry(record, "training", dict, where), tuple(_entry(record, "results", list, where))
    return Adapter(gate, geometry, {}, training, decode, results, licence)


def check_adapter(adapter: Adapter, source: str) -> None:
    """Refuse an adapter that no model could be decoded with, or no card could show.

    Every tensor is accounted for: none missing, none left over, each of the right shape, of a floating-point dtype and
    finite.

    Args:
        adapter: to be checked.
        source: for messages.

    Raises:
        SeergateError: naming the first tensor or result that is wrong.
    """
    expected, found = expected_shapes(adapter, source), adapter.tensors
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise SeergateError(f"{source}: the tensor {name} is missing; its shape must be {expected[name]}")
        if name not in expected:
            raise SeergateError(f"{source}: the tensor {name} belongs to no gate that its configuration describes")
        tensor = found[name]
        if tuple(tensor.shape) != expected[name]:
            shape = tuple(tensor.shape)
            raise SeergateError(f"{source}: the tensor {name} has shape {shape}; it must be {expected[name]}")
        if tensor.dtype not in DTYPES:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)
            raise SeergateError(f"{source}: the tensor {name} has dtype {tensor.dtype}; it must be one of {kinds}")
        if not bool(tensor.isfinite().all()):
            raise SeergateError(f"{source}: the tensor {name} holds values that are not finite numbers")
    for result in adapter.results:
        if not isinstance(result, dict):
            raise SeergateError(f"{source}: results holds {result!r}; it must be a list of objects")
        for name in ("token_budget", "accuracy", "standard_error", "samples", "mean_tokens"):
            value = result.get(name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
            if value is not None and not number:
                shown = reprlib.repr(value)
                raise SeergateError(f"{source}: {name} of a result is {shown}; it must be a number or null")


def expected_shapes(adapter: Adapter, source: str) -> dict[str, tuple[int, ...]]:
    """The tensors that the configuration of an adapter describes: name -> shape."""
    geometry = adapter.geometry
    try:
        with torch.device("meta"):
            one = make_scorer(adapter.gate, geometry)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # torch's own for absurd sizes
        raise SeergateError(f"{source}: {first_line(error)}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in one.state_dict().items()}
    return {f"layers.{layer}.{name}": shape for layer in geometry.layers for name, shape in shapes.items()}


def _warn_of_unknown(values: dict[str, Any], known: set[str], where: str) -> None:
    """Warn about entries that only a newer seergate knows."""
    if unknown := sorted(values.keys() - known):
        warnings.warn(f"{where}: ignoring unknown {', '.join(unknown)}", stacklevel=3)


def _entry(record: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = record.get(key)
    value = kind() if value is None else value
    if not isinstance(value, kind):
        raise SeergateError(f"{where}: {key} is {value!r}; it must be {'a list' if kind is list else 'an object'}")
    return value
