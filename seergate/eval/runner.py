"""Runs settings of a task and stores their results.

    runs/<id>/<method>-<budget>/{config.yaml, samples.jsonl, metrics.json, proxies.json}

Every sample is written as soon as it is graded. Repeating the call after a kill generates the missing samples; it
raises if anything that affects results has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.checks import check_count
from seergate.errors import SeergateError
from seergate.eval import store
from seergate.eval.collector import Collector, Progress
from seergate.eval.generation.batch import common_prefix
from seergate.eval.generation.batch_memory import needing_memory
from seergate.eval.generation.cluster import Cluster, Loader
from seergate.eval.generation.engine import Engine
from seergate.eval.generation.samples import Job, Limit, Request
from seergate.eval.generation.served import SERVERS, generate_by_server
from seergate.eval.grading.judge import GradingPool
from seergate.eval.proxies import contexts_hash, measure_proxies, windows_of
from seergate.eval.run_config import RunOptions, run_config
from seergate.eval.sampling import sample_seed
from seergate.eval.settings import Banks, MethodSpec
from seergate.eval.statistics.metrics import derive
from seergate.eval.tasks.prompts import encode, prompt_text, reply_ids
from seergate.eval.tasks.task import Problem, Task
from seergate.eval.teacher_forcing import TeacherForcing
from seergate.fingerprint import fingerprint
from seergate.methods import Dense
from seergate.models.attach import attached
from seergate.models.families import check_eval_mode, check_length, text_config
from seergate.models.gate_bank import GateBank
from seergate.progress import working


def sweep(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    specs: list[MethodSpec],
    out_dir: Path,
    options: RunOptions,
    *,
    gates: Banks = None,
    loader: Loader | None = None,
    workers: int = 0,
    ray_address: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate several settings, each in its own sub-directory.

    Args:
        specs: the settings. If proxies are measured, ``dense`` must come first: they are measured on its answers.
        out_dir: parent of the run directories.
        gates: gates for the methods that take them; several by name (`MethodSpec.bank`).
        loader: loads the model and the gates in each worker.
        workers: how many workers generate, by Ray; 0 generates in this process.
        ray_address: address of a running Ray cluster, ``"auto"`` for the one of this machine; ``workers`` 0 is then
            one per GPU. Ray is started here if ``None``.

    Returns:
        Label -> metrics.

    Raises:
        SeergateError: before any work, if a setting is wrong or if two describe the same run.
    """
    task, labels = task.bound(tokenizer), [spec.label for spec in specs]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise SeergateError(f"the setting {min(twice)!r} is given twice")
    check_count("workers", workers)
    several = bool(workers or ray_address)
    if several and loader is None:
        raise SeergateError("workers need a loader, which makes their models")
    if several and options.engine in SERVERS:
        raise SeergateError(f"engine is {options.engine!r}, a server, which generates without workers; leave them out")

    check_distinct(specs, gates)
    options.check_reference(specs)
    forced = None if task.scored is None else TeacherForcing.of(model, tokenizer, task)
    reference: list[dict[str, Any]] | None = None
    results = {}
    with Cluster(loader, workers, ray_address) if loader is not None and several else nullcontext() as cluster:
        for spec in specs:
            results[spec.label] = evaluate(
                model,
                tokenizer,
                task,
                spec,
                Path(out_dir) / spec.label,
                options,
                bank=spec.bank(gates),
                reference=reference,
                cluster=cluster,
                forced=forced,
            )
            if spec.name == Dense.name:
                reference = store.in_order(store.read_samples(Path(out_dir) / spec.label))
    return results


