"""Starts an SGLang engine, generates answers and exits: ``python -m seergate.serving.sglang.process``.

Reads one JSON object: ``engine``, the arguments of `sglang.Engine`; ``prompts``, lists of token ids; ``sampling``, the
parameters of each prompt. Writes a JSON line per answer: index of the prompt, tokens, seconds since the last answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Request all answers at once, and write each as it finishes."""
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as file:
        os.dup2(2, 1)  # what SGLang prints goes to stderr
        import sglang

        with sglang.Engine(**request["engine"]) as llm:

            async def answer(number: int) -> tuple[int, list[int]]:
                given = {"input_ids": request["prompts"][number], "sampling_params": request["sampling"][number]}
                result: Any = await llm.async_generate(**given)
                if (reason := result["meta_info"]["finish_reason"])["type"] == "abort":
                    raise RuntimeError(f"SGLang gave up the answer to prompt {number}: {reason['message']}")
                return number, result["output_ids"]

            async def ask() -> None:
                then = time.perf_counter()
                for each in asyncio.as_completed([answer(number) for number in range(len(request["prompts"]))]):
                    number, tokens = await each
                    now = time.perf_counter()
                    print(json.dumps([number, tokens, now - then]), file=file, flush=True)
                    then = now

            llm.loop.run_until_complete(ask())


if __name__ == "__main__":
    main()
