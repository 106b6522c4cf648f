"""Calibration of method options on the model and the task (`Method.calibrates`).

An option given as ``NAME:OPTION=auto`` in a sweep is measured before the evaluation: on held-out problems if the task
can make some, else on 1 % of the evaluated problems, as LazyEviction's authors do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval.generation.batch import Batch
from seergate.eval.generation.samples import Limit
from seergate.eval.sampling import SampledRow, Sampling, TokenChooser
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks.chain_sum import TRAINING_SEEDS
from seergate.eval.tasks.prompts import encode, end_ids, prompt_text
from seergate.eval.tasks.registry import make_task
from seergate.eval.tasks.task import Task, contents_hash
from seergate.fingerprint import fingerprint, rope_of
from seergate.methods import METHODS, Method
from seergate.methods.registry import keeping_class, reading_class
from seergate.progress import working

Prompts = Sequence[Sequence[int]]
"""Token ids of each prompt."""

FRACTION = 100
"""One in ``FRACTION`` problems is answered if the task cannot make held-out problems."""
FRESH = 4
"""Number of held-out problems that are answered if the task can make some."""


def check_auto(specs: Sequence[MethodSpec], matched: bool = False) -> None:
    """Raise `SeergateError` if an option is ``auto`` and cannot be measured. Options in `Method.searched_values` can
    be ``auto`` only if settings are ``matched`` in bytes.
    """
    for spec in specs:
        searched = reading_class(spec.name).searched_values()
        for option in spec.uncalibrated:
            if option in searched:
                if not matched:
                    raise SeergateError(
                        f"{spec.name}:{option} is 'auto', which finds a value of equal bytes; add --match read, or "
                        "give a value"
                    )
            elif option not in keeping_class(spec.name).calibrates:
                can = ", ".join(f"{name}:{option_name}" for name, option_name in calibrated_options())
                raise SeergateError(
                    f"{spec.name}:{option} is 'auto', which only these can be: {can}; give it a value of its own"
                )


def calibrated_options() -> list[tuple[str, str]]:
    """The (method, option) pairs that can be calibrated."""
    return [(name, option) for name in METHODS for option in METHODS[name].calibrates]


def calibration_of(kind: type[Method], option: str) -> type[Calibration]:
    """The class that measures an option of a method."""
    return resolve_name(kind.calibrates[option])


def evenly_chosen_prompts(tokenizer: PreTrainedTokenizerBase, task: Task, wanted: int | None) -> list[list[int]]:
    """Token ids of ``wanted`` prompts spread evenly over a task; of 1 % of its prompts if ``None``. The prompt of a
    text that is scored is what precedes the scored tokens.
    """
    problems = task.bound(tokenizer).problems()
    count = max(1, len(problems) // FRACTION) if wanted is None else min(wanted, len(problems))
    chosen = [problems[i * len(problems) // count] for i in range(count)]
    end = (task.max_total_tokens or 0) - task.scored if task.scored is not None else None
    return [encode(tokenizer, prompt_text(tokenizer, p))[:end] for p in chosen]


def other_problems(task: Task) -> tuple[Task, int | None]:
    """A task with held-out problems of the same kind and their number; the task itself and ``None`` if it has none."""
    if "variables" not in task.options:  # by its options: a file may be called chain_sum, too
        return task, None
    seed = (task.options["seed"] + TRAINING_SEEDS // 2) % TRAINING_SEEDS
    return make_task("chain_sum", problems=FRESH, variables=task.options["variables"], seed=seed), FRESH


def answers(
    model: PreTrainedModel,
    prompts: Prompts,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    ends: Collection[int] = (),
) -> Iterator[Batch]:
    """Answer prompts one by one with the attached method, greedily without ``sampling``, up to a token of ``ends``;
    yield each finished answer's batch of one row.
    """
    choose = TokenChooser(sampling or Sampling())
    for number, ids in enumerate(prompts):
        row, batch = SampledRow(list(ids), number), Batch(model)
        logits = batch.add([ids])
        while len(row.tokens) < max_new_tokens:
            row.tokens += choose(logits, [row])
            if row.tokens[-1] in ends or len(row.tokens) == max_new_tokens:
                break
            logits = batch.step(row.tokens[-1:])
        yield batch


def made_on(
    model: PreTrainedModel, task: Task, prompts: Prompts, max_new_tokens: int, sampling: Sampling
) -> dict[str, Any]:
    """Everything that a measurement depends on, as plain JSON types; stored with it and compared before its reuse."""
    return {
        "model": fingerprint(model),
        "rope": rope_of(model),
        "task": task.name,
        "contents": contents_hash(task.problems()),
        "problems": len(prompts),
        "max_new_tokens": max_new_tokens,
        "sampling": asdict(sampling),
    }


class Calibration(ABC):
    """The measurement of one option of a method; subclasses are dataclasses whose fields say how to measure it."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Calibration:
        """Make the measurement from a method's options; options that are not its fields are ignored."""
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})  # type: ignore[arg-type]

    @property
    @abstractmethod
    def file_name(self) -> str:
        """Name of the file in which an evaluation stores the result."""

    @abstractmethod
    def made(self, path: Path) -> dict[str, Any] | None:
        """The `made_on` that is stored with a result; ``None`` if the file holds no result."""

    @abstractmethod
    def measure(
        self, model: PreTrainedModel, prompts: Prompts, path: Path, about: Mapping[str, Any], **how: Any
    ) -> list[str]:
        """Answer prompts with dense attention, write the result to ``path`` and return it in words, line by line.

        Args:
            model: a model in eval mode, nothing attached.
            about: metadata to store with the result; its entry ``made`` is the `made_on`.
            **how: ``max_new_tokens``, ``sampling`` and ``ends`` of the answers.
        """

    def value(self, path: Path, token_budget: int | None) -> Any:
        """The option's value under a token budget; by default the path of the file."""
        return str(path)


class Calibrator:
    """Measures each ``"auto"`` option once, for one model (nothing attached) and the task that settings are evaluated
    on. A result in ``directory`` is reused if its `made_on` is the same.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        directory: Path,
        *,
        limit: Limit,
        sampling: Sampling,
    ) -> None:
        self.model, self.tokenizer, self.directory = model, tokenizer, directory
        self.limit, self.sampling = limit, sampling
        self.task, self.wanted = other_problems(task.bound(tokenizer))

    def __call__(self, spec: MethodSpec) -> MethodSpec:
        """Return a setting, already checked by `check_auto`, with every ``"auto"`` option measured."""
        measured = {option: self._measured(spec, option) for option in spec.uncalibrated}
        return replace(spec, calibrated=spec.calibrated | measured)

    def _measured(self, spec: MethodSpec, option: str) -> Any:
        calibration = calibration_of(keeping_class(spec.name), option).of(spec.options)
        path, (prompts, how, origin) = self.directory / calibration.file_name, self._answered
        if calibration.made(path) != origin:
            with working(f"calibrating {option} of {spec.name}"):
                calibration.measure(self.model, prompts, path, {"made": origin}, **how)
        return calibration.value(path, spec.token_budget)

    @cached_property
    def _answered(self) -> tuple[list[list[int]], dict[str, Any], dict[str, Any]]:
        """The prompts, how they are answered, and `made_on`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        prompts = evenly_chosen_prompts(self.tokenizer, self.task, self.wanted)
        longest = max(1, self.limit.of(max(map(len, prompts))))
        how = {"max_new_tokens": longest, "sampling": self.sampling, "ends": end_ids(self.model, self.tokenizer)}
        return prompts, how, made_on(self.model, self.task, prompts, longest, self.sampling)
