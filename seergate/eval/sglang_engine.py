"""Answers of an engine of SGLang in a process of its own: where SGLang ends, it kills every child of its process, and
where it fails, that process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from seergate.errors import SeergateError
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
    """The samples in the order in which they end, see `seergate.eval.served.Answers`.

    Only the sum of the seconds means something: a sample has the time since the one before it ended.

    Raises:
        SeergateError: for a repetition penalty, or if SGLang fails.
    """
    sampling = asdict(job.sampling)
    if job.sampling.repetition_penalty != 1:
        raise SeergateError(
            f"repetition_penalty is {job.sampling.repetition_penalty}; with --engine sglang, which would not apply it "
            "to the prompt's tokens, it must be 1"
        )
    sampling |= {"top_k": sampling["top_k"] or -1, "stop_token_ids": ends}
    room = job.longest + 3 * (page or 1)  # a prompt takes whole pages, and SGLang keeps a page and a token free
    asked = {
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
        [sys.executable, "-m", "seergate.sglang.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "SGLANG_USE_CPU_ENGINE": "1"},
        start_new_session=True,  # so that its children end with it
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdin as file:
            json.dump(asked, file)
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
