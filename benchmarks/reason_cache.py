"""ReasonCache under a memory cap: how many more rows fit, and how many more tokens per second they generate.

    python benchmarks/reason_cache.py --threads 1

Every row decodes a given text, token by token: reasoning in which a share of the steps repeats an earlier step word
for word. Only the cache is measured, so weights are random. (benchmarks/reason_cache_accuracy.py measures accuracy, on
the tiny reasoner.)

1. `rows`: with a cap that holds `--rows` rows without sharing, the number of rows of the same length that can be
   decoded together to their end. The paper's throughput comes from this.
2. `tokens_per_second`: `--requests` texts, as many at a time as fit; the methods take turns, so that other load on the
   machine affects all of them.
3. `ms_per_step`: the same rows on one buffer per layer, on pages, and with sharing.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from common import arguments, described, parsed, random_model, save
from transformers import DynamicCache

from seergate.cache.block_store import OutOfBlocks
from seergate.cache.forward import CACHE
from seergate.cache.paging import Paging
from seergate.methods import Dense, Method, ReasonCache
from seergate.models.attach import attached

BLANK_LINE = 1
VOCABULARY = 512


class Words:
    """A tokenizer whose vocabulary is numbered words and one token for a blank line."""

    def decode(self, ids: list[int]) -> str:
        """Decode token ids."""
        return "".join("\n\n" if i == BLANK_LINE else f"w{i} " for i in ids)


def make_text(options: argparse.Namespace, seed: int) -> list[int]:
    """A prompt, then steps of about `--step` tokens, of which a share repeats an earlier step."""
    draw = random.Random(seed)
    text = [draw.randrange(2, VOCABULARY) for _ in range(options.prompt)]
    steps: list[list[int]] = []
    while len(text) < options.length:
        if steps and draw.random() < options.repeats:
            step = draw.choice(steps)
        else:
            length = draw.randint(options.step * 3 // 4, options.step * 5 // 4)
            step = [*(draw.randrange(2, VOCABULARY) for _ in range(length - 1)), BLANK_LINE]
            steps.append(step)
        text += step
    return text[: options.length]


@torch.inference_mode()
def say(model: Any, method: Method, paging: Paging | None, texts: list[list[int]], prompt: int) -> dict[str, Any]:
    """Decode the given texts in one batch; return the seconds of the decode steps, and the handle's statistics."""
    ids, cache = torch.tensor(texts), DynamicCache()
    with attached(model, method, storage=paging) as handle:
        model(input_ids=ids[:, :prompt], **{CACHE: cache})
        began = time.perf_counter()
        for at in range(prompt, ids.shape[1]):
            model(input_ids=ids[:, at : at + 1], **{CACHE: cache})
        return {"seconds": time.perf_counter() - began, **handle.stats()}


def main() -> None:
    """Parse the command line, measure, print, save."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=5, help="that the cap holds without sharing")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--length", type=int, default=768, help="tokens of a text")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--step", type=int, default=48, help="tokens of a reasoning step, on average")
    parser.add_argument("--repeats", type=float, default=0.5, help="share of the steps that are repeats")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=2, help="distances before sharing begins; texts here are short")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="of the measurement of a step")
    options = parsed(parser)
    shape = {"hidden_size": options.width, "layers": options.layers, "heads": 8, "kv_heads": 2}
    shape["head_dim"] = options.width // 8
    model = random_model(VOCABULARY, **shape)
    texts = [make_text(options, seed) for seed in range(options.requests)]
    cap = options.rows * -(-options.length // options.page)

    def wave(name: str, chosen: list[list[int]], blocks: int | None = cap) -> dict[str, Any]:
        if name == "dense":
            return say(model, Dense(), Paging(options.page, blocks), chosen, options.prompt)
        method = ReasonCache(
            tokenizer=Words(),
            block_size=options.page,
            max_blocks=blocks,
            warm_up=options.warm_up,
            structural_check=False,
        )
        return say(model, method, None, chosen, options.prompt)

    results: dict[str, dict[str, Any]] = {}
    for name in ("dense", "reason_cache"):
        rows, sharing = options.rows - 1, dict[str, Any]()
        with suppress(OutOfBlocks):
            while True:
                sharing = wave(name, [texts[i % len(texts)] for i in range(rows + 1)]).get("sharing", {})
                rows += 1
        results[name] = {"rows": rows, "seconds": 0.0, "tokens": 0, "out_of_blocks": 0, "sharing": sharing}
        print(f"{name}: {rows} rows fit, AMSR {sharing.get('amsr', 0.0):.3f}", flush=True)
    left = {name: list(texts) for name in ("dense", "reason_cache")}
    while any(left.values()):
        for name, waiting in left.items():
            counts, began = results[name], time.perf_counter()
            rows = min(counts["rows"], len(waiting))
            while rows:
                try:
                    wave(name, waiting[:rows])
                    break
                except OutOfBlocks:  # these texts have fewer repeats than the first ones
                    rows, counts["out_of_blocks"] = rows - 1, counts["out_of_blocks"] + 1
            del waiting[:rows]
            counts["seconds"] += time.perf_counter() - began
            counts["tokens"] += rows * (options.length - options.prompt)
    for name in left:
        results[name]["tokens_per_second"] = results[name]["tokens"] / results[name]["seconds"]
    steps, chosen = options.length - options.prompt, texts[: options.rows]
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "one buffer per layer": lambda: say(model, Dense(), None, chosen, options.prompt),
        "pages": lambda: wave("dense", chosen, None),
        "pages with sharing": lambda: wave("reason_cache", chosen, None),
    }
    ms = {name: float("inf") for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            ms[name] = min(ms[name], way()["seconds"] / steps * 1e3)
    dense, shared = results["dense"], results["reason_cache"]
    print(f"{shared['rows'] / dense['rows']:.2f}x rows, ", end="")
    print(f"{shared['tokens_per_second'] / dense['tokens_per_second']:.2f}x tokens per second under the cap")
    print(", ".join(f"{name} {value:.2f} ms per step" for name, value in ms.items()))
    record = {
        **described(options),
        "max_blocks": cap,
        "ms_per_step": ms,
        "rows_ratio": shared["rows"] / dense["rows"],
        "tokens_per_second_ratio": shared["tokens_per_second"] / dense["tokens_per_second"],
        "pages_over_buffer": ms["pages"] / ms["one buffer per layer"],
        "sharing_over_pages": ms["pages with sharing"] / ms["pages"],
    }
    rows_ = [{"method": name, **counts} for name, counts in results.items()]
    print("saved", save("reason_cache", record, rows_, options.output))


if __name__ == "__main__":
    main()
