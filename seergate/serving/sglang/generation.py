"""Offline generation with SGLang, in a process of its own (`seergate.serving.sglang.process`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from seergate.errors import SeergateError
from seergate.serving.common.generation import Answers, EngineRun, Prompt


def answers(run: EngineRun, prompts: Sequence[Prompt]) -> Answers:
    """Generate with SGLang in a separate process, as it kills the children of its process, and on failure the process.

    Only the sum of the seconds is meaningful: an answer has the time since the previous one ended. A text that ends an
    answer does not stop it here.
    """
    if (penalty := run.sampling["repetition_penalty"]) != 1:
        raise SeergateError(
            f"repetition_penalty is {penalty}; with --engine sglang, which would not apply it to the prompt's tokens, "
            "it must be 1"
        )
    sampling = {**run.sampling, "top_k": run.sampling["top_k"] or -1, "stop_token_ids": run.ends}
    # A prompt takes whole pages, and SGLang keeps a page and a token free, and five tokens behind a prompt.
    room = run.longest + max(3 * (run.page or 1), 8)
    payload = {
        "engine": {
            "model_path": run.model,
            "dtype": run.dtype,
            "device": "cpu",
            "attention_backend": "torch_native" if run.settings is None else "seergate",
            "json_model_override_args": json.dumps(
                {"eos_token_id": run.ends} | ({} if run.settings is None else {"seergate": run.settings})
            ),
            "page_size": run.page,
            "context_length": run.longest + 6,
            "max_running_requests": run.batch_size,
            "max_total_tokens": run.batch_size and run.batch_size * room,
            "random_seed": prompts[0].seed % 2**32,
            "skip_tokenizer_init": True,
            "log_level": "error",
        },
        "prompts": [prompt.ids for prompt in prompts],
        "sampling": [{**sampling, "max_new_tokens": prompt.max_new_tokens} for prompt in prompts],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "seergate.serving.sglang.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # positions beyond the model's are never reached
        },
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
