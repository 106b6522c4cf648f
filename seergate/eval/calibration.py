"""Options that some methods take from the model and the task: LazyEviction's window, TriAttention's centres.

``lazy_eviction:window=auto`` and ``tri_attention:centres=auto`` in a sweep mean: measure it before, on problems that
are not evaluated where the task can make more of them, and on 1 % of the problems (as LazyEviction's authors do) where
it cannot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.engine import Limit, encode, end_ids, prompt_text
from seergate.eval.recurrence import measure_recurrence, query_centres
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.eval.task import Task, contents_hash
from seergate.eval.tasks import CHAIN_SUM_SEEDS, make_task
from seergate.fingerprint import fingerprint, rope_of
from seergate.methods import LazyEviction, TriAttention
from seergate.methods.gate_on_evictor import SUFFIX
from seergate.methods.tri_attention import Centres

CALIBRATED = {LazyEviction.name: "window", TriAttention.name: "centres"}
FRACTION = 100
"""One problem of so many is answered, where the evaluated ones have to serve."""
FRESH = 4
"""Problems that are answered where the task can make more of them."""


def check_auto(specs: Sequence[MethodSpec]) -> None:
    """Refuse ``auto`` for an option that cannot be measured.

    Raises:
        SeergateError: naming the option, and those that can be.
    """
    for spec in specs:
        for option in spec.uncalibrated:
            if CALIBRATED.get(spec.name.removesuffix(SUFFIX)) != option:
                can = ", ".join(f"{name}:{known}" for name, known in CALIBRATED.items())
                raise SeergateError(
                    f"{spec.name}:{option} is 'auto', which only these can be: {can}; give it a value of its own"
                )


def evenly_chosen_prompts(tokenizer: PreTrainedTokenizerBase, task: Task, wanted: int | None) -> list[list[int]]:
    """Token ids of some of a task's prompts, spread evenly; 1 % of them if ``wanted`` is ``None``."""
    problems = task.bound(tokenizer).problems()
    count = max(1, len(problems) // FRACTION) if wanted is None else min(wanted, len(problems))
    chosen = [problems[i * len(problems) // count] for i in range(count)]
    return [encode(tokenizer, prompt_text(tokenizer, p)) for p in chosen]


def other_problems(task: Task) -> tuple[Task, int | None]:
    """A task with other problems of the same kind and how many to use; or the same task and ``None``."""
    if "variables" not in task.options:  # by its options: a file may be called chain_sum, too
        return task, None
    seed = (task.options["seed"] + CHAIN_SUM_SEEDS // 2) % CHAIN_SUM_SEEDS
    return make_task("chain_sum", problems=FRESH, variables=task.options["variables"], seed=seed), FRESH


def made_on(
    model: PreTrainedModel, task: Task, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling
) -> dict[str, Any]:
    """What a measurement depends on, as plain JSON types; kept with it, and compared before it is used again."""
    made = {
        "model": fingerprint(model),
        "rope": rope_of(model),
        "task": task.name,
        "contents": contents_hash(task.problems()),
        "problems": len(prompts),
        "max_new_tokens": max_new_tokens,
        "sampling": asdict(sampling),
    }
    return dict(json.loads(json.dumps(made, default=str)))


class Calibrator:
    """Measures options that are ``"auto"``, each once, for one model and one task.

    A window never takes more than half of a budget, which has to hold it.

    Args:
        model: in eval mode, nothing attached.
        task: that the settings will be evaluated on.
        directory: where what has been measured is kept. Found there, made on the same, it is not measured again.
        limit, sampling: of the answers.
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

    def __call__(self, specs: Sequence[MethodSpec]) -> list[MethodSpec]:
        """The settings, with every option that is ``"auto"`` measured.

        Args:
            specs: checked by `check_auto`.
        """
        found = []
        for spec in specs:
            if "window" in spec.uncalibrated:
                spec = replace(spec, calibrated={"window": self._window(spec)})
            elif spec.uncalibrated:
                spec = replace(spec, calibrated={"centres": str(self._centres)})
            found.append(spec)
        return found

    @cached_property
    def _prompts(self) -> list[list[int]]:
        self.directory.mkdir(parents=True, exist_ok=True)
        return evenly_chosen_prompts(self.tokenizer, self.task, self.wanted)

    @cached_property
    def _how(self) -> dict[str, Any]:
        longest = max(map(len, self._prompts))
        ends = end_ids(self.model, self.tokenizer)
        return {"max_new_tokens": max(1, self.limit.of(longest)), "sampling": self.sampling, "ends": ends}

    @cached_property
    def _made(self) -> dict[str, Any]:
        return made_on(self.model, self.task, self._prompts, self._how["max_new_tokens"], self.sampling)

    def _window(self, spec: MethodSpec) -> int:
        alpha = float(spec.options.get("alpha", LazyEviction.alpha))
        path = self.directory / f"lazy_eviction-{alpha:g}.json"
        record = store.read_json(path)
        if record is None or record.get("made") != self._made:
            found = measure_recurrence(self.model, self._prompts, alpha=alpha, **self._how)
            record = {"window": found.window(), "alpha": alpha, "made": self._made}
            store.write_json(path, record)
        return max(1, min(int(record["window"]), (spec.token_budget or 2 * record["window"]) // 2))

    @cached_property
    def _centres(self) -> Path:
        path = self.directory / "tri_attention.safetensors"
        if not path.exists() or Centres.load(path).made != self._made:
            query_centres(self.model, self._prompts, made=self._made, **self._how).save(path)
        return path