def check_distinct(specs: list[MethodSpec], gates: Banks) -> None:
    """Raise `SeergateError` if two settings, with their defaults, are the same run: no report could separate them."""
    by_description: dict[str, MethodSpec] = {}
    for spec in specs:
        bank = spec.bank(gates)
        same = by_description.setdefault(f"{spec.describe(bank)}, gates {spec.weights(bank)}", spec)
        if same is not spec:
            raise SeergateError(
                f"the settings {same.label!r} and {spec.label!r} mean the same, defaults included; give one of them"
            )


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    spec: MethodSpec,
    out_dir: Path,
    options: RunOptions | None = None,
    *,
    bank: GateBank | None = None,
    reference: Sequence[dict[str, Any]] | None = None,
    cluster: Cluster | None = None,
    forced: TeacherForcing | None = None,
) -> dict[str, Any]:
    """Evaluate one setting, resuming the run in ``out_dir`` if there is one.

    Args:
        model: a model in eval mode, nothing attached.
        bank: gates, for methods that decode with gates.
        reference: samples of the dense run, on whose answers proxies are measured; the setting's own if ``None``.
            Proxies that were measured on other contexts are measured again.
        cluster: workers that generate the samples; this process generates them if ``None``.
        forced: the comparison on a task's scored texts; made here if ``None``.

    Returns:
        The metrics, also written to ``metrics.json``.

    Raises:
        SeergateError: if ``out_dir`` holds a run with other settings, naming the fields that differ, or if the model
            is in training mode.
    """
    check_eval_mode(model)
    options, task = options or RunOptions(), task.bound(tokenizer)
    out_dir = Path(out_dir)
    sampling, problems = options.resolved_sampling(task, model), task.problems()
    options.check(task, sampling)
    encoded, limit = Encoded(), options.limit(task)
    if task.scored is None:
        encoded, limit = encoded_prompts(tokenizer, problems, task, options, text_config(model))
    processes = cluster.workers if cluster else 1
    config = run_config(model, tokenizer, task, problems, spec, bank, options, processes, limit)
    out_dir.mkdir(parents=True, exist_ok=True)
    problems_by_key = {(task.name, p.problem_id, i): p for p in problems for i in range(options.samples_of(task))}
    with store.SampleLog(out_dir) as log:
        samples = store.read_samples(out_dir)
        done = {store.key_of(s) for s in samples}
        missing = {key: problem for key, problem in problems_by_key.items() if key not in done}
        store.pin(out_dir, config, finished=not missing)
        if task.scored is not None:
            if missing:
                forced = forced or TeacherForcing.of(model, tokenizer, task)
                _score_texts(forced, spec, bank, list(problems_by_key), done, log, options.on_progress)
            return write_metrics(out_dir)
        unmeasured = options.measure_recall and not _has_proxies(out_dir, tokenizer, reference)
        if not missing and not unmeasured:
            return write_metrics(out_dir)
        golds, progress = {p.problem_id: p.gold for p in problems}, options.on_progress
        with attached(model, spec.method(bank), correction=spec.correction) as handle:
            if missing:
                requests = _requests(tokenizer, missing, encoded, options.seed, task.stop)
                longest = max(len(each.ids) + limit.of(len(each.ids)) for each in requests)
                prefix = common_prefix([ids for _, ids in encoded.values()])
                job = Job(spec, options.batch_size, requests[0].ids, longest, limit, sampling, prefix)
                with (
                    GradingPool(processes, run_programs=options.run_programs) as judges,
                    Collector(
                        spec.label, len(problems_by_key), task.grader, golds, log, samples, judges, progress
                    ) as sink,
                ):
                    sink.report()
                    if cluster is not None:
                        cluster.generate(job, fingerprint(model), spec.weights(bank), requests, sink.take)
                    elif options.engine in SERVERS:
                        generate_by_server(options.engine, model, tokenizer, requests, job, bank, sink.take)
                    else:
                        Engine(handle, tokenizer, job, sink.take).run(requests)
            if unmeasured:
                whose = spec.label if reference is None else Dense.name
                if reference is None:
                    reference = store.in_order(store.read_samples(out_dir))
                with working(f"measuring proxies of {spec.label}"), needing_memory("proxies were measured"):
                    proxies = measure_proxies(handle, tokenizer, reference, options.batch_size)
                if proxies is not None:
                    store.write_json(out_dir / store.PROXIES, {"reference": whose, **proxies})
    return write_metrics(out_dir)


