"""Lossless decoding: the share of drafted tokens that are accepted, and times of drafting and verifying.

    python benchmarks/lossless.py                      # the tiny reasoner; two layers of Qwen3-8B's attention on a CPU
    python benchmarks/lossless.py --lengths 16384 --drafts 4 8

Part one answers chain-sum problems with a trained model, the tiny reasoner. Its text must equal the dense model's,
token for token, or the run ends. It measures the acceptance (share of accepted draft tokens) per method and budget.
(The tiny reasoner reads far more weights than keys, so it gets no faster; only the acceptance carries over.)

Part two measures the times of a draft pass, a verify pass and a dense step, on a model of real geometry with random
weights and a cache of random keys and values. They give, for each acceptance, the speedup of lossless decoding over
the faster of transformers' static cache and our dense decoding. The ways take turns of a few tokens; times are
medians over rounds, each the mean of a round.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
from common import arguments, described, parsed, save
from end_to_end import Way, add_model_options, build, fill, generate
from transformers import PreTrainedModel

import seergate
from seergate import GateBank, GateConfig, methods
from seergate.decode.speculation import expected_tokens
from seergate.eval.tasks.chain_sum import make_problem
from seergate.models.loading import load_base, load_tokenizer
from seergate.paths import shipped

TINY = "checkpoints/tiny-reasoner"
ACCEPTANCES = (0.5, 0.7, 0.8, 0.9, 0.95)


def kept_share(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Part one: one row per method and budget."""
    model, tokenizer = load_base(TINY), load_tokenizer(TINY)
    model.generation_config.do_sample = False
    bank = GateBank.from_pretrained(shipped(f"{TINY}/gates"))
    draw = random.Random(0)
    prompts = []
    for _ in range(options.problems):
        messages = make_problem(options.variables, draw).messages[:1]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"])
    new = {"max_new_tokens": options.new_tokens}
    dense = [model.generate(ids, **new) for ids in prompts]
    for budget in options.tiny_budgets:
        shared = {"token_budget": budget}
        plain = {"block_size": bank.config.block_size, **shared}
        for method in (
            methods.Gate(bank=bank, **shared),
            methods.Quest(dense_layers=(), **plain),
            methods.Oracle(**plain),
            methods.Random(**plain),
        ):
            with seergate.attached(model, method, correction=seergate.Lossless(options.tiny_draft)) as handle:
                for ids, expected in zip(prompts, dense, strict=True):
                    if not torch.equal(model.generate(ids, **new), expected):
                        sys.exit(f"{method.name} with a budget of {budget} says something else than the dense model")
                stats = handle.stats()
            names = ("acceptance", "draft_tokens", "tokens_per_dense_pass")
            yield {
                "part": "acceptance",
                "method": method.name,
                "budget": budget,
                "density": stats["density"],
                **{name: stats["lossless"][name] for name in names},
            }


def pass_times(model: PreTrainedModel, length: int, draft: int, options: argparse.Namespace) -> dict[str, Any]:
    """Part two: one row."""
    bank = GateBank.for_model(model, GateConfig(options.block_size)).to(model.dtype)
    gate = methods.Gate(bank=bank, token_budget=options.budget)
    ways = {"lossless": Way(gate), "dense": Way(methods.Dense()), "hf_static": Way(static=True)}
    fill(model, ways, torch.ones(1, length, dtype=torch.long), (options.rounds + 2) * options.tokens, options.budget)
    drafting, verifying, steps = list[float](), list[float](), {"dense": list[float](), "hf_static": list[float]()}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            correction = seergate.Lossless(draft) if name == "lossless" else None
            with way.attached(model, correction=correction) as handle:
                mask = torch.ones_like(way.ids)
                way.ids, times = generate(model, way.ids, mask, options.tokens, way.cache)
                counted = handle.stats() if handle is not None else {}
            if number == 0:
                continue  # warms up
            if name == "lossless":
                counted = counted["lossless"]
                drafted = counted["draft_tokens"] * counted["cycles"]
                drafting.append(1e3 * counted["draft_seconds"] / drafted)
                verifying.append(1e3 * counted["verify_seconds"] / (counted["cycles"] + counted["plain_steps"]))
            else:
                steps[name].append(statistics.mean(times[1:]))  # the mean of a round, as for the passes
    draft_ms, verify_ms = statistics.median(drafting), statistics.median(verifying)
    dense = {name: statistics.median(times) for name, times in steps.items()}
    best, cycle = min(dense.values()), draft * draft_ms + verify_ms
    speedup = {a: expected_tokens(a, draft) * best / cycle for a in (*ACCEPTANCES, *(i / 100 for i in range(101)))}
    return {
        "part": "passes",
        "length": length,
        "budget": options.budget,
        "draft_tokens": draft,
        "draft_ms": draft_ms,
        "verify_ms": verify_ms,
        **{f"{name}_ms": value for name, value in dense.items()},
        "best_dense": min(dense, key=dense.__getitem__),
        "speedup_at_acceptance": {str(a): speedup[a] for a in ACCEPTANCES},
        "break_even_acceptance": min((a for a, value in speedup.items() if value >= 1), default=None),
    }


def command_line() -> argparse.Namespace:
    """Parse the options."""
    parser = arguments(__doc__)
    parser.add_argument("--problems", type=int, default=2, help="chain-sum problems")
    parser.add_argument("--variables", type=int, default=40, help="size of a problem")
    parser.add_argument("--new-tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--tiny-budgets", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--tiny-draft", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 16384])
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12, help="of each way per round")
    options = parsed(parser)
    options.device, options.dtype = "cpu", torch.float32
    return options


def main() -> None:
    """Measure, print and save."""
    options = command_line()
    with torch.inference_mode():
        rows = []
        for row in kept_share(options):
            rows.append(row)
            print(row)
        model = build(options)
        for length, draft in itertools.product(options.lengths, options.drafts):
            rows.append(pass_times(model, length, draft, options))
            print(rows[-1])
    print("saved", save("lossless", described(options, "dtype"), rows, options.output))


if __name__ == "__main__":
    main()
