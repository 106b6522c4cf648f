"""Distils gates from a frozen model's own attention. Importing this imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seergate.distill.config import TrainConfig, load_train_config

if TYPE_CHECKING:
    from seergate.distill.callbacks import Callback

__all__ = ["TrainConfig", "load_train_config", "main", "run_distillation"]


def run_distillation(config: TrainConfig, callbacks: Iterable[Callback] = ()) -> Path:
    """Distil gates, or continue an interrupted run; see `seergate.distill.trainer.run_distillation`.

    Returns:
        The adapter's directory.
    """
    from seergate.distill.trainer import run_distillation as run

    return run(config, callbacks)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """The command line of `train.py`; returns the exit code."""
    from seergate.distill.command import main as command

    return command(argv, prog)
