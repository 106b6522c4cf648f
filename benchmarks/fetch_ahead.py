"""Fetching ahead in an offloaded cache: how many of the blocks fetched on demand it spares, and what it costs.

    python benchmarks/fetch_ahead.py                      # the tiny reasoner and its gates
    python benchmarks/fetch_ahead.py --rooms 2 --aheads 0 4 --methods gate

A trained model answers chain-sum problems, since random weights would choose random blocks. The text must be that of a
cache in memory, token for token, or the run ends. Bytes are counted, not timed: they are the same on every machine.

``spared`` is the share of the bytes fetched on demand, without fetching ahead, that are no longer fetched so; ``used``
the share of the bytes fetched ahead that a step read before they were given up.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save
from transformers import BatchEncoding, PreTrainedModel

import seergate
from seergate import GateBank, methods
from seergate.chain_sum import make_problem
from seergate.hf.loading import load_base, load_tokenizer
from seergate.paths import shipped

TINY = "checkpoints/tiny-reasoner"


def measure(
    model: PreTrainedModel, prompts: BatchEncoding, method: methods.SelectingMethod, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per size of the fast memory and number of blocks that are fetched ahead."""
    config, new = model.config, {**prompts, "max_new_tokens": options.new_tokens}
    assert method.token_budget is not None
    with seergate.attached(model, method):
        expected = model.generate(**new)
    step_blocks = options.problems * config.num_key_value_heads * (method.token_budget // method.block_size)
    block_bytes = 2 * method.block_size * config.head_dim * model.dtype.itemsize
    rows: list[dict[str, Any]] = []
    for room in options.rooms:
        memory = config.num_hidden_layers * int(room * step_blocks) * block_bytes
        for ahead in options.aheads:
            offload = seergate.Offload(memory, ahead=ahead)
            with seergate.attached(model, method, offload=offload) as handle:
                if not torch.equal(model.generate(**new), expected):
                    sys.exit(f"{method.name} says something else when {ahead} blocks are fetched ahead")
                stats = handle.stats()
            early = stats["bytes_fetched_ahead_per_step"]
            row = {
                "method": method.name,
                "budget": method.token_budget,
                "room": room,
                "ahead": ahead,
                "on_demand_bytes_per_step": stats["bytes_fetched_per_step"] - early,
                "ahead_bytes_per_step": early,
                "used": stats["fetched_ahead_used"],
            }
            without = next((row for row in rows if row["room"] == room and row["ahead"] == 0), row)
            row["spared"] = 1 - row["on_demand_bytes_per_step"] / without["on_demand_bytes_per_step"]
            rows.append(row)
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def command_line() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=2, help="chain-sum problems, one batch")
    parser.add_argument("--variables", type=int, default=75, help="size of a problem")
    parser.add_argument("--new-tokens", type=int, default=960, help="of each answer")
    parser.add_argument("--methods", nargs="+", choices=["gate", "quest"], default=["gate", "quest"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256])
    parser.add_argument(
        "--rooms", type=float, nargs="+", default=[1.5, 3], help="fast memory, in blocks of one step's budget"
    )
    parser.add_argument("--aheads", type=int, nargs="+", default=[2, 4, 8], help="blocks per KV head; 0 comes first")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.aheads = [0, *(ahead for ahead in options.aheads if ahead)]
    return options


def main() -> None:
    """Measure, print, save."""
    options = command_line()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_base(TINY), load_tokenizer(TINY)
    model.generation_config.do_sample = False
    bank = GateBank.from_pretrained(shipped(f"{TINY}/gates"))
    draw, texts = random.Random(0), list[str]()
    for _ in range(options.problems):
        asked = make_problem(options.variables, draw).messages[:1]
        texts.append(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    encode = {"return_tensors": "pt", "add_special_tokens": False, "padding": True, "padding_side": "left"}
    prompts = tokenizer(texts, **encode)
    rows = []
    with torch.inference_mode():
        for name in options.methods:
            for budget in options.budgets:
                if name == "gate":
                    method: methods.SelectingMethod = methods.Gate(bank=bank, token_budget=budget)
                else:
                    method = methods.Quest(token_budget=budget, block_size=bank.config.block_size, dense_layers=())
                rows += measure(model, prompts, method, options)
    asked = {name: value for name, value in vars(options).items() if name != "output"}
    print("saved", save("fetch_ahead", torch.device("cpu"), asked, rows, options.output))


if __name__ == "__main__":
    main()
