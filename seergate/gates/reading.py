"""Reading an adapter as if a stranger had made it."""

from __future__ import annotations

import json
import os
import reprlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from seergate.errors import SeergateError
from seergate.gates.hub import fetch
from seergate.gates.layout import (
    CARD_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    PLOT_FILE,
    SIGN_FILE,
    WEIGHTS_FILE,
    exclusive,
    is_sign,
    is_weights_file,
    locate,
    move_pending,
    read_json,
    sha256,
)
from seergate.gates.record import Adapter, Signature, check_finite, check_tensors, identity, parse_record

MAX_HEADER = 16 << 20

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_adapter(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Adapter:
    """Read an adapter from a directory or from the Hub, trusting nothing in it.

    Args:
        source: directory or Hub repository.
        revision: branch, tag or commit of the repository.
        subfolder: where in ``source`` the adapter lies.
        token: for the Hub; ``False`` for none.
        cache_dir: instead of the Hub's own cache.
        local_files_only: use what was downloaded before.
        force_download: even if it was downloaded before.

    Raises:
        SeergateError: if it is not there, incomplete, damaged, or does not fit its own description.
    """
    directory = fetch(
        str(source),
        revision=revision,
        subfolder=subfolder,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        force_download=force_download,
        patterns=[CONFIG_FILE, SIGN_FILE, INDEX_FILE, "gate_model*.safetensors"],
    )
    config = locate(directory, CONFIG_FILE)
    if not config.is_file():
        raise SeergateError(_what_is_missing(directory, CONFIG_FILE))
    record = read_json(config)
    adapter = parse_record(record, str(config))
    weights = [locate(directory, name) for name in _weight_files(directory, record)]
    signature: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    identities: dict[Path, str | None] = {}
    for path in weights:
        found, identities[path] = _signature(path)
        if again := sorted(signature.keys() & found.keys()):
            raise SeergateError(f"{path}: the tensor {again[0]} is in another file of the adapter as well")
        signature |= found
    check_tensors(adapter, signature, str(source))
    _check_dtype(record.get("dtype"), signature, config)
    for path in weights:
        _compare_identity(identities[path], adapter, path, config)
        _check_sum(path, record, config)
        with _reading_weights(path):
            adapter.tensors.update(load_file(path))
    check_finite(adapter, str(source))
    return adapter


def adapter_files(directory: Path) -> list[str]:
    """The names of an adapter's files in a directory, those of the weights first."""
    with exclusive(directory):
        move_pending(directory)
    names = [*_weight_files(directory, read_json(directory / CONFIG_FILE))]
    names += [INDEX_FILE, CONFIG_FILE, CARD_FILE, PLOT_FILE]
    names += [SIGN_FILE] if is_sign(directory / SIGN_FILE) else []
    return [name for name in names if (directory / name).is_file()]


def _weight_files(directory: Path, record: dict[str, Any]) -> list[str]:
    """The names of the weights files; never a path that leads out of the directory."""
    listed, where = record.get("files"), CONFIG_FILE
    if listed is None and not locate(directory, WEIGHTS_FILE).is_file() and locate(directory, INDEX_FILE).is_file():
        index, where = read_json(locate(directory, INDEX_FILE)), INDEX_FILE
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict):
            raise SeergateError(f"{directory / INDEX_FILE} has no weight_map")
        listed = {str(name): None for name in weight_map.values()}
    elif listed is None:
        listed = {WEIGHTS_FILE: None}
    if not isinstance(listed, dict) or not listed:
        raise SeergateError(f"{directory / where} must name the files of the weights")
    for name in listed:
        if not is_weights_file(name):
            raise SeergateError(f"{directory / where} names {name!r}, which is no weights file of an adapter")
        if not locate(directory, name).is_file():
            raise SeergateError(_what_is_missing(directory, name))
    return sorted(listed)


def _what_is_missing(directory: Path, name: str) -> str:
    """A sentence about a file that is not there, and about what the directory seems to be instead."""
    sentence = f"{directory} holds no {name}; an adapter has {CONFIG_FILE} and {WEIGHTS_FILE}"
    if name != CONFIG_FILE:
        return sentence
    if (directory / "adapter_config.json").is_file():
        return f"{sentence}; this looks like an adapter of PEFT"
    try:
        other = read_json(directory / SIGN_FILE)
    except SeergateError:
        return sentence
    if isinstance(other, dict) and any(key.startswith("seerattn_") for key in other):
        return f"{sentence}; these are gates in the published format: convert them with `seergate import-legacy`"
    return f"{sentence}; this looks like a model, not like gates for one"


@contextmanager
def _reading_weights(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError) as error:
        raise SeergateError(f"{path} is not a readable safetensors file: {error}") from error


def _signature(path: Path) -> tuple[Signature, str | None]:
    """Shapes and dtypes, and what the file says about the gates; from its header alone."""
    with _reading_weights(path):
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(8)
        header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < header <= min(MAX_HEADER, size - 8):
            raise ValueError(f"its header would have {header} bytes, the file has {size}")
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            shapes = {name: tuple(entry.get_shape()) for name, entry in slices.items()}
            kinds = {name: entry.get_dtype() for name, entry in slices.items()}
            metadata = file.metadata() or {}
    for name, kind in kinds.items():
        if kind not in _DTYPES:
            raise SeergateError(f"{path}: the tensor {name} has dtype {kind}; it must be one of {', '.join(_DTYPES)}")
    return {name: (shapes[name], _DTYPES[kinds[name]]) for name in slices}, metadata.get("identity")


def _compare_identity(text: str | None, adapter: Adapter, path: Path, config: Path) -> None:
    """Refuse weights that were saved with another configuration than the one beside them."""
    if text is None:
        return
    try:
        inside = json.loads(text)
        pairs = [(inside[kind], beside) for kind, beside in identity(adapter.gate, adapter.geometry).items()]
        differences = [
            f"{name} is {reprlib.repr(beside[name])} in {config.name} and {reprlib.repr(within[name])} in {path.name}"
            for within, beside in pairs
            for name in beside
            if name in within and within[name] != beside[name]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SeergateError(f"{path}: its header's entry about the gates is damaged") from error
    if differences:
        raise SeergateError(f"{config.parent}: weights and configuration do not belong together: {differences[0]}")


def _check_dtype(stated: Any, signature: Signature, config: Path) -> None:
    for name, (_, dtype) in signature.items():
        kind = str(dtype).removeprefix("torch.")
        if stated not in (None, kind):
            raise SeergateError(f"{config}: dtype is {stated!r}, but the tensor {name} is {kind}")


def _check_sum(path: Path, record: dict[str, Any], config: Path) -> None:
    """Compare a weights file with what was noted of it when it was written; older adapters have no such note."""
    note = (record.get("files") or {}).get(path.name)
    if note is not None and (not isinstance(note, dict) or note.get("sha256") != sha256(path)):
        raise SeergateError(
            f"{path} is damaged, or not the file that {config.name} was saved with: its SHA-256 is another"
        )
