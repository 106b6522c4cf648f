"""The files of an adapter: `gate_config.json`, `gate_model.safetensors`, a model card; never a pickle.

Beside them lies a `config.json`, so that the error of `AutoModelForCausalLM.from_pretrained` on an adapter names
`seergate.load`.
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
from safetensors.torch import load_file, save_file

from seergate.durable import flush
from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.gates.card import CARD_FILE, PLOT_FILE, Source, model_card, results_plot
from seergate.gates.record import parse_record, to_record
from seergate.version import __version__

CONFIG_FILE, WEIGHTS_FILE, SIGN_FILE = "gate_config.json", "gate_model.safetensors", "config.json"
MAX_JSON = 64 << 20

# A model type that transformers does not know stands at the beginning of its error message.
SIGN = {
    "model_type": "seergate_gates: not a model but gates for one, load them with seergate.load(...), see README.md"
}


G = TypeVar("G", bound=Gates)


def read_adapter(directory: Path, kind: type[G]) -> G:
    """Read an adapter as gates of this class, trusting nothing in it."""
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    for path in (config, weights):
        if not path.is_file():
            raise SeergateError(_what_is_missing(directory, path.name))
    record = read_json(config)
    described = parse_record(record, str(config))
    if record.get("files") not in (None, _sums(weights)):
        raise SeergateError(
            f"{weights} is damaged, or not the file that {CONFIG_FILE} was saved with: its SHA-256 is another"
        )
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise SeergateError(f"{weights} is not a readable safetensors file: {error}") from error
    return kind.holding(tensors, str(directory), **described)


def save_adapter(bank: Gates, directory: str | os.PathLike[str], *, card_source: Source | None = None) -> Path:
    """Write gates.

    Files are replaced one by one. The configuration holds the SHA-256 of the weights, so that files that a killed
    process has replaced only in part are refused when they are read.

    Args:
        directory: made if need be; an adapter that is there is replaced, other files are left alone.
        card_source: place that the card's usage example loads from; by default ``directory``.
    """
    out, bank = Path(directory), bank.derived()
    record = {**to_record(bank), "seergate_version": __version__}
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        raise SeergateError(f"these gates have a training record or results that are not JSON: {error}") from error
    with written(out) as scratch:
        weights = scratch / WEIGHTS_FILE
        save_file(dict(bank.state_dict()), weights, metadata={"format": "pt"})
        record["files"] = _sums(weights)
        plotted = results_plot(bank.results, scratch / PLOT_FILE)
        card = model_card(bank, card_source or Source(str(directory)), existing=read_card(out), plotted=plotted)
        (scratch / CARD_FILE).write_text(card, encoding="utf-8")
        if not (out / SIGN_FILE).exists():  # it may be a model's
            write_json(scratch / SIGN_FILE, SIGN)
        write_json(scratch / CONFIG_FILE, record)
        if not plotted:
            (out / PLOT_FILE).unlink(missing_ok=True)
    return out


@contextmanager
def written(out: Path) -> Iterator[Path]:
    """Yield a directory for new files of ``out``, which replace those there one by one when the block succeeds."""
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
    except (OSError, SafetensorError) as error:  # a full disk is one of them
        reason = getattr(error, "strerror", None) or error
        raise SeergateError(f"the gates cannot be written to {out}: {reason}") from error


def read_card(directory: Path) -> str | None:
    """The README of a directory, if it has one."""
    card = directory / CARD_FILE
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None


def read_json(path: Path) -> Any:
    """Read an untrusted JSON file."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise SeergateError(f"{path} is not readable JSON: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file for people to read."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sums(weights: Path) -> dict[str, Any]:
    """The entry ``files`` of the configuration: size and SHA-256 of the weights."""
    with weights.open("rb") as stream:
        return {
            weights.name: {"size": weights.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
        }


def _what_is_missing(directory: Path, name: str) -> str:
    """Error message about a missing file, with a guess at the directory's real contents."""
    sentence = f"{directory} holds no {name}; gates are {CONFIG_FILE} and {WEIGHTS_FILE}"
    if name == CONFIG_FILE and (directory / "adapter_config.json").is_file():
        return f"{sentence}; this looks like an adapter of PEFT"
    if name == CONFIG_FILE and (directory / "config.json").is_file():
        return f"{sentence}; this looks like a model, not like gates for one"
    return sentence
