"""Distils gates from a frozen model's own attention. Importing this package imports neither torch nor transformers.

>>> from seergate.distill import load_train_config, run_distillation
>>> run_distillation(load_train_config("Qwen3-8B", {"output_dir": "runs/qwen3-8b-gates"}))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

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
