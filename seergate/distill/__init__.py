"""Distils gates from a frozen model's own attention. Importing this imports neither torch nor transformers.

The package can be called, which is the shortest way to a run:

>>> import seergate
>>> seergate.distill("Qwen3-8B", output_dir="runs/qwen3-8b-gates")  # doctest: +SKIP
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from seergate.distill.config import TrainConfig, load_train_config

if TYPE_CHECKING:
    from seergate.distill.callbacks import Callback

__all__ = ["TrainConfig", "load_train_config", "run_distillation"]


def run_distillation(config: TrainConfig, callbacks: Iterable[Callback] = ()) -> Path:
    """Distil gates, or continue an interrupted run.

    Args:
        callbacks: listeners (`seergate.distill.callbacks`).

    Returns:
        The adapter's directory.
    """
    from seergate.distill.trainer import run_distillation as run

    return run(config, callbacks)


class _CallablePackage(ModuleType):
    """Lets ``seergate.distill`` be both the package and the function that users call."""

    def __call__(self, model: str | None = None, *, callbacks: Iterable[Callback] = (), **options: Any) -> Path:
        """Distil gates for a model.

        Args:
            model: a preset of ``configs/``, a directory or a Hub id.
            callbacks: see `seergate.distill.callbacks`.
            **options: fields of `TrainConfig`, over those of the preset.

        Returns:
            The adapter's directory.

        Raises:
            SeergateError: for an unknown model or option, or data that cannot be used.
            ValueError: for an option out of range.
        """
        return run_distillation(load_train_config(model, options), callbacks)


sys.modules[__name__].__class__ = _CallablePackage
