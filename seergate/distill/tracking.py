"""Experiment trackers: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import importlib
import importlib.util
import math
import threading
import zlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from seergate.distill.callbacks import Callback, EvalLog, StepLog
from seergate.distill.config import TrainConfig
from seergate.durable import naming
from seergate.errors import DISK, SeergateError

if TYPE_CHECKING:
    from PIL.Image import Image


class Tracker(Callback, ABC):
    """Logs the scalars of every step and evaluation, and a heat map of the recall of every evaluation."""

    @abstractmethod
    def numbers(self, values: dict[str, float], step: int) -> None:
        """Log scalars: name -> value."""

    @abstractmethod
    def picture(self, name: str, image: Image, step: int) -> None:
        """Log an image."""

    def on_step(self, log: StepLog) -> None:
        self.numbers(log.scalars(), log.step)

    def on_eval(self, log: EvalLog) -> None:
        for budget, values in log.recall.items() if math.isfinite(log.kl) else ():
            title = f"% of the teacher's mass in the gate's best {budget} tokens; held out, step {log.step}"
            image = heat_map(np.asarray(values), log.layers, title)
            self.picture(f"held_out/recall_at_{budget}_map", image, log.step)
        self.numbers(log.scalars(), log.step)


class TensorBoard(Tracker):
    """Writes event files to the run's directory; a resumed run overwrites the steps that it repeats."""

    def __init__(self, config: TrainConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = config.run_dir / "tensorboard"
        self._writer = SummaryWriter(str(self._directory), purge_step=first_step)
        threading.excepthook = _show_unless_of_disk

    def numbers(self, values: dict[str, float], step: int) -> None:
        with naming(self._directory):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # if the run is killed, the steps before its checkpoint must be on disk

    def picture(self, name: str, image: Image, step: int) -> None:
        with naming(self._directory):
            self._writer.add_image(name, np.asarray(image), step, dataformats="HWC")

    def close(self) -> None:
        with naming(self._directory):
            self._writer.close()


def _show_unless_of_disk(error: threading.ExceptHookArgs) -> None:
    """Leave out the traceback of a full disk: what writes event files in a thread raises it again in the main one."""
    if not (isinstance(error.exc_value, OSError) and error.exc_value.errno in DISK):
        threading.__excepthook__(error)


class WandbLike(Tracker):
    """Logs to Weights & Biases or to Trackio, which has the same interface. The run's name depends on its directory,
    so that a resumed run is appended to the earlier one.
    """

    def __init__(self, service: str, config: TrainConfig) -> None:
        self._service: Any = importlib.import_module(service)
        place = str(config.run_dir.resolve())
        options: dict[str, Any] = {"name": f"{config.run_dir.name}-{zlib.crc32(place.encode()):08x}"}
        if service == "wandb":
            options |= {"id": options["name"], "dir": place}
        self._run = self._service.init(project="seergate", config=config.to_dict(), resume="allow", **options)

    def numbers(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def picture(self, name: str, image: Image, step: int) -> None:
        self._run.log({name: self._service.Image(image)}, step=step)

    def close(self) -> None:
        self._run.finish()


def check_trackers(config: TrainConfig) -> None:
    """Raise `SeergateError` early if a tracker of ``config.report_to`` is not installed."""
    for name in config.report_to:
        if name != "none" and importlib.util.find_spec(name) is None:
            raise SeergateError(f"report_to names {name}, which is not installed; run: pip install {name}")


def open_trackers(config: TrainConfig, first_step: int) -> list[Tracker]:
    """Create the trackers of ``config.report_to`` for a run that starts or resumes at ``first_step`` (from 1)."""
    names = [name for name in config.report_to if name != "none"]
    return [TensorBoard(config, first_step) if name == "tensorboard" else WandbLike(name, config) for name in names]


def heat_map(shares: np.ndarray, layers: tuple[int, ...], title: str) -> Image:
    """Draw shares ``[layers, KV heads]`` in 0..1 as a heat map, shaded from the smallest to the largest."""
    from PIL import Image, ImageDraw

    left, top, wide, high = 60, 36, 34, 16
    rows, columns = shares.shape
    low, spread = shares.min(), np.ptp(shares) or 1.0
    image = Image.new("RGB", (max(left + columns * wide, 6 * len(title)) + 8, top + rows * high + 4), "white")
    draw = ImageDraw.Draw(image)
    draw.text((4, 2), title, "black")
    for j in range(columns):
        draw.text((left + j * wide + 2, top - 14), f"KV {j}", "black")
    for i, layer in enumerate(layers):
        draw.text((4, top + i * high + 2), f"layer {layer}", "black")
        for j, share in enumerate(shares[i]):
            shade = (share - low) / spread
            red, green, blue = (np.interp(shade, [0, 0.5, 1], stops) for stops in _DARK_TO_LIGHT)
            x, y = left + j * wide, top + i * high
            draw.rectangle((x, y, x + wide - 2, y + high - 2), (round(red), round(green), round(blue)))
            draw.text((x + 4, y + 2), f"{100 * share:.1f}", "black" if shade > 0.6 else "white")
    return image


_DARK_TO_LIGHT = ((13, 180, 253), (8, 50, 250), (91, 120, 170))
"""Levels of red, green and blue at the smallest, the middle and the largest share."""
