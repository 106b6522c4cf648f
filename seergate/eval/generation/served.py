"""Generation of samples by a server's engine (vLLM, SGLang) instead of transformers (docs/serving.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval.generation.samples import Generation, Job, Request
from seergate.eval.settings import MethodSpec
from seergate.eval.tasks.prompts import end_ids
from seergate.fingerprint import fingerprint
from seergate.gates.bank import Gates
from seergate.methods import Dense
from seergate.models.gate_bank import GateBank
from seergate.serving.common import settings as plugin
from seergate.serving.common.generation import EngineRun, Prompt

SERVERS = ("vllm", "sglang")


def check_served(server: str, spec: MethodSpec, bank: GateBank | None) -> None:
    """Raise an error if the installed server cannot run a setting's method, options, gates or block size."""
    plugin.check_served(spec.name, Dense.name)
    other = sorted(spec.options.keys() - {*plugin.SERVED_OPTIONS, "block_size"})
    if other:
        raise SeergateError(f"the option {other[0]!r} of {spec.name!r} does not exist inside a server; leave it out")
    if spec.name != Dense.name:
        bank = bank if spec.has_gates else None
        resolve_name(f"seergate.serving.{server}.checks:check_page")(bank, page_of(spec, bank))
        if bank is not None:
            served_from(bank)


def page_of(spec: MethodSpec, bank: GateBank | None) -> int | None:
    """Tokens per page of the server's cache, which is the method's block size; ``None`` for ``dense``."""
    return getattr(spec.method(bank), "block_size", None)


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
    run = EngineRun(
        model=str(model.config.name_or_path),
        dtype=str(model.dtype).removeprefix("torch."),
        longest=job.longest,
        batch_size=job.batch_size,
        page=page_of(spec, bank),
        settings=plugin_settings(spec, "" if bank is None else served_from(bank)),
        sampling=asdict(job.sampling),
        ends=ends,
    )
    prompts = [Prompt(each.ids, job.limit.of(len(each.ids)), each.seed, each.stop) for each in requests]
    generate = resolve_name(f"seergate.serving.{server}.generation:answers")
    with closing(generate(run, prompts)) as answers:
        for number, tokens, seconds in answers:
            on_finished(Generation.of(requests[number], tokens, ends, tokenizer, seconds, {}))


def plugin_settings(spec: MethodSpec, gates: str) -> dict[str, Any] | None:
    """Options of the plugin (`seergate.serving.common.settings`); ``None`` for ``dense``."""
    if spec.name == Dense.name:
        return None
    layers = () if spec.dense_layers is None and not spec.has_gates else spec.dense_layers
    rules = {"token_budget": spec.token_budget, "dense_layers": layers, **spec.options}
    settings = {name: rules[name] for name in plugin.SERVED_OPTIONS if rules.get(name) is not None}
    return {"method": spec.name, **settings, **({"gates": gates} if spec.has_gates else {})}
