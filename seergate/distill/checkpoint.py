"""Checkpoints of a run: gates, optimizer state and position in the data. No base model, no pickle.

A checkpoint is written under a temporary name, flushed to disk and renamed. So every directory with a checkpoint's
name is complete, and a run that was killed at any moment resumes from the newest complete checkpoint.
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

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from seergate.distill.commits import REVISIONS
from seergate.distill.config import TrainConfig
from seergate.distill.sources import COMMIT
from seergate.durable import flush, naming, save_file
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
    """Everything that a run needs to resume as if it had not been interrupted.

    Attributes:
        step: number of optimizer steps taken; it also determines the position in the data.
        state: gates and AdamW moments, named as in `seergate.distill.engines.Engine.state`.
        run: the options that determine the result, and the fingerprints of model and data. A run can resume only if
            its own are equal. Revisions are stored as commits.
        progress: state of the training loop, such as the best evaluation and the tokens seen, as JSON types.
    """

    step: int
    state: dict[str, Tensor]
    run: dict[str, Any]
    progress: dict[str, Any]


def save_checkpoint(root: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint such as ``root/step-00000100`` atomically, and delete all but the newest ``keep``."""
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{checkpoint.step:08d}"
    draft = root / f"{_DRAFT}{final.name}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)  # of a save that failed
    draft.mkdir()
    save_file({n: x.contiguous() for n, x in checkpoint.state.items()}, draft / "state.safetensors", {"format": "pt"})
    record = {"format": FORMAT, "step": checkpoint.step, "run": checkpoint.run, "progress": checkpoint.progress}
    with naming(file := draft / "state.json"):
        file.write_text(json.dumps(record, indent=1), encoding="utf-8")
    for file in draft.iterdir():
        flush(file)
    flush(draft)
    if final.exists():  # the run repeats this step after it resumed from an older checkpoint
        _discard(final)
    draft.rename(final)
    flush(root)
    for old in _finished(root)[:-keep]:
        _discard(old)
    return final


def newest_checkpoint(root: Path) -> Path | None:
    """Return the newest checkpoint, or ``None`` if there is none."""
    return max(_finished(root), default=None)


def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON part of a checkpoint; raises `SeergateError` if it is damaged or of another format."""
    with _damage(path):
        record: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("state.json is no JSON object")
    if record.get("format") != FORMAT:
        raise SeergateError(f"the checkpoint {path} has format {record.get('format')}; this version reads {FORMAT}")
    return record


def load_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint; raises `SeergateError` if it is damaged or of another format."""
    record = read_record(path)
    with _damage(path):
        tensors = load_file(path / "state.safetensors")
    # Checkpoints of earlier versions also hold PyTorch's random states, from which no step draws.
    state = {name: x for name, x in tensors.items() if not name.startswith("random.")}
    return Checkpoint(record["step"], state, record["run"], record["progress"])


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Report an unreadable file as a `SeergateError`."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise SeergateError(f"the checkpoint {path} is damaged; delete it to continue from the one before") from error


def check_same_run(path: Path, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise `SeergateError` if a checkpoint was made with other options or fingerprints than the run that resumes."""
    for name in sorted(recorded.keys() | current.keys(), key=lambda name: (name.endswith("_fingerprint"), name)):
        if name in REVISIONS and not COMMIT.fullmatch(str(recorded.get(name))):
            continue  # the commit was unknown; the fingerprints are compared instead
        if name == "model_rope" and name not in recorded:
            continue  # as in earlier versions
        made_with, requested = (run.get(name, LEGACY_DEFAULTS.get(name)) for run in (recorded, current))
        if name == "data" and Path(str(requested)).exists() and Path(str(requested)).name == Path(str(made_with)).name:
            continue  # another way to write the path, or a moved file, whose contents are in the data's fingerprint
        if made_with != requested:
            raise SeergateError(
                f"{path} was made with {name}={made_with!r} and this run has {requested!r}; use the same, or another "
                "output directory (`seergate train` also has --no-resume, to start over)"
            )


def clear_drafts(root: Path) -> None:
    """Delete the half-written and half-deleted checkpoints of a killed run."""
    for draft in root.glob(f"{_DRAFT}*"):
        shutil.rmtree(draft)


def remove_checkpoints(root: Path) -> None:
    """Delete all checkpoints and drafts."""
    clear_drafts(root)
    for path in _finished(root):
        _discard(path)


def _finished(root: Path) -> list[Path]:
    return sorted(p for p in root.glob("step-*") if _NAME.fullmatch(p.name))


def _discard(path: Path) -> None:
    """Rename a checkpoint before deleting it, so that a killed process leaves no partial checkpoint under its name."""
    doomed = path.with_name(f"{_DRAFT}{path.name}-old-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)
