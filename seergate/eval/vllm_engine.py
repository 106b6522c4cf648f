"""Answers of an engine of vLLM in this process."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from seergate.eval.cluster import Job
from seergate.eval.engine import Request


def answers(
    model: PreTrainedModel,
    requests: Sequence[Request],
    job: Job,
    ends: list[int],
    settings: dict[str, Any] | None,
    page: int | None,
) -> Generator[tuple[int, list[int], float], None, None]:
    """The samples in the steps in which they end, see `seergate.eval.served.Answers`."""
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
                detokenize=False,
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
