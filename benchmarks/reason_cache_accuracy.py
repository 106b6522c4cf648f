"""The accuracy lost by ReasonCache: the tiny reasoner decodes a reasoning that repeats its first steps in a loop.

    python benchmarks/reason_cache_accuracy.py --threads 1

After every few new steps, the text repeats the first steps for some rounds: an endless self-loop, in the terms of the
ReasonCache paper. The text is given (the model does not loop by itself); the metric is how often the model predicts
the next token. Values that a new step recalls from an earlier step are counted separately: outside of the loop each
occurs once in the text, so sharing a wrong block loses it. The last two methods decode with the shipped gates, on a
cache without and with sharing; gates have blocks of eight tokens, and a page cannot be smaller.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from common import arguments, described, parsed, save
from transformers import AutoTokenizer, DynamicCache

from seergate.cache.forward import CACHE
from seergate.eval.tasks.chain_sum import make_problem
from seergate.methods import Dense, Gate, Method, RandomSharing, ReasonCache
from seergate.models.attach import attached
from seergate.models.gate_bank import GateBank
from seergate.models.loading import load_base
from seergate.paths import shipped


def looping_reasoning(
    tokenizer: Any, variables: int, every: int, rounds: int, seed: int
) -> tuple[list[int], list[int], list[bool]]:
    """Ids of a problem's prompt, ids of its reasoning, which repeats the first ``every`` steps after as many new
    steps, and a mask of the reasoning's tokens that are values which a new step recalls.
    """
    problem = make_problem(variables, random.Random(seed))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.question}], tokenize=False, add_generation_prompt=True
    )
    prompt, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (chat, "<think>"))
    steps = problem.reasoning.removesuffix(" so next answer").split(" so next ")
    recalled = [False] * len(ids)

    def say(step: str, new: bool) -> None:
        words = f"{step} so next".split()
        ids.extend(tokenizer(" ".join(words), add_special_tokens=False)["input_ids"])
        summed = new and "plus" in words
        recalled.extend(summed and place in (2, 5) for place in range(len(words)))  # a3: a1 4 plus a2 5 ...

    for begin in range(0, len(steps), every):
        for step in steps[begin : begin + every]:
            say(step, True)
        for step in steps[:every] * rounds if begin + every < len(steps) else ():
            say(step, False)
    assert len(ids) == len(recalled)
    return prompt, ids, recalled


@torch.inference_mode()
def say_along(model: Any, method: Method, texts: list[tuple[list[int], list[int], list[bool]]]) -> dict[str, Any]:
    """Decode the given texts in one batch, up to the end of the shortest.

    Returns:
        Share of tokens that the model predicts, of ``recalled`` values and of ``other`` tokens; the number of recalled
        values, the length of the texts, and the statistics of sharing.
    """
    length, width = min(len(ids) for _, ids, _ in texts), max(len(prompt) for prompt, _, _ in texts)
    forced = torch.tensor([ids[:length] for _, ids, _ in texts])
    which = torch.tensor([recalled[:length] for _, _, recalled in texts])
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _, _ in texts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _, _ in texts])
    answers, cache = [], DynamicCache()
    with attached(model, method) as handle:
        for at in range(length):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(input_ids=ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}, logits_to_keep=1)
            answers.append(out.logits[:, -1].argmax(-1))
            ids = forced[:, at : at + 1]
            mask = torch.cat((mask, torch.ones_like(ids)), 1)
        sharing = handle.stats().get("sharing", {})
    right = (torch.stack(answers, 1) == forced).double()
    return {
        "recalled": right[which].mean().item(),
        "other": right[~which].mean().item(),
        "values": int(which.sum()),
        "tokens": length,
        **sharing,
    }


def main() -> None:
    """Parse the command line, measure, print, save."""
    parser = arguments(__doc__)
    parser.add_argument("--problems", type=int, default=6)
    parser.add_argument("--variables", type=int, default=20)
    parser.add_argument("--every", type=int, default=4, help="new steps between two loops; each is over as many")
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 3], help="of a loop")
    parser.add_argument("--page", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--budget", type=int, default=128, help="tokens that the gates read")
    options = parsed(parser)
    path = shipped("checkpoints/tiny-reasoner")
    model, tokenizer = load_base(path), AutoTokenizer.from_pretrained(path)
    given = {"tokenizer": tokenizer, "border": "next", "block_size": options.page, "warm_up": options.warm_up}
    gate = Gate(bank=GateBank.from_pretrained(path / "gates"), token_budget=options.budget)
    page = -(-options.page // gate.block_size) * gate.block_size
    compared: dict[str, Method] = {
        "dense": Dense(),
        "reason_cache": ReasonCache(**given),  # type: ignore[arg-type]
        "random_sharing": RandomSharing(**given),  # type: ignore[arg-type]
        "gate": gate,
        "reason_cache+gate": ReasonCache(**given | {"block_size": page}, reads=gate),  # type: ignore[arg-type]
    }
    rows = []
    for rounds in options.rounds:
        texts = [
            looping_reasoning(tokenizer, options.variables, options.every, rounds, seed)
            for seed in range(options.problems)
        ]
        for name, method in compared.items():
            measured = say_along(model, method, texts)
            share = measured["recalled"]
            measured["recalled_standard_error"] = math.sqrt(share * (1 - share) / measured["values"])
            page_size = {"block_size": method.block_size} if isinstance(method, ReasonCache) else {}
            rows.append({"rounds": rounds, "method": name, **page_size, **measured})
            print(
                f"{rounds} rounds, {name}: {share:.3f} of {measured['values']} recalled values, "
                f"{measured['other']:.3f} of other tokens, AMSR {measured.get('amsr', 0.0):.3f}"
            )
    print("saved", save("reason_cache_accuracy", described(options), rows, options.output))


if __name__ == "__main__":
    main()
