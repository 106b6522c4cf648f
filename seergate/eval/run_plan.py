"""Runs a `SweepPlan`: makes all cheap checks first, then loads the model, evaluates and reports."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.checks import check_counts
from seergate.durable import check_writable
from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.calibration.calibrator import Calibrator, check_auto
from seergate.eval.calibration.matching import MEASURES, Replay, distinct, match, record_path, replayed
from seergate.eval.generation.cluster import check_ray
from seergate.eval.generation.samples import Limit
from seergate.eval.generation.served import check_served, engine_version
from seergate.eval.method_text import read_method
from seergate.eval.progress import EvalProgress
from seergate.eval.report.findings import UNANSWERED
from seergate.eval.runner import check_distinct, encoded_prompts, sweep
from seergate.eval.settings import Banks, MethodSpec, with_each
from seergate.eval.statistics.intervals import t95
from seergate.eval.sweep_plan import MATCHES, SweepPlan
from seergate.eval.tasks.registry import TASKS
from seergate.eval.tasks.task import Problem, Task
from seergate.fingerprint import fingerprint, rope_of
from seergate.hub import cached_commit
from seergate.methods import Method
from seergate.models.attach import attached
from seergate.models.families import check_gates, check_length, kv_heads, why_no_longer
from seergate.models.gate_bank import GateBank
from seergate.models.loading import base_config, skeleton
from seergate.models.names import TINY, check_file_served, is_tiny, load_banks, load_model, model_path, say_gates
from seergate.models.resolving import check_anchors, check_dense_layers
from seergate.paths import exists, is_hub_id, model_name
from seergate.pretrained import load_tokenizer


def load_worker(plan: SweepPlan, path: str, threads: int) -> Any:
    """Load the model, tokenizer and gates of a worker. Ray makes one GPU visible to each worker."""
    torch.set_num_threads(threads)
    return load_model(path, plan.dtype, plan.device), load_tokenizer(path), load_banks(plan.model, plan.gates)


def each_task(plan: SweepPlan) -> list[SweepPlan]:
    """Split a plan with comma-separated tasks into one plan per task."""
    if not plan.task and not is_tiny(plan.model):
        raise SeergateError(
            f"task is missing, and chain_sum, the default, is for {TINY} only; give --task (in a file: task): "
            f"{', '.join(TASKS)}, or a .jsonl file"
        )
    tasks = [plan.task]
    if plan.task and not exists(plan.task):
        tasks = [task for each in plan.task.split(",") if (task := each.strip())]
    if not tasks:
        raise SeergateError(f"task is {plan.task!r}, which names none")
    directories = [directory_of(task) for task in tasks]
    if len(set(directories)) < len(tasks):
        raise SeergateError(f"task is {plan.task!r}, of which two would be in one directory; give a command for each")
    return [
        replace(plan, task=task, out=plan.out and str(Path(plan.out) / name) if tasks[1:] else plan.out)
        for task, name in zip(tasks, directories, strict=True)
    ]


def directory_of(task: str) -> str:
    """Name of a task's run directory: the task and its options as given; a file's without its ending."""
    return Path(task).stem if exists(task) else task.replace(":", "-").replace("/", "-")


def checked_task(plan: SweepPlan) -> tuple[Task, list[Problem]]:
    """The task of a plan and its problems. Refuses bad values that can be found without the model and the gates."""
    for text in plan.method:
        read_method(text)
    task = plan.make_task()
    if task.by_tokens:
        task = task.bound(load_tokenizer(model_path(plan.model)))
    problems = task.problems()
    if task.scored is not None:
        t95(1)  # scipy must be there
        alone = ["engine", "workers", "ray_address", "match", "measure_recall"]
        alone += ["samples", "max_new_tokens", "max_total_tokens", "temperature"]
        _leave_out(plan, alone, f"the task {task.name!r} scores texts, so")
    plan.check(task)
    check_counts(plan, optional=True, threads=1, workers=0)
    if plan.engine == "transformers" and (plan.workers or plan.ray_address):
        check_ray()
    return task, problems


def place_of(plan: SweepPlan) -> Path:
    """The directory of a plan's runs."""
    engine = "" if plan.engine == "transformers" else f"-{plan.engine}"
    name = directory_of(plan.task or "chain_sum")  # as `SweepPlan.make_task`
    return Path(plan.out or f"runs/eval-{model_name(model_path(plan.model))}-{name}{engine}")


