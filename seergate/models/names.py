"""Finds models and gates by the names that users give them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from seergate.errors import SeergateError, did_you_mean
from seergate.paths import GGUF, HUB_ID, gguf_file, is_local_model, shipped
from seergate.yaml_file import read_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from seergate.models.gate_bank import GateBank

TINY = "tiny-reasoner"
TINY_MODEL = "checkpoints/tiny-reasoner"
TINY_GATES = "checkpoints/tiny-reasoner/gates"


def presets() -> dict[str, Path]:
    """The presets: name in lower case -> YAML file of training options."""
    return {path.stem: path for path in sorted(shipped("configs").glob("*.yaml"))}


def preset_of(model: object) -> Path | None:
    """The preset of a model's name: by its own name in any case, or by the Hub id of its model; ``None`` for others.

    Raises:
        SeergateError: if the name is neither that of a preset, nor a directory, a GGUF file or a Hub id.
    """
    if not isinstance(model, str) or not model.strip():
        raise SeergateError(
            f"model is {model!r}; it must be a preset, a directory, a GGUF file or a Hub id (org/name)"
        )
    paths = presets()
    if is_local_model(model):
        return None
    if model.lower() in paths:
        return paths[model.lower()]
    if model.lower().endswith(GGUF):
        raise SeergateError(f"the model file {model!r} does not exist")
    if HUB_ID.fullmatch(model):
        return next((path for path in paths.values() if _model_of(path).lower() == model.lower()), None)
    hint = did_you_mean(model, paths)
    raise SeergateError(
        f"model {model!r} is neither a directory, nor a GGUF file, nor a Hub id (org/name), nor a preset; {hint}"
    )


def _model_of(preset: Path) -> str:
    return str(read_yaml(preset).get("model", ""))


def locate(model: str) -> str:
    """The name of a model for `load_base`: a shipped model's path; a `SeergateError` if the directory is missing."""
    if is_local_model(model):
        return model
    try:
        return str(shipped(model))
    except FileNotFoundError:
        pass
    if HUB_ID.fullmatch(model) and Path(model).parts[0] != "checkpoints":
        return model
    raise SeergateError(f"the model directory {model!r} does not exist")


def model_path(name: str) -> str:
    """The directory, GGUF file or Hub id of a model or a preset."""
    preset = preset_of(name)
    return locate(name if preset is None else _model_of(preset))


def is_tiny(model: str) -> bool:
    """True if a model is the tiny reasoner that ships with seergate, or the copy of a checkout."""
    try:
        path = model_path(model)
        return path == TINY_MODEL or os.path.samefile(path, shipped(TINY_MODEL))
    except FileNotFoundError:  # on the Hub
        return False


def gates_for(model: str, gates: str | None) -> str | None:
    """The given adapter, else the one in ``gates/`` of the model's directory; ``None`` if there is none."""
    from seergate.gates.files import CONFIG_FILE

    if gates is not None:
        return gates
    beside = Path(model_path(model)).resolve() / "gates"
    return str(beside) if (beside / CONFIG_FILE).is_file() else None


def bank_for(model: str, gates: str | None) -> GateBank | None:
    """Load the adapter that `gates_for` finds; ``None`` if there is none."""
    from seergate.models.gate_bank import GateBank

    source = gates_for(model, gates)
    return None if source is None else GateBank.from_pretrained(source)


def say_gates(model: str, gates: str | Mapping[int | str, str] | None) -> str:
    """A line that says which gates a command uses."""
    if isinstance(gates, Mapping):
        return "gates: " + ", ".join(f"{name} = {source}" for name, source in gates.items())
    return f"gates: {gates_for(model, gates)}" + ("" if gates else ", beside the model (others: --gates)")


def load_banks(model: str, gates: str | Mapping[int | str, str] | None) -> GateBank | dict[int | str, GateBank] | None:
    """Load the gates of an evaluation: one adapter (`bank_for`), or several by name."""
    from seergate.models.gate_bank import GateBank

    if isinstance(gates, Mapping):
        return {name: GateBank.from_pretrained(source) for name, source in gates.items()}
    return bank_for(model, gates)


def load_model(path: str, dtype: str = "auto", device: str = "auto", engine: str = "transformers") -> PreTrainedModel:
    """Load a model for generation. ``auto`` means the dtype of the checkpoint, and the GPU if there is one; the CPU if
    another engine generates, which needs the GPU's memory for itself.
    """
    import torch
    from transformers.utils import logging

    from seergate.models.loading import load_base

    logging.disable_progress_bar()
    automatic = "cuda" if engine == "transformers" and torch.cuda.is_available() else "cpu"
    place = automatic if device == "auto" else device
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise SeergateError(
            f"device is {device!r}; this machine has "
            + ", ".join(["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))])
        ) from error
    return load_base(path, device=place, dtype=dtype if dtype == "auto" else getattr(torch, dtype))


def check_file_served(path: str, server: str) -> None:
    """Refuse a GGUF file for a server, which reads models only from directories and the Hub."""
    if (file := gguf_file(path)) is not None:
        raise SeergateError(
            f"--model is the GGUF file {file}; with --engine {server} it must be a directory or a Hub id"
        )
