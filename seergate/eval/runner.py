"""Runs settings of a task and keeps what they produce.

    runs/<id>/<method>-<budget>/{config.yaml, samples.jsonl, metrics.json, proxies.json}

Every finished sample is graded and on the disk at once. The same call after a kill makes what is missing, and refuses
if anything that shapes results has changed.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.bank import GateBank
from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.engine import Engine, Generation, Limit, Request, encode, prompt_text
from seergate.eval.grading import check_grader
from seergate.eval.judge import GradingPool, check_installed
from seergate.eval.memory import estimated_batch, sharing
from seergate.eval.metrics import derive
from seergate.eval.proxies import measure_proxies
from seergate.eval.run_config import run_config
from seergate.eval.sampling import Sampling, sample_seed
from seergate.eval.settings import MethodSpec
from seergate.eval.stats import mean_and_error
from seergate.eval.task import Problem, Task
from seergate.eval.workers import Job, Loader, Source, WorkerPool
from seergate.host import Handle, attached


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        label: of the setting.
        done, total: samples.
        correct: how many of the finished ones are right.
        error: standard error of the accuracy so far, clustered by problem; ``nan`` before the second problem.
        made: samples generated since the run was started or resumed.
        tokens: generated since then.
        seconds: since then.
    """

    label: str
    done: int
    total: int
    correct: int
    error: float
    made: int
    tokens: int
    seconds: float

    @property
    def eta(self) -> float | None:
        """Seconds until the setting is done at the pace so far; ``None`` before the first sample."""
        return self.seconds * (self.total - self.done) / self.made if self.made else None


