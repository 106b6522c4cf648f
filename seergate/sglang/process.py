"""A process that starts an engine of SGLang, asks it for answers and ends: ``python -m seergate.sglang.process``.

It reads one JSON object: ``engine``, the arguments of `sglang.Engine`; ``prompts``, token ids; ``sampling``, the
parameters for each of them. For each answer it writes a line: number of the prompt, tokens, seconds since the last.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Ask for all answers at once, and write each when it ends."""
    asked = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as file:
        os.dup2(2, 1)  # whatever SGLang prints
        import sglang

        with sglang.Engine(**asked["engine"]) as llm:

            async def answer(number: int) -> tuple[int, list[int]]:
                given = {"input_ids": asked["prompts"][number], "sampling_params": asked["sampling"][number]}
                found: Any = await llm.async_generate(**given)
                if (reason := found["meta_info"]["finish_reason"])["type"] == "abort":
                    raise RuntimeError(f"SGLang gave up the answer to prompt {number}: {reason['message']}")
                return number, found["output_ids"]

            async def ask() -> None:
                then = time.perf_counter()
                for each in asyncio.as_completed([answer(number) for number in range(len(asked["prompts"]))]):
                    number, tokens = await each
                    now = time.perf_counter()
                    print(json.dumps([number, tokens, now - then]), file=file, flush=True)
                    then = now

            llm.loop.run_until_complete(ask())


if __name__ == "__main__":
    main()
