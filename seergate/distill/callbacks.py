"""Callbacks of a run, and its console output: a progress bar or plain lines."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from seergate.progress import ProgressBar, duration


class _PerLayer:
    """Figures with a KL per layer."""

    kl_per_layer: list[float]

    @property
    def kl(self) -> float:
        """Mean over layers, in nats."""
        return sum(self.kl_per_layer) / len(self.kl_per_layer)


@dataclass(frozen=True)
class StepLog(_PerLayer):
    """Figures of one optimizer step, over all processes.

    Attributes:
        step: number of the step, from 1.
        loss: mean over the packs; with ``row_mean``, the KL in nats.
        kl_per_layer: KL of each layer in nats per row, mean over KV heads and packs.
        recall: token budget -> for each layer, the share of the teacher's attention mass in the gate's best blocks.
        layers: the gated layers' indices in the model.
        grad_norm: norm of the gradient before clipping.
        tokens, seconds: tokens and time of this step alone.
        memory_gb: peak memory of this process so far in GB (of the GPU if there is one, else resident).
    """

    step: int
    loss: float
    kl_per_layer: list[float]
    recall: dict[int, list[float]]
    layers: tuple[int, ...]
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    memory_gb: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, over all processes."""
        return self.tokens / self.seconds

    def scalars(self) -> dict[str, float]:
        """Values for trackers, by name."""
        values = {
            "kl/mean": self.kl,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "speed/tokens_per_second": self.tokens_per_second,
            "speed/memory_gb": self.memory_gb,
        }
        values |= {f"kl/layer_{layer}": v for layer, v in zip(self.layers, self.kl_per_layer, strict=True)}
        for budget, per_layer in self.recall.items():
            values[f"recall_at_{budget}/mean"] = sum(per_layer) / len(per_layer)
            values |= {f"recall_at_{budget}/layer_{i}": v for i, v in zip(self.layers, per_layer, strict=True)}
        return values


@dataclass(frozen=True)
class EvalLog(_PerLayer):
    """An evaluation on the held-out packs. The fields are those of `StepLog`, but recall is per layer and KV head."""

    step: int
    kl_per_layer: list[float]
    recall: dict[int, list[list[float]]]
    layers: tuple[int, ...]

    def mean_recall(self) -> dict[int, float]:
        """Return the mean recall over layers and KV heads for each token budget."""
        return {budget: float(np.mean(values)) for budget, values in self.recall.items()}

    def scalars(self) -> dict[str, float]:
        """Values for trackers, by name."""
        values = {"held_out/kl": self.kl}
        values |= {f"held_out/kl_layer_{i}": v for i, v in zip(self.layers, self.kl_per_layer, strict=True)}
        values |= {f"held_out/recall_at_{budget}": v for budget, v in self.mean_recall().items()}
        return values


class Callback:
    """Base class of callbacks, which run in the main process only. A subclass overrides the events that it needs."""

    def on_message(self, text: str) -> None:
        """Called with each line of text for the user."""

    def on_step(self, log: StepLog) -> None:
        """Called after each optimizer step."""

    def on_eval(self, log: EvalLog) -> None:
        """Called after each evaluation of the held-out packs."""

    def close(self) -> None:
        """Called at the end of the run."""


class Console(Callback):
    """Shows a progress bar on a terminal, otherwise prints a line every ``logging_steps`` steps. If ``shows_steps`` is
    false, only messages are printed. Messages are prefixed with ``name`` unless it is empty.
    """

    def __init__(self, steps: int, done: int, logging_steps: int, name: str, shows_steps: bool) -> None:
        self._steps, self._every = steps, logging_steps
        self._first: tuple[int, float] | None = None
        self._prefix, self._shows_steps = f"{name}: " if name else "", shows_steps
        self._bar = ProgressBar(wanted=shows_steps)
        self._task = self._bar.add("distilling", steps, done)

    def on_message(self, text: str) -> None:
        self._bar.say(f"{self._prefix}{text}")

    def on_step(self, log: StepLog) -> None:
        recall = "".join(f"  recall@{b} {sum(v) / len(v):.3f}" for b, v in list(log.recall.items())[:1])
        note = f"KL {log.kl:.4f}{recall}  {log.tokens_per_second:,.0f} tokens/s"
        left = self._left(log.step)
        self._bar.update(self._task, log.step, f"{note}{left}")
        is_due = log.step % self._every == 0 or log.step in (1, self._steps)
        if self._shows_steps and is_due and not self._bar.shown:
            self.on_message(f"step {log.step}/{self._steps}  {note}  lr {log.learning_rate:.2e}{left}")

    def _left(self, step: int) -> str:
        """The estimated time that is left, from the time since this process's first step, which is a warm-up."""
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        if step in (self._first[0], self._steps):
            return ""
        first, began = self._first
        return f"  {duration((self._steps - step) * (now - began) / (step - first))} left"

    def on_eval(self, log: EvalLog) -> None:
        recall = "".join(f"  recall@{budget} {value:.3f}" for budget, value in log.mean_recall().items())
        self.on_message(f"held out, step {log.step}: KL {log.kl:.4f}{recall}")

    def close(self) -> None:
        self._bar.close()