@dataclass(frozen=True)
class RunOptions:
    """How a task is run; ``None`` takes the task's own value.

    Attributes:
        samples: answers per problem.
        max_new_tokens: limit for each. Given without ``max_total_tokens``, it replaces the task's limits.
        max_total_tokens: limit for prompt and answer together; likewise.
        sampling: how tokens are chosen; if neither this nor the task says, the model's generation configuration does.
        seed: of the samples' random numbers.
        batch_size: samples that run together; does not shape results. ``None`` estimates what fits into memory.
        measure_recall: also measure the cheap proxies (`seergate.eval.proxies`), recall of teacher mass among them.
        model_name, gates_name: what to call them in the records; paths or Hub ids.
        on_progress: called after every sample.
    """

    samples: int | None = None
    max_new_tokens: int | None = None
    max_total_tokens: int | None = None
    sampling: Sampling | None = None
    seed: int = 0
    batch_size: int | None = 16
    measure_recall: bool = False
    model_name: str = ""
    gates_name: str = ""
    on_progress: Callable[[Progress], None] | None = None

    def limit(self, task: Task) -> Limit:
        """How long an answer may be.

        Raises:
            ValueError: naming the field, what it is and what it must be.
        """
        if self.max_new_tokens is None and self.max_total_tokens is None:
            return Limit(task.max_new_tokens, task.max_total_tokens)
        return Limit(self.max_new_tokens, self.max_total_tokens)

    def check(self, task: Task) -> None:
        """Refuse, before long work, what the task cannot be run with.

        Raises:
            ValueError: naming the field, what it is and what it must be.
            SeergateError: for a grader that is unknown or not installed.
        """
        self.limit(task)
        for name, value in (("samples", self.samples), ("batch_size", self.batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be a positive number")
        check_grader(task.grader)
        if task.grader == "math":
            check_installed()

    def resolved_sampling(self, task: Task, model: PreTrainedModel) -> Sampling:
        """How tokens are chosen."""
        return self.sampling or task.sampling or Sampling.of_model(model)


def sweep(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    specs: list[MethodSpec],
    out_dir: Path,
    options: RunOptions,
    *,
    bank: GateBank | None = None,
    banks: dict[int, GateBank] | None = None,
    loader: Loader | None = None,
    workers: int = 0,
) -> dict[str, dict[str, Any]]:
    """Evaluate several settings, each in its own sub-directory.

    Args:
        model: loaded once, used for all.
        tokenizer: the model's.
        task: what to solve.
        specs: the settings. ``dense`` should come first: its generations are the contexts that proxies are measured
            on.
        out_dir: parent of the run directories.
        options: how.
        bank: gates, for the method ``gate``.
        banks: block size -> gates, where there are several; they take precedence over ``bank``.
        loader: makes the model of a worker process.
        workers: how many processes generate beside this one.

    Returns:
        Label -> metrics.

    Raises:
        SeergateError: before any work, if a setting is wrong or given twice.
    """
    labels = [spec.label for spec in specs]
    twice = {label for label in labels if labels.count(label) > 1}
    if twice:
        raise SeergateError(f"the setting {min(twice)!r} is given twice")
    if workers < 0:
        raise ValueError(f"workers is {workers}; it must be 0 or a positive number")
    if workers and (loader is None or banks):
        raise SeergateError("worker processes need a loader, and one set of gates")

    def gates(spec: MethodSpec) -> GateBank | None:
        return (banks or {}).get(spec.block_size or 0, bank)

    for spec in specs:
        spec.method(gates(spec))
    reference: list[dict[str, Any]] | None = None
    results = {}
    with WorkerPool(loader, workers) if loader is not None and workers else nullcontext() as pool:
        for spec in specs:
            directory = out_dir / spec.label
            results[spec.label] = evaluate(
                model, tokenizer, task, spec, directory, options, bank=gates(spec), reference=reference, pool=pool
            )
            if reference is None:
                reference = _in_order(directory)
    return results


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    spec: MethodSpec,
    out_dir: Path,
    options: RunOptions | None = None,
    *,
    bank: GateBank | None = None,
    reference: list[dict[str, Any]] | None = None,
    pool: WorkerPool | None = None,
) -> dict[str, Any]:
    """Evaluate one setting, continuing whatever ``out_dir`` holds.

    Args:
        model: in eval mode, nothing attached.
        tokenizer: the model's.
        task: what to solve.
        spec: with which method.
        out_dir: the run directory.
        options: how.
        bank: gates, for the method ``gate``.
        reference: samples whose contexts proxies are measured on; the setting's own if ``None``.
        pool: processes that generate beside this one.

    Returns:
        The metrics, also written to ``metrics.json``.

    Raises:
        SeergateError: if ``out_dir`` holds a run with other settings, naming the fields that differ.
    """
    options = options or RunOptions()
    limit, sampling = options.limit(task), options.resolved_sampling(task, model)
    samples_each = task.samples if options.samples is None else options.samples
    options.check(task)
    problems = task.problems()
    config = run_config(
        model,
        task,
        problems,
        spec,
        bank,
        samples=samples_each,
        limit=limit,
        sampling=sampling,
        seed=options.seed,
        model_name=options.model_name,
        gates_name=options.gates_name,
        execution={"batch_size": options.batch_size or "auto", "processes": 1 + (len(pool.processes) if pool else 0)},
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    wanted = {(task.name, p.problem_id, i): p for p in problems for i in range(samples_each)}
    with store.SampleLog(out_dir) as log:
        samples = store.read_samples(out_dir)
        missing = {key: problem for key, problem in wanted.items() if key not in {store.key_of(s) for s in samples}}
        store.pin(out_dir, config, finished=not missing)
        unmeasured = options.measure_recall and not (out_dir / store.PROXIES).exists()
        if missing or unmeasured:
            with attached(model, spec.method(bank)) as handle:
                if missing:
                    requests = _requests(tokenizer, missing, limit, options.seed)
                    longest = max(len(ids) + limit.of(len(ids)) for _, ids in requests)
                    job = Job(spec, options.batch_size or _fitting(model, longest, pool), limit, sampling)
                    with GradingPool() as judges:
                        run = _Run(task, spec, options, missing, log, samples, len(wanted), judges)
                        run.generate(model, tokenizer, [request for request, _ in requests], job, handle, pool)
                if unmeasured:
                    proxies = measure_proxies(model, tokenizer, handle, reference or _in_order(out_dir))
                    if proxies is not None:
                        store.write_json(out_dir / store.PROXIES, proxies)
    return write_metrics(out_dir)


def write_metrics(out_dir: Path) -> dict[str, Any]:
    """Derive `metrics.json` from the samples."""
    metrics = derive(_in_order(out_dir), store.read_json(out_dir / store.PROXIES))
    store.write_json(out_dir / store.METRICS, metrics)
    return metrics


def _in_order(out_dir: Path) -> list[dict[str, Any]]:
    """The samples in an order that does not depend on when they were made, so that nothing derived does."""
    return sorted(store.read_samples(out_dir), key=lambda s: (s["problem_id"], s["sample_idx"]))


def encoded_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: Iterable[Problem], limit: Limit
) -> dict[str, tuple[str, list[int]]]:
    """Problem id -> what is put to the model, as text and as tokens.

    Raises:
        SeergateError: if a prompt leaves no room for an answer.
    """
    encoded: dict[str, tuple[str, list[int]]] = {}
    for problem in problems:
        if problem.problem_id not in encoded:
            text = prompt_text(tokenizer, problem)
            ids = encode(tokenizer, text)
            if limit.of(len(ids)) < 1:
                raise SeergateError(
                    f"the prompt of problem {problem.problem_id} has {len(ids)} tokens, which leaves no room for an "
                    f"answer ({limit})"
                )
            encoded[problem.problem_id] = text, ids
    return encoded


def _requests(
    tokenizer: PreTrainedTokenizerBase, missing: dict[store.Key, Problem], limit: Limit, seed: int
) -> list[tuple[Request, list[int]]]:
    """What is to be generated, with its tokens, longest prompts first: what needs most memory shows at once.

    Raises:
        SeergateError: if a prompt leaves no room for an answer.
    """
    encoded = encoded_prompts(tokenizer, missing.values(), limit)
    requests = []
    for key, problem in missing.items():
        text, ids = encoded[problem.problem_id]
        requests.append((Request(key, text, sample_seed(seed, problem.problem_id, key[2])), ids))
    return sorted(requests, key=lambda pair: -len(pair[1]))


def _fitting(model: PreTrainedModel, longest: int, pool: WorkerPool | None) -> int:
    """How many samples of this many tokens each process may make together."""
    on_device = sharing(model.device, 1 + (len(pool.processes) if pool else 0))
    copies = on_device - 1 if pool and not pool.began else 0  # those who have worked have loaded theirs
    return estimated_batch(model, longest, on_device, copies)


class _Run:
    """Generates the missing samples of one setting, grades and stores them."""

    def __init__(
        self,
        task: Task,
        spec: MethodSpec,
        options: RunOptions,
        problems: dict[store.Key, Problem],
        log: store.SampleLog,
        samples: list[dict[str, Any]],
        total: int,
        judges: GradingPool,
    ) -> None:
        self.task, self.spec, self.options, self.problems = task, spec, options, problems
        self.log, self.total, self.judges = log, total, judges
        self.outcomes: dict[str, list[bool]] = defaultdict(list)
        for sample in samples:
            self.outcomes[sample["problem_id"]].append(sample["correct"])
        self.made = self.tokens = 0
        self.began, self.lock = time.monotonic(), threading.Lock()

    def generate(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        requests: list[Request],
        job: Job,
        handle: Handle,
        pool: WorkerPool | None,
    ) -> None:
        """Everything that is missing, here and in the other processes."""
        self.report()
        source = Source(requests)
        engine = Engine(
            model,
            tokenizer,
            batch_size=job.batch_size,
            limit=job.limit,
            sampling=job.sampling,
            on_finished=self.finished,
            handle=handle,
        )
        running = pool.begin(job, source, self.finished) if pool is not None else None
        engine.run(source)
        if running is not None:
            running.join()
            engine.run(source)  # what processes that died gave back

    def finished(self, generation: Generation) -> None:
        """Grade and store one sample. Several threads may call it."""
        record = self.record(generation)
        with self.lock:
            self.log.append([record])
            self.outcomes[record["problem_id"]].append(record["correct"])
            self.made += 1
            self.tokens += generation.n_tokens
            self.report()

    def record(self, generation: Generation) -> dict[str, Any]:
        """One line of `samples.jsonl`."""
        task, problem_id, sample_idx = key = generation.request.key
        gold = self.problems[key].gold
        grade = self.judges.grade(self.task.grader, generation.completion, gold)
        return {
            "task": task,
            "problem_id": problem_id,
            "sample_idx": sample_idx,
            "seed": generation.request.seed,
            "prompt": generation.request.prompt,
            "completion": generation.completion,
            "n_prompt_tokens": generation.n_prompt_tokens,
            "n_tokens": generation.n_tokens,
            "finish_reason": generation.finish_reason,
            "pred": grade.pred,
            "gold": gold,
            "correct": grade.correct,
            "grade_reason": grade.reason,
            "seconds": round(generation.seconds, 6),
            **generation.costs,
        }

    def report(self) -> None:
        """Tell whoever listens."""
        if self.options.on_progress is None:
            return
        done, correct = (sum(map(count, self.outcomes.values())) for count in (len, sum))
        means = [sum(values) / len(values) for values in self.outcomes.values()]
        error = mean_and_error(means).se if means else float("nan")
        spent = time.monotonic() - self.began
        self.options.on_progress(
            Progress(self.spec.label, done, self.total, correct, error, self.made, self.tokens, spent)
        )
