"""Division of the time of `seergate tune` between training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from seergate.errors import SeergateError
from seergate.progress import duration

TRAINING_SHARE = 2 / 3
"""Share of the time that is spent on training."""

EPOCHS = 2
"""Maximum number of times that a text is trained on, as in the search for the recipe."""

LEAST_STEPS = 20
"""Minimum training steps, a tenth of the recommended recipe's; a shorter time is refused."""

LEAST, MOST = 8, 200
"""Minimum and maximum number of needle problems."""


@dataclass(frozen=True)
class Times:
    """Measured seconds.

    Attributes:
        step: seconds of a training step.
        dense, gate: seconds of a needle problem, answered with dense attention and with gates.
        dense_text, gate_text: seconds of a scored text, likewise.
    """

    step: float
    dense: float
    gate: float
    dense_text: float
    gate_text: float

    def pair(self, budgets: int) -> float:
        """Seconds of a problem and a text under all settings; dense attention reads each text once more to compare."""
        return self.dense + 2 * self.dense_text + budgets * (self.gate + self.gate_text)


@dataclass(frozen=True)
class Decision:
    """Training steps, needle problems and scored texts that fit into the time, and the expected seconds of training
    and of evaluation.
    """

    steps: int
    problems: int
    texts: int
    training: float
    evaluation: float


def decide(hours: float, spent: float, times: Times, packs: int, held_out: int, budgets: int) -> Decision:
    """Divide the hours given by the user.

    Args:
        spent: seconds of them used so far.
        packs, held_out, budgets: numbers of packs to train on, of held-out texts, and of budgets that are compared.

    Raises:
        SeergateError: if they are too few, saying how many they must be.
    """
    left, pair, most_steps = 3600 * hours - spent, times.pair(budgets), EPOCHS * packs
    steps = max(0, min(int(TRAINING_SHARE * left / times.step), most_steps))
    problems = min(int((left - steps * times.step) / pair), MOST)
    if steps < min(LEAST_STEPS, most_steps) or problems < LEAST:
        needed = max(LEAST_STEPS * times.step / TRAINING_SHARE, LEAST * pair / (1 - TRAINING_SHARE)) + spent
        raise SeergateError(
            f"hours is {hours:g}; it must be at least {1.05 * needed / 3600:.2g}, as {LEAST_STEPS} steps of training "
            f"take {duration(LEAST_STEPS * times.step)} here, and {LEAST} problems and texts {duration(LEAST * pair)}"
        )
    return Decision(steps, problems, min(problems, held_out), steps * times.step, problems * pair)
