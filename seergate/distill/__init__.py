"""Distils gates from a frozen model's own attention. Importing this package imports neither torch nor transformers.

The package is callable, which is the shortest way to start a run:

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
    """Distil gates for a frozen model, or resume an interrupted run with the same options.

    If several processes are launched (`torchrun`, `accelerate launch`, `deepspeed`), they share the work.

    Args:
        callbacks: callbacks to call in addition to the console and the trackers of ``config.report_to``
            (`seergate.distill.callbacks`). They are called in the main process only.

    Returns:
        The adapter's directory.

    Raises:
        SeergateError: if the model, the data or an option is invalid, or if the checkpoint belongs to another run. The
            subclass `CommonError` if all processes of a run fail together, and `Stopped` after a stop signal.
    """
    from seergate.distill.trainer import run_together

    return run_together({"": (config, callbacks)})[0]


class _CallablePackage(ModuleType):
    """Module class that makes the package ``seergate.distill`` callable."""

    def __call__(self, model: str | None = None, *, callbacks: Iterable[Callback] = (), **options: Any) -> Path:
        """Distil gates for a model.

        Args:
            model: a preset of ``configs/``, a directory or a Hub id.
            callbacks: see `seergate.distill.callbacks`.
            **options: fields of `TrainConfig`; they override those of the preset.

        Returns:
            The adapter's directory.

        Raises:
            SeergateError: see `run_distillation`; also for an unknown model or option.
            ValueError: if an option is out of range.
        """
        return run_distillation(load_train_config(model, options), callbacks)


sys.modules[__name__].__class__ = _CallablePackage
