"""Generation by a server's engine instead of transformers: the same samples, asked of an engine of its own
(docs/serving.md).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval import sglang_engine, vllm_engine
from seergate.eval.cluster import Job
from seergate.eval.engine import Generation, Request, end_ids
from seergate.eval.settings import MethodSpec
from seergate.fingerprint import fingerprint
from seergate.gates.bank import Gates
from seergate.hf.bank import GateBank
from seergate.methods import Dense
from seergate.serving import settings as plugin

Answers = Callable[
    [PreTrainedModel, Sequence[Request], Job, list[int], dict[str, Any] | None, int | None],
    Generator[tuple[int, list[int], float], None, None],
]
"""Starts a server's engine, asks it for all samples at once and ends it.

Its arguments: the model, which says what the server loads and in which dtype; the requests; the job; the tokens that
end an answer; the plugin's options, ``None`` for dense attention; tokens per page, ``None`` for the server's default.
It yields each sample when it ends: the number of its request, its tokens, and its share of the seconds.
"""

SERVERS: dict[str, Answers] = {"vllm": vllm_engine.answers, "sglang": sglang_engine.answers}


def check_served(server: str, spec: MethodSpec, bank: GateBank | None) -> None:
    """Refuse what a server cannot run.

    Args:
        server: a key of `SERVERS`, which is installed.
        spec: the method.
        bank: its gates.

    Raises:
        SeergateError: naming the method, its option, or what does not fit of its gates and blocks.
    """
    plugin.check_served(spec.name, Dense.name)
    other = sorted(spec.options.keys() - {*plugin.RULES, "block_size"})
    if other:
        raise SeergateError(f"the option {other[0]!r} of {spec.name!r} does not exist inside a server; leave it out")
    if spec.name != Dense.name:
        bank = bank if spec.has_gates else None
        resolve_name(f"seergate.{server}.checks:check_page")(bank, page_of(spec, bank))
        if bank is not None:
            served_from(bank)


def page_of(spec: MethodSpec, bank: GateBank | None) -> int | None:
    """Tokens per page of the server's cache: a block; ``None`` for ``dense``."""
    size: int | None = getattr(spec.method(bank), "block_size", None)
    return size


def served_from(bank: Gates) -> str:
    """The directory or Hub id from which a server reads gates.

    Raises:
        SeergateError: if other gates are there than these.
    """
    if not bank.source or fingerprint(GateBank.from_pretrained(bank.source)) != fingerprint(bank):
        raise SeergateError(
            "a server reads gates anew, from their directory or the Hub's newest commit, and would get others than "
            "these; save these with save_pretrained and load them from there"
        )
    return bank.source


def engine_version(server: str) -> str:
    """Name and version of a server, for a run's configuration.

    Raises:
        SeergateError: if it is not installed.
    """
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
    """Generate samples.

    Args:
        server: a key of `SERVERS`.
        model: says what the server loads, in which dtype, and which tokens end an answer.
        tokenizer: the model's.
        requests: the samples.
        job: the setting.
        bank: the gates; the server reads them from where they were loaded (`served_from`).
        on_finished: gets every sample when it ends.
    """
    spec, ends = job.spec, sorted(end_ids(model, tokenizer))
    bank = bank if spec.has_gates else None
    settings = plugin_settings(spec, "" if bank is None else served_from(bank))
    with closing(SERVERS[server](model, requests, job, ends, settings, page_of(spec, bank))) as answers:
        for number, tokens, seconds in answers:
            stopped = tokens[-1] in ends
            on_finished(
                Generation(
                    request=requests[number],
                    completion=str(tokenizer.decode(tokens[:-1] if stopped else tokens)),
                    token_ids=tuple(tokens),
                    n_prompt_tokens=len(requests[number].ids),
                    finish_reason="stop" if stopped else "length",
                    seconds=seconds,
                    costs={},
                )
            )


def plugin_settings(spec: MethodSpec, gates: str) -> dict[str, Any] | None:
    """Options of the plugin (`seergate.serving.settings`); ``None`` for ``dense``."""
    if spec.name == Dense.name:
        return None
    layers = () if spec.dense_layers is None and not spec.has_gates else spec.dense_layers
    rules = {"token_budget": spec.token_budget, "dense_layers": layers, **spec.options}
    settings = {name: rules[name] for name in plugin.RULES if rules.get(name) is not None}
    return {"method": spec.name, **settings, **({"gates": gates} if spec.has_gates else {})}
