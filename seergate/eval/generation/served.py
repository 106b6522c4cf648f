"""Generation of samples by a server's engine (vLLM, SGLang) instead of transformers (docs/serving.md).

Each server has a function that starts its engine, submits all requests at once and shuts it down. Its arguments: the
model, which determines what the server loads and in which dtype; the requests; the job; the tokens that end an answer;
the plugin's options, ``None`` for dense attention; and the tokens per page, ``None`` for the server's default. It
yields each sample when it ends: the index of its request, its tokens, and its share of the time in seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval.generation.engine import Generation, Job, Request
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks.prompts import end_ids
from seergate.fingerprint import fingerprint
from seergate.gates.bank import Gates
from seergate.methods import Dense
from seergate.models.gate_bank import GateBank
from seergate.serving.common import settings as plugin

Answers = Generator[tuple[int, list[int], float], None, None]


def _answers_of_vllm(
    model: PreTrainedModel,
    requests: Sequence[Request],
    job: Job,
    ends: list[int],
    settings: dict[str, Any] | None,
    page: int | None,
) -> Answers:
    """Generate with vLLM in this process; each sample is yielded in the step in which it ends."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(model.config.name_or_path),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=job.longest,
        max_num_seqs=job.batch_size,
        block_size=page,
        additional_config={} if settings is None else {"seergate": settings},
    )
    try:
        engine, seconds = llm.llm_engine, dict.fromkeys(map(str, range(len(requests))), 0.0)
        for number, request in enumerate(requests):
            sampling = SamplingParams(
                **asdict(job.sampling),
                seed=request.seed,
                max_tokens=job.limit.of(len(request.ids)),
                stop_token_ids=ends,
                stop=list(request.stop),
                detokenize=bool(request.stop),
            )
            engine.add_request(str(number), {"prompt_token_ids": list(request.ids)}, sampling)
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            outputs = engine.step()
            spent = (time.perf_counter() - began) / max(1, len(outputs))
            for output in outputs:
                seconds[output.request_id] += spent  # each step's time is divided among the rows that took it
                if output.finished:
                    yield int(output.request_id), list(output.outputs[0].token_ids), seconds[output.request_id]
    finally:
        del llm
        cleanup_dist_env_and_memory()


def _answers_of_sglang(
    model: PreTrainedModel,
    requests: Sequence[Request],
    job: Job,
    ends: list[int],
    settings: dict[str, Any] | None,
    page: int | None,
) -> Answers:
    """Generate with SGLang in a separate process, as it kills the children of its process, and on failure the process.

    Only the sum of the seconds is meaningful: a sample has the time since the previous one ended.
    """
    sampling = asdict(job.sampling)
    if job.sampling.repetition_penalty != 1:
        raise SeergateError(
            f"repetition_penalty is {job.sampling.repetition_penalty}; with --engine sglang, which would not apply it "
            "to the prompt's tokens, it must be 1"
        )
    sampling |= {"top_k": sampling["top_k"] or -1, "stop_token_ids": ends}
    room = job.longest + 3 * (page or 1)  # a prompt takes whole pages, and SGLang keeps a page and a token free
    payload = {
        "engine": {
            "model_path": str(model.config.name_or_path),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": "cpu",
            "attention_backend": "torch_native" if settings is None else "seergate",
            "json_model_override_args": json.dumps({} if settings is None else {"seergate": settings}),
            "page_size": page,
            "context_length": job.longest + 2,  # of which SGLang uses all but two
            "max_running_requests": job.batch_size,
            "max_total_tokens": job.batch_size and job.batch_size * room,
            "random_seed": requests[0].seed % 2**32,
            "skip_tokenizer_init": True,
            "log_level": "error",
        },
        "prompts": [request.ids for request in requests],
        "sampling": [{**sampling, "max_new_tokens": job.limit.of(len(request.ids))} for request in requests],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "seergate.serving.sglang.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "SGLANG_USE_CPU_ENGINE": "1"},
        start_new_session=True,  # so that its children end with it
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdin as file:
            json.dump(payload, file)
        for line in process.stdout:
            number, tokens, seconds = json.loads(line)
            yield number, tokens, seconds
        if status := process.wait():
            raise SeergateError(f"SGLang ended with exit status {status}; what it wrote before says why")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


SERVERS: dict[str, Callable[..., Answers]] = {"vllm": _answers_of_vllm, "sglang": _answers_of_sglang}


def check_served(server: str, spec: MethodSpec, bank: GateBank | None) -> None:
    """Raise an error if the installed server cannot run a setting's method, options, gates or block size."""
    plugin.check_served(spec.name, Dense.name)
    other = sorted(spec.options.keys() - {*plugin.RULES, "block_size"})
    if other:
        raise SeergateError(f"the option {other[0]!r} of {spec.name!r} does not exist inside a server; leave it out")
    if spec.name != Dense.name:
        bank = bank if spec.has_gates else None
        resolve_name(f"seergate.serving.{server}.checks:check_page")(bank, page_of(spec, bank))
        if bank is not None:
            served_from(bank)


def page_of(spec: MethodSpec, bank: GateBank | None) -> int | None:
    """Tokens per page of the server's cache, which is the method's block size; ``None`` for ``dense``."""
    size: int | None = getattr(spec.method(bank), "block_size", None)
    return size


def served_from(bank: Gates) -> str:
    """The directory or Hub id from which a server reads gates; a `SeergateError` if it holds others than ``bank``."""
    if not bank.source or fingerprint(GateBank.from_pretrained(bank.source)) != fingerprint(bank):
        raise SeergateError(
            "a server loads gates from their directory or the Hub's newest commit, and would get others than "
            "these; save these with save_pretrained and load them from there"
        )
    return bank.source


def engine_version(server: str) -> str:
    """Name and version of a server, for a run's configuration; a `SeergateError` if it cannot be imported."""
    try:
        return f"{server} {import_module(server).__version__}"
    except ImportError as error:
        raise SeergateError(
            f"--engine {server} needs {server}, which cannot be imported ({error}); see docs/serving.md"
        ) from error


def generate_by_server(
    server: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[Request],
    job: Job,
    bank: GateBank | None,
    on_finished: Callable[[Generation], None],
) -> None:
    """Generate samples with a server of `SERVERS` and call ``on_finished`` with each when it ends. The server loads
    the model and the gates itself, from where ``model`` and ``bank`` were loaded.
    """
    spec, ends = job.spec, sorted(end_ids(model, tokenizer))
    bank = bank if spec.has_gates else None
    settings = plugin_settings(spec, "" if bank is None else served_from(bank))
    with closing(SERVERS[server](model, requests, job, ends, settings, page_of(spec, bank))) as answers:
        for number, tokens, seconds in answers:
            on_finished(Generation.of(requests[number], tokens, ends, tokenizer, seconds, {}))


def plugin_settings(spec: MethodSpec, gates: str) -> dict[str, Any] | None:
    """Options of the plugin (`seergate.serving.common.settings`); ``None`` for ``dense``."""
    if spec.name == Dense.name:
        return None
    layers = () if spec.dense_layers is None and not spec.has_gates else spec.dense_layers
    rules = {"token_budget": spec.token_budget, "dense_layers": layers, **spec.options}
    settings = {name: rules[name] for name in plugin.RULES if rules.get(name) is not None}
    return {"method": spec.name, **settings, **({"gates": gates} if spec.has_gates else {})}
