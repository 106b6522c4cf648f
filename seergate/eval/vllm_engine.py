"""Generation by vLLM instead of transformers: the same samples, asked of an engine of its own (docs/serving.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from seergate.errors import SeergateError
from seergate.eval.cluster import Job
from seergate.eval.engine import Generation, Request, end_ids
from seergate.eval.settings import MethodSpec
from seergate.fingerprint import fingerprint
from seergate.gates.bank import Gates
from seergate.hf.bank import GateBank
from seergate.methods import Dense
from seergate.serving import settings as vllm_settings


def check_served(spec: MethodSpec) -> None:
    """Refuse what vLLM cannot run.

    Raises:
        SeergateError: naming the method or its option.
    """
    vllm_settings.check_served(spec.name, Dense.name)
    other = sorted(spec.options.keys() - {*vllm_settings.RULES, "block_size"})
    if other:
        raise SeergateError(f"the option {other[0]!r} of {spec.name!r} does not exist inside vLLM; leave it out")


def served_from(bank: Gates) -> str:
    """The directory or Hub id from which vLLM reads gates.

    Raises:
        SeergateError: if other gates are there than these.
    """
    if not bank.source or fingerprint(GateBank.from_pretrained(bank.source)) != fingerprint(bank):
        raise SeergateError(
            "vLLM reads gates anew, from their directory or the Hub's newest commit, and would get others than these; "
            "save these with save_pretrained and load them from there"
        )
    return bank.source


def engine_version() -> str:
    """Name and version of vLLM, for a run's configuration.

    Raises:
        SeergateError: if vLLM is not installed.
    """
    try:
        import vllm
    except ImportError as error:
        raise SeergateError(
            f"--engine vllm needs vLLM, which cannot be imported ({error}); see docs/serving.md"
        ) from error
    return f"vllm {vllm.__version__}"


def generate_by_vllm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[Request],
    job: Job,
    bank: Gates | None,
    on_finished: Callable[[Generation], None],
) -> None:
    """Generate samples, all asked at once; each step's time is divided among the rows that took it.

    Args:
        model: says what vLLM loads, in which dtype, and which tokens end an answer.
        bank: the gates; vLLM reads them from where they were loaded (`served_from`).
        on_finished: gets every sample in the step in which it ends.
    """
    bank = bank if job.spec.has_gates else None
    gates = "" if bank is None else served_from(bank)

    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    spec, ends = job.spec, sorted(end_ids(model, tokenizer))
    llm = LLM(
        str(model.config.name_or_path),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=job.longest,
        max_num_seqs=job.batch_size,
        block_size=spec.block_size if bank is None else bank.config.block_size,
        additional_config=additional_config(spec, gates),
    )
    try:
        engine, seconds = llm.llm_engine, dict.fromkeys(map(str, range(len(requests))), 0.0)
        for number, request in enumerate(requests):
            engine.add_request(str(number), {"prompt_token_ids": list(request.ids)}, _parameters(job, request, ends))
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            outputs = engine.step()
            spent = (time.perf_counter() - began) / max(1, len(outputs))
            for output in outputs:
                seconds[output.request_id] += spent
                if not output.finished:
                    continue
                tokens = tuple(output.outputs[0].token_ids)
                stopped = tokens[-1] in ends
                on_finished(
                    Generation(
                        request=requests[int(output.request_id)],
                        completion=str(tokenizer.decode(tokens[:-1] if stopped else tokens)),
                        token_ids=tokens,
                        n_prompt_tokens=len(output.prompt_token_ids),
                        finish_reason="stop" if stopped else "length",
                        seconds=seconds[output.request_id],
                        costs={},
                    )
                )
    finally:
        del llm
        cleanup_dist_env_and_memory()


def additional_config(spec: MethodSpec, gates: str) -> dict[str, Any]:
    """Options of the plugin (`seergate.serving.settings`); empty for ``dense``."""
    if spec.name == Dense.name:
        return {}
    layers = () if spec.dense_layers is None and not spec.has_gates else spec.dense_layers
    rules = {"token_budget": spec.token_budget, "dense_layers": layers, **spec.options}
    settings = {name: rules[name] for name in vllm_settings.RULES if rules.get(name) is not None}
    return {"seergate": {"method": spec.name, **settings, **({"gates": gates} if spec.has_gates else {})}}


def _parameters(job: Job, request: Request, ends: list[int]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **asdict(job.sampling),
        seed=request.seed,
        max_tokens=job.limit.of(len(request.ids)),
        stop_token_ids=ends,
        detokenize=False,
    )
