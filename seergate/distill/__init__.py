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
    """Distil gates for a frozen model, or continue where a run of the same options was interrupted.

    Started in several processes (`torchrun`, `accelerate launch`, `deepspeed`), they share the work.

    Args:
        callbacks: listeners (`seergate.distill.callbacks`) beside the console and ``config.report_to``; called in the
            main process only.

    Returns:
        The adapter's directory.

    Raises:
        SeergateError: for mistakes in the model, the data or the options, or a checkpoint of another run. In a run of
            several processes a `CommonError`, where all of them fail together; `Stopped` after a stop signal.
    """
    from seergate.distill.trainer import run_together

    return run_together({"": (config, callbacks)})[0]


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
