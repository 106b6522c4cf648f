"""Offline generation with vLLM, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from seergate.serving.common.generation import Answers, EngineRun, Prompt
from seergate.serving.vllm import register


def answers(run: EngineRun, prompts: Sequence[Prompt]) -> Answers:
    """Generate with vLLM; each answer is yielded in the step in which it ends."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    register()  # vLLM would skip the plugin if VLLM_PLUGINS names others, and decode densely
    llm = LLM(
        run.model,
        dtype=run.dtype,
        max_model_len=run.longest,
        max_num_seqs=run.batch_size,
        block_size=run.page,
        additional_config={} if run.settings is None else {"seergate": run.settings},
    )
    engine = llm.llm_engine
    try:
        seconds = dict.fromkeys(map(str, range(len(prompts))), 0.0)
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(
                **run.sampling,
                seed=prompt.seed,
                max_tokens=prompt.max_new_tokens,
                stop_token_ids=run.ends,
                ignore_eos=True,  # the tokenizer's, which need not be among them
                stop=list(prompt.stop),
                detokenize=bool(prompt.stop),
            )
            engine.add_request(str(number), {"prompt_token_ids": list(prompt.ids)}, sampling)
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            outputs = engine.step()
            spent = (time.perf_counter() - began) / max(1, len(outputs))
            for output in outputs:
                seconds[output.request_id] += spent  # each step's time is divided among the rows that took it
                if output.finished:
                    yield int(output.request_id), list(output.outputs[0].token_ids), seconds[output.request_id]
    finally:
        engine.engine_core.shutdown()  # its process and memory; frames of a traceback may refer to it
        del llm, engine
        cleanup_dist_env_and_memory()
