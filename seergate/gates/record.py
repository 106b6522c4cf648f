"""Contents of a `gate_config.json`: architecture, geometry of the model, training record, results."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from seergate.checks import is_int
from seergate.config import DecodeConfig, GateConfig
from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.gates.geometry import ModelGeometry
from seergate.paths import is_local_model, shipped_name

SCHEMA_VERSION = 1
ENTRIES = {
    *("schema_version", "gate", "model", "dtype", "training", "decode_defaults", "results", "license"),
    *("seergate_version", "files"),
}
"""Known entries; `seergate.gates.files` adds the last two."""


def to_record(bank: Gates) -> dict[str, Any]:
    """The entries for these gates, as JSON types."""
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "gate": bank.config.to_dict(),
        "model": {**bank.geometry.to_dict(), "base_model": portable_base(bank.geometry.base_model)},
        "dtype": str(bank.dtype).removeprefix("torch."),
        "training": bank.training_record,
    }
    optional = {"decode_defaults": bank.decode_defaults, "results": list(bank.results), "license": bank.licence}
    return record | {key: value for key, value in optional.items() if value}


def parse_record(record: Any, where: str) -> dict[str, Any]:
    """Check the JSON of a `gate_config.json`, named ``where`` in messages; returns it as arguments of `Gates`."""
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
        config, geometry = GateConfig.from_dict(record["gate"]), ModelGeometry.from_dict(record["model"])
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise SeergateError(f"{where}: {error}") from error
    licence = _entry(record, "license", dict, where)
    if not all(isinstance(value, str) for value in licence.values()):
        raise SeergateError(f"{where}: license must be an object of texts")
    return {
        "config": config,
        "geometry": geometry,
        "training": _entry(record, "training", dict, where),
        "decode_defaults": decode,
        "results": _entry(record, "results", list, where),
        "licence": licence,
    }


def portable_base(name: str | None) -> str | None:
    """A base model's name in a form that does not depend on the working directory.

    Shipped models get their short name, other directories and GGUF files an absolute path; Hub ids are not changed.
    """
    if name is None or not is_local_model(name):
        return name
    path = Path(name)  # a GGUF file in the Hub's cache is a link to a file without that suffix
    return shipped_name(name) or str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)


def _warn_of_unknown(values: dict[str, Any], known_keys: set[str], where: str) -> None:
    """Warn about unknown entries, perhaps of a newer version."""
    if unknown := sorted(values.keys() - known_keys):
        warnings.warn(f"{where}: ignoring unknown {', '.join(unknown)}", stacklevel=3)


def _entry(record: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = record.get(key)
    value = kind() if value is None else value
    if not isinstance(value, kind):
        raise SeergateError(f"{where}: {key} is {value!r}; it must be {'a list' if kind is list else 'an object'}")
    return value
