"""Checkpoints of a run: gates, optimizer, random state, place in the data. Never the base model, never a pickle.

A checkpoint is written under a temporary name, flushed to the disk, and renamed; so whatever carries a checkpoint's
name is whole, and a run killed at any moment finds the newest whole one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from seergate.distill.commits import REVISIONS
from seergate.distill.config import TrainConfig
from seergate.distill.sources import COMMIT
from seergate.durable import flush
from seergate.errors import SeergateError

FORMAT = 1
LEGACY_DEFAULTS = {
    **{item.name: list(x) if isinstance(x := item.default, tuple) else x for item in fields(TrainConfig)},
    "loss_scale": 1.0,
}
"""Defaults for checkpoints written before an option existed."""

_NAME = re.compile(r"step-(\d{8})")
_DRAFT = ".draft-"


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on as if it had never stopped.

    Attributes:
        step: optimizer steps taken, which is also the place in the data.
        state: gates and moments, as `seergate.distill.engines.Engine.state` names them.
        run: the options that shape the result and the fingerprints of model and data; a run continues only if its own
            are equal. Revisions are the commits that they meant.
        random: random states by device name, uint8.
        progress: state of the training loop (best evaluation so far, tokens seen), JSON.
    """

    step: int
    state: dict[str, Tensor]
    run: dict[str, Any]
    random: dict[str, Tensor]
    progress: dict[str, Any]


def random_states() -> dict[str, Tensor]:
    """PyTorch's random states."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Inverse of `random_states`; a device that is not here is skipped."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def save_checkpoint(root: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write ``root/step-00000100`` in one move and remove all but the newest ``keep``."""
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{checkpoint.step:08d}"
    draft = root / f"{_DRAFT}{final.name}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)  # of a save that failed
    draft.mkdir()
    tensors = checkpoint.state | {f"random.{name}": x for name, x in checkpoint.random.items()}
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, draft / "state.safetensors", metadata={"format": "pt"}
    )
    record = {"format": FORMAT, "step": checkpoint.step, "run": checkpoint.run, "progress": checkpoint.progress}
    (draft / "state.json").write_text(json.dumps(record, indent=1))
    for file in draft.iterdir():
        flush(file)
    flush(draft)
    if final.exists():  # the same step again, after going back to an older checkpoint
        _discard(final)
    draft.rename(final)
    flush(root)
    for old in _finished(root)[:-keep]:
        _discard(old)
    return final


def newest_checkpoint(root: Path) -> Path | None:
    """The checkpoint to continue from, if there is one."""
    found = _finished(root)
    return found[-1] if found else None


def read_record(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON part."""
    with _damage(path):
        record: dict[str, Any] = json.loads((path / "state.json").read_text())
    if record.get("format") != FORMAT:
        raise SeergateError(f"the checkpoint {path} has format {record.get('format')}; this version reads {FORMAT}")
    return record


def load_checkpoint(path: Path) -> Checkpoint:
    """Inverse of `save_checkpoint`."""
    record = read_record(path)
    with _damage(path):
        state = load_file(path / "state.safetensors")
    random = {name.removeprefix("random."): state.pop(name) for name in list(state) if name.startswith("random.")}
    return Checkpoint(record["step"], state, record["run"], random, record["progress"])


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Report a file that cannot be read."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise SeergateError(f"the checkpoint {path} is damaged; delete it to continue from the one before") from error


def check_same_run(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to continue a run with options or fingerprints that would make it another."""
    for name in sorted(found.keys() | wanted.keys(), key=lambda name: (name.endswith("_fingerprint"), name)):
        if name in REVISIONS and not COMMIT.fullmatch(str(found.get(name))):
            continue  # the commit was not known: the fingerprint decides
        made_with, asked = (run.get(name, LEGACY_DEFAULTS.get(name)) for run in (found, wanted))
        if made_with != asked:
            raise SeergateError(
                f"{path} was made with {name}={made_with!r} and this run has {asked!r}; use the same, another "
                "output_dir, or --no-resume to start over"
            )


def clear_drafts(root: Path) -> None:
    """Remove what a killed run left half-written or half-deleted."""
    if root.is_dir():
        for draft in root.glob(f"{_DRAFT}*"):
            shutil.rmtree(draft)


def remove_checkpoints(root: Path) -> None:
    """Start over."""
    clear_drafts(root)
    for path in _finished(root):
        _discard(path)


def _finished(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if _NAME.fullmatch(p.name)) if root.is_dir() else []


def _discard(path: Path) -> None:
    """Delete a checkpoint so that a kill half-way leaves no half checkpoint under its name."""
    doomed = path.with_name(f"{_DRAFT}{path.name}-old-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)
