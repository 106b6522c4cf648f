"""The tiny reasoner, as the servers' tests ask it."""

import random
from typing import Any

import torch

import seergate
from seergate.eval.tasks.chain_sum import make_problem

REASONER = "checkpoints/tiny-reasoner"
GATES = f"{REASONER}/gates-32"
"""With blocks of 32 tokens, which servers have pages for."""


def questions(*variables: int, seed: int = 0) -> list[list[int]]:
    """A prompt for a problem of each size, as token ids."""
    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(REASONER), random.Random(seed)
    chats = [[{"role": "user", "content": make_problem(size, draw).question}] for size in variables]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)


def reference_tokens(model: Any, prompts: list[list[int]], tokens: int, method: Any, **options: Any) -> Any:
    """What transformers answers with a method, one prompt at a time."""
    with seergate.attached(model, method, **options):
        outputs = [model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False) for ids in prompts]
    return [output[0, len(ids) :].tolist() for ids, output in zip(prompts, outputs, strict=True)]
