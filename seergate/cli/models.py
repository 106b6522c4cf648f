"""Finds models and gates by the names that users give them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from seergate.errors import SeergateError, sentence
from seergate.gates.files import CONFIG_FILE
from seergate.paths import gguf_file, shipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from seergate.eval.settings import Banks
    from seergate.models.gate_bank import GateBank

TINY = "tiny-reasoner"
TINY_MODEL = "checkpoints/tiny-reasoner"
TINY_GATES = "checkpoints/tiny-reasoner/gates"


def model_path(name: str) -> str:
    """The directory, GGUF file or Hub id of a model or a preset."""
    from seergate.distill.config import load_train_config, locate_model

    return locate_model(load_train_config(name)).model


def is_tiny(model: str) -> bool:
    """True if a model is the tiny reasoner that ships with seergate."""
    try:
        return os.path.samefile(model_path(model), shipped(TINY_MODEL))
    except FileNotFoundError:  # on the Hub
        return False


def gates_for(model: str, gates: str | None) -> str | None:
    """The given adapter, else the one in ``gates/`` of the model's directory; ``None`` if there is none."""
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


def load_banks(model: str, gates: str | Mapping[int | str, str] | None) -> Banks:
    """Load the gates of an evaluation: one adapter (`bank_for`), or several by name."""
    from seergate.models.gate_bank import GateBank

    if isinstance(gates, Mapping):
        return {name: GateBank.from_pretrained(source) for name, source in gates.items()}
    return bank_for(model, gates)


def load_model(path: str, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """Load a model for generation. ``auto`` means the dtype of the checkpoint, and the GPU if there is one."""
    import torch
    from transformers.utils import logging

    from seergate.models.loading import load_base

    logging.disable_progress_bar()
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
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


def check_writable(out: Path) -> None:
    """Create an output directory, or refuse it before long work if it cannot be written to."""
    if out.exists() and not out.is_dir():
        raise SeergateError(f"{out} is a file; the output needs a directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SeergateError(f"the output {out} cannot be made: {sentence(error)}") from error
    if not os.access(out, os.W_OK):
        raise SeergateError(f"{out} cannot be written to")
