"""The files of an adapter: `gate_config.json`, `gate_model.safetensors` and a model card; no pickle.

A `config.json` next to them makes `AutoModelForCausalLM.from_pretrained` fail with a pointer to `seergate.load`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file

from seergate.durable import flush, save_file
from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.gates.card import CARD_FILE, Source, model_card
from seergate.gates.record import parse_record, to_record
from seergate.json_file import read_json_text
from seergate.version import __version__

CONFIG_FILE, WEIGHTS_FILE, MARKER_FILE = "gate_config.json", "gate_model.safetensors", "config.json"
ADAPTER_FILES = {CONFIG_FILE, WEIGHTS_FILE, MARKER_FILE, CARD_FILE}
MAX_JSON = 64 << 20

# transformers begins its error message with the model type if it does not know it.
MARKER = {
    "model_type": "seergate_gates: not a model but gates for one, load them with seergate.load(...), see README.md"
}

G = TypeVar("G", bound=Gates)


def read_adapter(directory: Path, kind: type[G], source: str | os.PathLike[str]) -> G:
    """Read an adapter of untrusted files as gates of class ``kind``; a SeergateError for missing or invalid files.
    ``source`` is the user's name for the directory.
    """
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    for path in (config, weights):
        if not path.is_file():
            raise SeergateError(_what_is_missing(directory, path.name, source))
    record = read_json(config)
    described = parse_record(record, str(config))
    files = record.get("files")
    if files is not None and (_size(files, weights.name) != weights.stat().st_size or files != _sums(weights)):
        raise SeergateError(
            f"{weights} is damaged, or not the file that {CONFIG_FILE} was saved with: its SHA-256 is another"
        )
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise SeergateError(f"{weights} is not a readable safetensors file: {error}") from error
    return kind.holding(tensors, str(directory), **described)


def save_adapter(bank: Gates, directory: str | os.PathLike[str], *, card_source: Source | None = None) -> Path:
    """Write gates to a directory; returns its path.

    Files are replaced one by one. The configuration holds the SHA-256 of the weights, so if a killed process replaced
    only some of the files, reading them fails.

    Args:
        bank: the gates.
        directory: created if necessary; an adapter in it is replaced, other files are kept.
        card_source: place that the card's usage example loads from; by default ``directory``.

    Raises:
        SeergateError: if the directory cannot be written, or the training record or results are not JSON.
    """
    out, bank = Path(directory), bank.derived()
    record = {**to_record(bank), "seergate_version": __version__}
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        raise SeergateError(f"these gates have a training record or results that are not JSON: {error}") from error
    with written(out) as scratch:
        weights = scratch / WEIGHTS_FILE
        save_file(bank.state_dict(), weights, {"format": "pt"})
        record["files"] = _sums(weights)
        # A link may lead to a file that is not for others to read; it is replaced, not followed.
        existing = None if (out / CARD_FILE).is_symlink() else read_card(out)
        card = model_card(bank, card_source or Source(str(directory)), existing=existing)
        (scratch / CARD_FILE).write_text(card, encoding="utf-8")
        if not (out / MARKER_FILE).exists():  # it may be a model's
            write_json(scratch / MARKER_FILE, MARKER)
        write_json(scratch / CONFIG_FILE, record)
    return out


@contextmanager
def written(out: Path) -> Iterator[Path]:
    """Yield a temporary directory; its files replace those of ``out`` one by one when the block succeeds."""
    if out.exists() and not out.is_dir():
        raise SeergateError(f"{out} is a file; gates need a directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as place:
            yield Path(place)
            for path in sorted(Path(place).iterdir()):
                flush(path)
                os.replace(path, out / path.name)
        flush(out)
    except (OSError, SafetensorError) as error:  # e.g. a full disk
        reason = getattr(error, "strerror", None) or error
        raise SeergateError(f"the gates cannot be written to {out}: {reason}") from error


def read_card(directory: Path) -> str | None:
    """The README of a directory, or ``None``."""
    card = directory / CARD_FILE
    return card.read_text(encoding="utf-8-sig", errors="replace") if card.is_file() else None


def read_json(path: Path) -> Any:
    """Read an untrusted JSON file."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        return read_json_text(path.read_text(encoding="utf-8"), unique=True)
    except (ValueError, OSError) as error:
        raise SeergateError(f"{path} is not readable JSON: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _size(files: Any, name: str) -> Any:
    """The size of a file in the entry ``files`` of a configuration, which may be damaged."""
    entry = files.get(name) if isinstance(files, dict) else None
    return entry.get("size") if isinstance(entry, dict) else None


def _sums(weights: Path) -> dict[str, Any]:
    """The entry ``files`` of the configuration: size and SHA-256 of the weights."""
    with weights.open("rb") as stream:
        return {
            weights.name: {"size": weights.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
        }


def _what_is_missing(directory: Path, name: str, source: str | os.PathLike[str]) -> str:
    """Error message about a missing file, with a guess at what the directory contains instead."""
    inside = "" if Path(source) == directory else f" ({directory})"
    sentence = f"{source}{inside} holds no {name}; gates are {CONFIG_FILE} and {WEIGHTS_FILE}"
    if name == CONFIG_FILE and (directory / "adapter_config.json").is_file():
        return f"{sentence}; this looks like an adapter of PEFT"
    if name == CONFIG_FILE and (directory / "config.json").is_file():
        return f"{sentence}; this looks like a model, not like gates for one"
    return sentence
