"""The adapter on disk and on the Hub: `gate_config.json`, `gate_model.safetensors`, a model card; never a pickle."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from seergate.config import GateConfig
from seergate.errors import SeergateError
from seergate.geometry import ModelGeometry

SCHEMA_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "gate_config.json", "gate_model.safetensors", "README.md"


@dataclass(frozen=True)
class Adapter:
    """What an adapter directory holds.

    Attributes:
        gate: the gates' architecture.
        geometry: what they fit.
        tensors: ``layers.{i}.{q_proj,k_proj,q_norm,k_norm}.weight``.
        training: how they were trained; free-form JSON.
    """

    gate: GateConfig
    geometry: ModelGeometry
    tensors: dict[str, Tensor]
    training: dict[str, Any] = field(default_factory=dict)


def save_adapter(adapter: Adapter, directory: str | os.PathLike[str]) -> Path:
    """Write the three files. Each is replaced in one step, so that a reader never sees half a file."""
    from seergate import __version__

    out = Path(directory)
    if out.exists() and not out.is_dir():
        raise SeergateError(f"{out} is a file; the adapter needs a directory")
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "schema_version": SCHEMA_VERSION,
        "seergate_version": __version__,
        "gate": adapter.gate.to_dict(),
        "model": adapter.geometry.to_dict(),
        "training": adapter.training,
    }
    with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as scratch:
        weights, config, card = (Path(scratch) / name for name in (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
        save_file(tensors, weights, metadata={"format": "pt", "schema": str(SCHEMA_VERSION)})
        config.write_text(json.dumps(record, indent=2) + "\n")
        card.write_text(model_card(adapter))
        for path in (weights, config, card):
            with path.open("rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(path, out / path.name)
    return out


def load_adapter(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Adapter:
    """Read an adapter from a directory or from the Hub.

    Raises:
        SeergateError: if it is not there, incomplete, corrupt, or of a newer schema.
    """
    directory = _fetch(str(source), revision, token, cache_dir, local_files_only)
    directory = directory / subfolder if subfolder else directory
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise SeergateError(f"{directory} holds no {name}; an adapter has {CONFIG_FILE} and {WEIGHTS_FILE}")
    record = _read_config(directory / CONFIG_FILE)
    try:
        tensors = load_file(directory / WEIGHTS_FILE)
    except (SafetensorError, OSError, ValueError) as error:
        raise SeergateError(f"{directory / WEIGHTS_FILE} is not a readable safetensors file: {error}") from error
    return Adapter(
        gate=_build(GateConfig, record["gate"], directory),
        geometry=_build(ModelGeometry, record["model"], directory),
        tensors=tensors,
        training=record.get("training", {}),
    )


def push_adapter(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload attention gates",
    create_pr: bool = False,
) -> str:
    """Upload a saved adapter to the Hub, creating the repository if need be; returns the commit's address."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=directory,
        revision=revision,
        commit_message=commit_message,
        create_pr=create_pr,
        allow_patterns=[CONFIG_FILE, WEIGHTS_FILE, CARD_FILE],
    )
    return str(commit.commit_url)


def model_card(adapter: Adapter) -> str:
    """The README of an adapter: what it is for and how to use it."""
    geometry, gate = adapter.geometry, adapter.gate
    base = geometry.base_model
    is_hub_id = base is not None and base.count("/") == 1 and not Path(base).exists()
    lines = ["---", "library_name: seergate", "pipeline_tag: text-generation"]
    if is_hub_id:
        lines += [f"base_model: {base}", "base_model_relation: adapter"]
    lines += ["tags: [seergate, sparse-attention, block-sparse, attention-gate]", "---", ""]
    lines += [
        f"# Attention gates for {base or geometry.model_type}",
        "",
        "Learned AttnGates (SeerAttention-R, arXiv 2506.08889) for block-sparse decoding of a frozen model. "
        "The base model is not part of this repository and is not changed.",
        "",
        "```python",
        "import seergate",
        "",
        'model = seergate.load("this directory or repository", token_budget=4096)',
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| block size | {gate.block_size} tokens |",
        f"| gate width | {gate.gate_dim} |",
        f"| key pooling | {', '.join(gate.k_pooling)} |",
        f"| query pooling | {gate.q_pooling} |",
        f"| q/k norm, RoPE | {'yes' if gate.qk_norm else 'no'}, {'yes' if gate.rope else 'no'} |",
        f"| gated layers | {len(geometry.layers)} |",
        "",
    ]
    if adapter.training:
        lines += ["## Training", "", "```json", json.dumps(adapter.training, indent=2), "```", ""]
    return "\n".join(lines)


def _fetch(
    source: str,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
) -> Path:
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists():
        raise SeergateError(f"{source} is a file; gates are a directory or a Hub repository")
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise SeergateError(f"{source} is neither a directory here nor a Hub repository of the form org/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return Path(
            snapshot_download(
                source,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                allow_patterns=["*.json", "*.safetensors", CARD_FILE],
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise SeergateError(f"{source} could not be read from the Hub: {str(error).splitlines()[0]}") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise SeergateError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(record, dict) or not all(isinstance(record.get(key), dict) for key in ("gate", "model")):
        raise SeergateError(f'{path} must be a JSON object with the objects "gate" and "model"')
    version = record.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise SeergateError(f"{path} has schema_version {version!r}; it must be a positive integer")
    if version > SCHEMA_VERSION:
        warnings.warn(
            f"{path} has schema_version {version}; this seergate knows {SCHEMA_VERSION} and may miss something",
            stacklevel=4,
        )
    return record


def _build(kind: type, values: dict[str, Any], directory: Path) -> Any:
    unknown = sorted(set(values) - {f.name for f in fields(kind)})
    if unknown:
        warnings.warn(f"{directory / CONFIG_FILE}: ignoring unknown {', '.join(unknown)}", stacklevel=4)
    try:
        return kind.from_dict(values)  # type: ignore[attr-defined]
    except (TypeError, ValueError, KeyError) as error:
        raise SeergateError(f"{directory / CONFIG_FILE}: {error}") from error