def _score_texts(
    forced: TeacherForcing,
    spec: MethodSpec,
    bank: GateBank | None,
    keys: list[store.Key],
    scored_keys: set[store.Key],
    log: store.SampleLog,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    """Score the texts that have no sample yet."""
    began, tokens = time.monotonic(), 0
    missing = [(number, key) for number, key in enumerate(keys) if key not in scored_keys]
    for scored, (number, key) in enumerate(missing, 1):
        with working(f"scoring {spec.label}, text {number + 1}/{len(keys)}"), needing_memory("a text was scored"):
            figures = forced.measure(spec, bank, number)
        log.append(dict(zip(("task", "problem_id", "sample_idx"), key, strict=True)) | figures)
        tokens += figures["n_tokens"]
        if on_progress is not None:
            done, seconds = len(keys) - len(missing) + scored, time.monotonic() - began
            on_progress(Progress(spec.label, done, len(keys), None, scored, tokens, seconds))


def _has_proxies(
    out_dir: Path, tokenizer: PreTrainedTokenizerBase, reference: Sequence[dict[str, Any]] | None
) -> bool:
    """True if the run has proxies, measured on the contexts of ``reference`` if that is given."""
    proxies = store.read_json(out_dir / store.PROXIES)
    if proxies is None or reference is None:
        return proxies is not None
    return proxies.get("contexts") == contexts_hash(windows_of(tokenizer, reference))


def write_metrics(out_dir: Path) -> dict[str, Any]:
    """Derive the metrics from the samples, write them to `metrics.json` and return them."""
    metrics = derive(store.read_samples(out_dir), store.read_json(out_dir / store.PROXIES))
    store.write_json(out_dir / store.METRICS, metrics)
    return metrics


Encoded = dict[str, tuple[str, tuple[int, ...]]]
"""Problem id -> the model's input, as text and as tokens."""


def encoded_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: Iterable[Problem], task: Task, options: RunOptions, text: Any
) -> tuple[Encoded, Limit]:
    """Encode the prompts for a model with the text configuration ``text``, and find the limit of their answers.

    Raises:
        SeergateError: if the model cannot hold a prompt, or the limit (`RunOptions.limit_of`) leaves no room for an
            answer.
    """
    encoded: Encoded = {}
    for problem in problems:
        if problem.problem_id not in encoded:
            prompt = prompt_text(tokenizer, problem)
            encoded[problem.problem_id] = prompt, tuple(encode(tokenizer, prompt))
            check_length(text, len(encoded[problem.problem_id][1]), f"the prompt of problem {problem.problem_id}")
    limit = options.limit_of(task, text, max(len(ids) for _, ids in encoded.values()))
    for name, (_, ids) in encoded.items():
        if limit.of(len(ids)) < 1:
            raise SeergateError(
                f"the prompt of problem {name} has {len(ids)} tokens, which leaves no room for an answer ({limit}); "
                "give a larger limit, or max_new_tokens (--max-new-tokens) alone"
            )
    return encoded, limit


def _requests(
    tokenizer: PreTrainedTokenizerBase,
    missing: dict[store.Key, Problem],
    encoded: Encoded,
    seed: int,
    stop: tuple[str, ...],
) -> list[Request]:
    """Requests for the missing samples, longest prompts first, so that a lack of memory shows at once."""
    replies = {
        p.problem_id: reply_ids(tokenizer, encoded[p.problem_id][0], p.reply) for p in missing.values() if p.reply
    }
    requests = [
        Request(key, *encoded[key[1]], sample_seed(seed, *key[1:]), replies.get(key[1], ()), stop) for key in missing
    ]
    return sorted(requests, key=lambda request: -len(request.ids))
