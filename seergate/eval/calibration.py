"""Options that some methods take from the model and the task: LazyEviction's window, TriAttention's centres.

``lazy_eviction:window=auto`` and ``tri_attention:centres=auto`` in a sweep mean: measure it before, on problems that
are not evaluated where the task can make more of them, and on 1 % of the problems (as LazyEviction's authors do) where
it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.engine import Limit, encode, end_ids, prompt_text
from seergate.eval.recurrence import measure_recurrence, query_centres
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec
from seergate.eval.task import Task
from seergate.eval.tasks import CHAIN_SUM_SEEDS, make_task
from seergate.methods import LazyEviction, TriAttention
from seergate.methods.gate_on_evictor import SUFFIX

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
    problems = task.problems()
    count = max(1, len(problems) // FRACTION) if wanted is None else min(wanted, len(problems))
    chosen = [problems[i * len(problems) // count] for i in range(count)]
    return [encode(tokenizer, prompt_text(tokenizer, p)) for p in chosen]


def other_problems(task: Task) -> tuple[Task, int | None]:
    """A task with other problems of the same kind and how many to use; or the same task and ``None``."""
    if task.name != "chain_sum":
        return task, None
    seed = (task.options["seed"] + CHAIN_SUM_SEEDS // 2) % CHAIN_SUM_SEEDS
    return make_task("chain_sum", problems=FRESH, variables=task.options["variables"], seed=seed), FRESH


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    specs: Sequence[MethodSpec],
    directory: Path,
    *,
    limit: Limit,
    sampling: Sampling,
) -> list[MethodSpec]:
    """The settings, with every option that is ``"auto"`` measured.

    A window never takes more than half of a budget, which has to hold it.

    Args:
        model: in eval mode, nothing attached.
        tokenizer: the model's.
        task: that the settings will be evaluated on.
        specs: checked by `check_auto`.
        directory: where what has been measured is kept; found there, it is not measured again.
        limit, sampling: of the answers.
    """
    if not any(spec.uncalibrated for spec in specs):
        return list(specs)
    others, wanted = other_problems(task)
    prompts = evenly_chosen_prompts(tokenizer, others, wanted)
    how: dict[str, Any] = {
        "max_new_tokens": max(1, limit.of(max(map(len, prompts)))),
        "sampling": sampling,
        "ends": end_ids(model, tokenizer),
    }
    directory.mkdir(parents=True, exist_ok=True)

    def window(spec: MethodSpec) -> int:
        alpha = float(spec.options.get("alpha", LazyEviction.alpha))
        path = directory / f"lazy_eviction-{alpha:g}.json"
        record = store.read_json(path)
        if record is None:
            found = measure_recurrence(model, prompts, alpha=alpha, **how)
            record = {"window": found.window(), "alpha": alpha, "problems": len(prompts)}
            store.write_json(path, record)
        return max(1, min(int(record["window"]), (spec.token_budget or 2 * record["window"]) // 2))

    def centres() -> str:
        path = directory / "tri_attention.safetensors"
        if not path.exists():
            query_centres(model, prompts, **how).save(path)
        return str(path)

    return [
        replace(spec, calibrated={"window": window(spec)} if "window" in spec.uncalibrated else {"centres": centres()})
        if spec.uncalibrated
        else spec
        for spec in specs
    ]