def check_prompts(plan: SweepPlan) -> None:
    """Refuse a plan by `checked_task`, and if its prompts and answers do not fit into the model's positions."""
    path = model_path(plan.model)
    _limit(plan, *checked_task(plan), load_tokenizer(path), base_config(path).get_text_config())


def _limit(
    plan: SweepPlan, task: Task, problems: list[Problem], tokenizer: PreTrainedTokenizerBase, text: Any
) -> Limit:
    """Maximum length of the answers, or of the scored texts. Refuses what does not fit into the model's positions."""
    if task.scored is None:
        return encoded_prompts(tokenizer, problems, task, plan, text)[1]
    limit = plan.limit(task)
    check_length(text, limit.of(0), "a text of the task's length")
    return limit


def run_plan(plan: SweepPlan) -> Path:
    """Evaluate all settings of a plan, keep samples of earlier runs, and return the directory of the runs."""
    gc.collect()  # frees the model of an earlier plan
    task, problems = checked_task(plan)
    path = model_path(plan.model)
    banks = load_banks(plan.model, plan.gates)
    listed = banks.values() if isinstance(banks, Mapping) else [] if banks is None else [banks]
    sizes = sorted({gates.config.block_size for gates in listed if not gates.config.retention})
    specs = with_each(plan.specs(task, sizes), banks)
    check_auto(specs, plan.match != MATCHES[0])
    if plan.engine != "transformers":
        _check_served(plan, specs, banks)
    check_distinct([spec for spec in specs if not spec.uncalibrated], banks)
    if plan.match != MATCHES[0]:
        specs = distinct(specs)  # their budgets are matched once the model is loaded

    known = [spec for spec in specs if not spec.uncalibrated]
    methods = [spec.method(spec.bank(banks)) for spec in known]
    config = check_model(
        path, methods, [bank for spec in specs if spec.has_gates and (bank := spec.bank(banks)) is not None]
    )
    tokenizer, text = load_tokenizer(path), config.get_text_config()
    limit = _limit(plan, task, problems, tokenizer, text)
    check_writable(out := place_of(plan))
    if banks is not None and any(spec.has_gates for spec in specs):
        print(say_gates(plan.model, plan.gates))

    threads = plan.threads or max(1, torch.get_num_threads() // max(1, plan.workers))
    torch.set_num_threads(threads)
    loader = partial(load_worker, plan, path, threads)
    model = load_model(path, plan.dtype, plan.device, plan.engine)
    for spec, method in zip(known, methods, strict=True):  # what the model cannot have is refused before any answer
        with attached(model, method, correction=spec.correction):
            pass
    with EvalProgress(len(specs)) as progress:
        plan = replace(plan, on_progress=progress)
        plan.check(task, sampling := plan.resolved_sampling(task, model))
        if task.scored is None:
            chosen = plan.sampling or task.sampling
            source = (
                "as asked" if plan.sampling else "as the task has it" if chosen else "the model's generation_config"
            )
            cut = "" if limit == plan.limit(task) else f", instead of {plan.limit(task)}: {why_no_longer(text)}"
            print(f"sampling: {sampling} ({source}); {limit}{cut}")

        calibrated = Calibrator(model, tokenizer, task, out / "calibration", limit=limit, sampling=sampling)

        def evaluated(specs: list[MethodSpec]) -> None:
            results = sweep(
                model,
                tokenizer,
                task,
                specs,
                out,
                plan,
                gates=banks,
                loader=loader,
                workers=plan.workers,
                ray_address=plan.ray_address,
            )
            for label, metrics in results.items():
                if (share := metrics.get("unanswered_rate", 0.0)) > UNANSWERED:
                    print(
                        f"note: the grader {task.grader!r} found no answer in {share * metrics['n_samples']:.0f} of "
                        f"{metrics['n_samples']} samples of {label}; `seergate eval show` shows them"
                    )

        resumed = (out / specs[0].label / store.SAMPLES).exists() and not specs[0].uncalibrated
        resumed = resumed and not (plan.workers or plan.ray_address)  # they would load the model a second time
        if plan.match != MATCHES[0] or (resumed and any(spec.uncalibrated for spec in specs)):
            evaluated(specs[:1])  # bytes are measured on dense answers; other options than the directory's are refused
        if plan.match != MATCHES[0]:
            specs = _matched(plan, task, model, tokenizer, specs, out, calibrated, banks)
            progress.settings = len(specs)
        evaluated([calibrated(spec) for spec in specs])
    return out


def _leave_out(plan: SweepPlan, names: Sequence[str], why: str) -> None:
    """Refuse the named options of a plan unless they have their defaults."""
    for name in names:
        if (value := getattr(plan, name)) != getattr(type(plan), name):
            raise SeergateError(f"{name} is {value!r}; {why} it must be left out")


def _check_served(plan: SweepPlan, specs: list[MethodSpec], banks: Banks) -> None:
    _leave_out(plan, ("workers", "ray_address", "match"), f"with --engine {plan.engine}")
    engine_version(plan.engine)
    check_file_served(model_path(plan.model), plan.engine)
    for spec in specs:
        check_served(plan.engine, spec, spec.bank(banks))


def check_model(path: str, methods: list[Method], banks: list[GateBank]) -> Any:
    """Refuse an unsupported model, gates for another model, and dense layers and anchors that it lacks; warn if gates
    were trained on another commit. Reads only the model's configuration, and returns it.
    """
    config = base_config(path)
    model = skeleton(config)
    heads = kv_heads(model)
    for bank in {id(bank): bank for bank in banks}.values():
        check_gates(model, bank)
        commit, newest = bank.geometry.base_revision, cached_commit(path, None) if is_hub_id(path) else None
        if bank.geometry.base_model == path and None not in (commit, newest) and commit != newest:
            warnings.warn(f"the gates were trained on {path} at commit {commit}, and this is {newest}", stacklevel=2)
    for method in methods:  # whose dense layers may be those of the gates
        check_dense_layers(method, int(config.get_text_config().num_hidden_layers))
        check_anchors(method, heads)
    return config


def _matched(
    plan: SweepPlan,
    task: Task,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    specs: list[MethodSpec],
    out: Path,
    calibrated: Callable[[MethodSpec], MethodSpec],
    banks: Banks,
) -> list[MethodSpec]:
    """Find the budgets at which the methods of a plan need equal bytes; measurements are stored with the runs."""
    answer = replayed(store.in_order(store.read_samples(out / specs[0].label)))
    made = {
        "answer": {name: answer[name] for name in ("task", "problem_id", "sample_idx", "prompt", "completion")},
        "model": fingerprint(model),
        "rope": rope_of(model),
    }
    path = record_path(out, plan.match)
    before = store.read_json(path) or {}
    if before.get("made") != made:
        before = {"bytes": {}, "matches": []}
    print(f"finding budgets that are equal in bytes {plan.match}")

    def keep(matches: list[dict[str, Any]]) -> None:
        store.write_json(path, {"measure": plan.match, "made": made, "bytes": replay.known, "matches": matches})

    replay = Replay(model, tokenizer, answer, MEASURES[plan.match], before["bytes"], lambda: keep(before["matches"]))
    chosen, records = match(replay, specs, plan.budget or list(task.budgets), prepare=calibrated, banks=banks)
    new = {(record["target"], record[name]) for record in records for name in ("method", "label")}
    kept = [r for r in before["matches"] if not {(r["target"], r["method"]), (r["target"], r["label"])} & new]
    records = kept + records
    keep(records)
    return chosen
