"""The tiny reasoner, as the servers' tests ask it."""

from __future__ import annotations

import random

from seergate.eval.tasks.chain_sum import make_problem

REASONER = "checkpoints/tiny-reasoner"


def questions(*variables: int, seed: int = 0) -> list[list[int]]:
    """A prompt for a problem of each size, as token ids."""
    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(REASONER), random.Random(seed)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": make_problem(size, draw).question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for size in variables
    ]
