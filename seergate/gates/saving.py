"""Writing an adapter."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from seergate.durable import flush
from seergate.errors import SeergateError
from seergate.gates.card import Source, model_card
from seergate.gates.layout import (
    CARD_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    PENDING,
    PLOT_FILE,
    SCRATCH,
    SIGN,
    SIGN_FILE,
    WEIGHTS_FILE,
    exclusive,
    is_sign,
    move_pending,
    sha256,
)
from seergate.gates.plot import results_plot
from seergate.gates.record import SCHEMA_VERSION, Adapter, check_finite, check_results, check_tensors, identity

ABANDONED_SECONDS = 3600


def save_adapter(
    adapter: Adapter,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    card_source: Source | None = None,
) -> Path:
    """Write an adapter. Whatever happens on the way, the directory holds either the old adapter or the new one.

    Args:
        adapter: what to write.
        directory: made if need be; an adapter that is there is replaced, other files are left alone.
        max_shard_size: of one weights file, in bytes or as ``"5GB"``.
        card_source: what the card's usage example loads; by default ``directory``.

    Returns:
        The directory.

    Raises:
        SeergateError: if it cannot be written there, or could not be read back.
    """
    out = Path(directory)
    if out.exists() and not out.is_dir():
        raise SeergateError(f"{out} is a file; the adapter needs a directory")
    check_tensors(adapter, adapter.signature, "these gates")
    check_finite(adapter, "these gates")
    check_results(adapter.results, "these gates")
    try:
        json.dumps(adapter.to_record())
    except (TypeError, ValueError) as error:
        raise SeergateError(f"these gates have a training record or results that are not JSON: {error}") from error
    try:
        out.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out)
        scratch = Path(tempfile.mkdtemp(dir=out, prefix=SCRATCH))
        try:
            _write(adapter, scratch, out, max_shard_size, card_source or Source(str(directory)))
            _publish(scratch, out)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise SeergateError(f"the adapter cannot be written to {out}: {error.strerror or error}") from error
    return out


def _write(adapter: Adapter, scratch: Path, out: Path, max_shard_size: int | str, card_source: Source) -> None:
    """Write all files into the scratch directory and down to the disk."""
    from huggingface_hub import split_torch_state_dict_into_shards

    from seergate.version import __version__

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    pattern = WEIGHTS_FILE.replace(".", "{suffix}.", 1)
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=max_shard_size)
    metadata = {
        "format": "pt",
        "schema": str(SCHEMA_VERSION),
        "identity": json.dumps(identity(adapter.gate, adapter.geometry)),
    }
    files = {}
    for name, members in split.filename_to_tensors.items():
        save_file({member: tensors[member] for member in members}, scratch / name, metadata=metadata)
        _sort_metadata(scratch / name)
        files[name] = {"size": (scratch / name).stat().st_size, "sha256": sha256(scratch / name)}
    if split.is_sharded:
        _write_json(scratch / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    _write_json(scratch / CONFIG_FILE, {**adapter.to_record(), "seergate_version": __version__, "files": files})
    if is_sign(out / SIGN_FILE) or not (out / SIGN_FILE).exists():
        _write_json(scratch / SIGN_FILE, SIGN)
    plotted = results_plot(adapter.results, scratch / PLOT_FILE)
    card = out / CARD_FILE
    existing = card.read_text(errors="replace") if card.is_file() else None
    (scratch / CARD_FILE).write_text(model_card(adapter, card_source, existing=existing, plotted=plotted))
    for path in (*scratch.iterdir(), scratch):
        flush(path)


def _sort_metadata(path: Path) -> None:
    """Give the metadata of a safetensors file, which come in any order, one order: equal gates are equal files."""
    with path.open("rb+") as stream:
        size = struct.unpack("<Q", stream.read(8))[0]
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:
            stream.seek(8)
            stream.write(text.ljust(size))


def _publish(scratch: Path, out: Path) -> None:
    """Make the scratch directory the adapter, in one step, and then put its files in place."""
    with exclusive(out):
        move_pending(out)  # of a writer that was killed
        os.rename(scratch, out / PENDING)
        flush(out)
        move_pending(out)


def _remove_abandoned(out: Path) -> None:
    """Scratch directories of writers that were killed."""
    for path in out.glob(f"{SCRATCH}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
