"""Experiment trackers: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import zlib
from abc import ABC, abstractmethod
from typing import Any

from seergate.distill.callbacks import Callback, EvalLog, StepLog
from seergate.distill.config import TrainConfig
from seergate.durable import naming
from seergate.errors import DISK, SeergateError, first_line


class Tracker(Callback, ABC):
    """Logs the scalars of every step and evaluation."""

    @abstractmethod
    def numbers(self, values: dict[str, float], step: int) -> None:
        """Log scalars: name -> value."""

    def on_step(self, log: StepLog) -> None:
        self.numbers(log.scalars(), log.step)

    def on_eval(self, log: EvalLog) -> None:
        self.numbers(log.scalars(), log.step)


class TensorBoard(Tracker):
    """Writes event files to the run's directory; a resumed run overwrites the steps that it repeats."""

    def __init__(self, config: TrainConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = config.run_dir / "tensorboard"
        self._writer = SummaryWriter(str(self._directory), purge_step=first_step)
        self._excepthook, threading.excepthook = threading.excepthook, self._show_unless_of_disk

    def numbers(self, values: dict[str, float], step: int) -> None:
        with naming(self._directory):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # if the run is killed, the steps before its checkpoint must be on disk

    def close(self) -> None:
        try:
            with naming(self._directory):
                self._writer.close()
        finally:
            threading.excepthook = self._excepthook

    def _show_unless_of_disk(self, error: threading.ExceptHookArgs) -> None:
        """Leave out the traceback of a full disk: writing in the thread fails again in the main one."""
        if not (isinstance(error.exc_value, OSError) and error.exc_value.errno in DISK):
            self._excepthook(error)


class WandbLike(Tracker):
    """Logs to Weights & Biases or to Trackio, which has the same interface. The run's name depends on its directory,
    so a resumed run is appended to the earlier one. A run that starts over is not, as W&B ignores repeated steps.
    """

    def __init__(self, service: str, config: TrainConfig, first_step: int) -> None:
        self._service: Any = importlib.import_module(service)
        place = str(config.run_dir.resolve())
        options: dict[str, Any] = {"name": f"{config.run_dir.name}-{zlib.crc32(place.encode()):08x}"}
        options |= {"project": "seergate"} | ({"resume": "allow"} if first_step > 1 else {})
        if service == "wandb":
            options |= {"id": options["name"], "dir": place}
            variables = {name: f"WANDB_{'RUN_ID' if name == 'id' else name.upper()}" for name in options}
            options = {name: options[name] for name in options if not os.environ.get(variables[name])}
        try:
            self._run = self._service.init(config=config.to_dict(), **options)
        except Exception as error:  # without a login or a network
            raise SeergateError(f"report_to names {service}, which does not start: {first_line(error)}") from error

    def numbers(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def check_trackers(config: TrainConfig) -> None:
    """Raise `SeergateError` early if a tracker of ``config.report_to`` is not installed."""
    for name in config.report_to:
        # A directory with the name, such as that of W&B's logs, is found without an origin.
        if name != "none" and getattr(importlib.util.find_spec(name), "origin", None) is None:
            raise SeergateError(f"report_to names {name}, which is not installed; run: pip install {name}")


def open_trackers(config: TrainConfig, first_step: int) -> list[Tracker]:
    """Create the trackers of ``config.report_to`` for a run that starts or resumes at ``first_step`` (from 1)."""
    names, run = [name for name in config.report_to if name != "none"], (config, first_step)
    return [TensorBoard(*run) if name == "tensorboard" else WandbLike(name, *run) for name in names]
