"""Decoding inside stock `generate`: tokens per second, memory and bytes read, against transformers' own caches.

    python benchmarks/end_to_end.py                               # two layers of Qwen3-8B's attention on a CPU
    python benchmarks/end_to_end.py --threads 1 --lengths 16384 --batches 1

The model has random weights. A long context is not read token by token, which would take hours on a CPU: random keys
and values are put into every cache, the same for all. So what is read is as much as in a real run, but which blocks
are chosen again at the next step is up to chance, and the bytes that an offloaded cache fetches are more than a real
text's. Time to first token is that of a real, shorter prompt.

Nothing is timed before every way has decoded the plain model's tokens with a budget for everything. The
configurations take turns, a few tokens each, so that a busy machine slows all of them down; times are medians over
tokens, ``ratios`` those of medians. ``best_dense`` is the faster of transformers' two caches. At batch 1, ``ceiling``
is its time over what it takes at a context as long as the budget, where there is nothing to leave out: no way that
reads the budget can gain more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from common import arguments, parsed, random_model, resident, save, version
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

import seergate
from seergate import GateBank, GateConfig, methods
from seergate.cache.argument import CACHE
from seergate.cache.call import PROMPT, ForwardContext
from seergate.cache.layer import GatedLayer
from seergate.cache.offload import Offload
from seergate.decode.step import make_step
from seergate.inference_mode import outside_inference_mode

SHORTER = (1.0, 0.875, 0.75, 0.5)
"""Rows of a batch are these shares of its length, in turn."""
SLOW_TOKENS, SLOW_ROUNDS = 3, 2
"""Tokens and rounds of the way that copies its cache at each token."""
CHUNK = 2048
"""Tokens that a cache is filled with at a time."""


@dataclass
class Way:
    """One way to decode, and what it has taken so far.

    Attributes:
        method: what decides what is read; ``None`` for transformers alone.
        static: use its static cache.
        memory_share: keep this share of keys and values in memory, the others in a file; ``None`` for all.
        milliseconds: of each token, by turn.
        growth: by how many bytes the process grew at most during a turn.
    """

    method: methods.Method | None = None
    static: bool = False
    memory_share: float | None = None
    offload: Offload | None = None
    cache: Cache | None = None
    ids: Tensor | None = None
    milliseconds: list[list[float]] = field(default_factory=list)
    growth: int = 0
    stats: dict[str, Any] = field(default_factory=dict)

    def attached(self, model: PreTrainedModel, **options: Any) -> Any:
        """The method on the model for a while."""
        if self.method is None:
            return nullcontext()
        return seergate.attached(model, self.method, storage=self.offload, **options)


class Clock(BaseStreamer):
    """Notes when each token arrives."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, list[float]()

    def put(self, value: Tensor) -> None:
        """One token of each row; at first the prompt."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def build(options: argparse.Namespace) -> PreTrainedModel:
    """The model, with random weights."""
    names = ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "dtype")
    return random_model(**{name: getattr(options, name) for name in names}).to(options.device)


def ways(
    model: PreTrainedModel, options: argparse.Namespace, budget: int, bank: GateBank | None = None
) -> dict[str, Way]:
    """The ways that are compared; with random gates unless some are given."""
    bank = bank or GateBank.for_model(model, GateConfig(options.block_size)).to(options.device, options.dtype)
    gate = methods.Gate(bank=bank, token_budget=budget)
    quest = methods.Quest(token_budget=budget, block_size=options.block_size, dense_layers=())
    return {
        "hf_dynamic": Way(),
        "hf_static": Way(static=True),
        "dense": Way(methods.Dense()),
        "gate": Way(gate),
        "quest": Way(quest),
        "gate_offloaded": Way(gate, memory_share=options.memory_share),
    }


def generate(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, new: int, cache: Cache | None = None
) -> tuple[Tensor, list[float]]:
    """New tokens and the milliseconds before each of them."""
    clock = Clock(ids.device)
    start = time.perf_counter()
    options = {} if cache is None else {CACHE: cache}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, streamer=clock, **options)
    times = [start, *clock.times[1:]]  # the first call is that with the prompt
    return out, [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]


def answered(
    model: PreTrainedModel, way: Way, ids: Tensor, mask: Tensor, new: int, room: int
) -> tuple[Tensor, list[float]]:
    """`generate` in one way on an empty cache; where it is offloaded, ``room`` of its tokens are in memory."""
    way.offload = room_for(model, room) if way.memory_share is not None else None
    cache = StaticCache(model.config, max_cache_len=ids.shape[1] + new) if way.static else None
    with way.attached(model):
        return generate(model, ids, mask, new, cache)


def prove(model: PreTrainedModel, options: argparse.Namespace) -> None:
    """End the run if, with a budget for everything, a way gives other tokens than the plain model."""
    ids = torch.randint(1, 1024, (2, 3 * options.block_size), device=options.device)
    mask = torch.ones_like(ids)
    mask[1, : options.block_size // 2] = 0
    want = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8)
    for name, way in ways(model, options, 8 * options.block_size).items():
        got, _ = answered(model, way, ids, mask, 8, room=2 * ids.numel() * 8)
        if not torch.equal(got, want):
            sys.exit(f"{name} with a budget for everything gives other tokens than the plain model")


def room_for(model: PreTrainedModel, tokens: int) -> Offload:
    """Offload with memory for the keys and values of so many tokens."""
    config = model.config
    per_layer = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return Offload(tokens * config.num_hidden_layers * per_layer)


def fill(model: PreTrainedModel, compared: dict[str, Way], mask: Tensor, room: int, budget: int) -> None:
    """Put the same random keys and values into every cache, as if a prompt with this mask had been read."""
    config, (batch, length) = model.config, mask.shape
    shape = (batch, config.num_key_value_heads, length, config.head_dim)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for way in compared.values():
        way.cache = StaticCache(config, max_cache_len=length + room) if way.static else DynamicCache(config=config)
        way.ids = torch.ones(batch, length + 1, dtype=torch.long, device=mask.device)
        if way.memory_share is not None:
            tokens = max(way.memory_share * int(mask.sum()), 2 * batch * budget)  # a step's blocks and as many again
            way.offload = room_for(model, int(tokens))
    for layer in range(config.num_hidden_layers):
        k_pre, values = (torch.randn(shape, device=mask.device, dtype=model.dtype) for _ in "kv")
        with seergate.attached(model, "dense") as handle:
            keys = handle.bindings[layer].spec.rotary.rotate(k_pre, positions)
        for way in compared.values():
            if way.method is None:
                way.cache.update(keys, values, layer)
                continue
            with way.attached(model) as handle:
                announce(handle.bindings[layer].cache_layer(way.cache), k_pre, keys, values, mask)


@outside_inference_mode
def announce(layer: GatedLayer, k_pre: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> None:
    """Let one layer of a cache see keys and values as it sees those of a prompt, a chunk at a time."""
    heads = layer.num_heads
    for begin in range(0, mask.shape[1], CHUNK):
        some = slice(begin, begin + CHUNK)
        valid = mask[:, some].bool()
        queries = keys.new_zeros(()).expand(len(keys), heads, valid.shape[1], keys.shape[3])  # prompts' are not used
        parts = (queries, k_pre[:, :, some])
        layer.context = context = ForwardContext(PROMPT, lambda parts=parts: parts, None if valid.all() else valid)
        layer.update(keys[:, :, some], values[:, :, some])
        layer.state.append(make_step(layer, context, queries, {}))


def turn(model: PreTrainedModel, name: str, way: Way, mask: Tensor, tokens: int) -> None:
    """Let one way decode a few tokens."""
    whole = torch.cat((mask, mask.new_ones(len(mask), way.ids.shape[1] - mask.shape[1])), dim=1)
    before = resident(reset_peak=True)
    with way.attached(model) as handle:
        way.ids, times = generate(model, way.ids, whole, tokens, way.cache)
        if handle is not None:
            way.stats = handle.stats()
    way.growth = max(way.growth, resident() - before)
    way.milliseconds.append(times[1:])  # the first one has the set-up of `generate` in it


def held(way: Way) -> dict[str, float]:
    """Bytes of the cache (mean and peak) and bytes read per step."""
    if way.stats:
        names = ("resident_bytes_mean", "resident_bytes_peak", "state_bytes", "bytes_read_per_step", "density")
        return {name: way.stats[name] for name in (*names, "bytes_fetched_per_step") if name in way.stats}
    bytes_held = sum(layer.keys.nbytes + layer.values.nbytes for layer in way.cache.layers)
    return dict.fromkeys(("resident_bytes_mean", "resident_bytes_peak", "bytes_read_per_step"), bytes_held)


def measure(model: PreTrainedModel, batch: int, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """One cell of the grid."""
    lengths = [int(length * SHORTER[row % len(SHORTER)]) for row in range(batch)]
    begins = length - torch.tensor(lengths, device=options.device)
    mask = (torch.arange(length, device=options.device) >= begins[:, None]).long()
    compared = ways(model, options, options.budget)
    fill(model, compared, mask, (options.rounds + 1) * options.tokens, options.budget)
    for number in range(options.rounds + 1):
        for name, way in compared.items():
            slow = name == "hf_dynamic"
            if not slow or number <= SLOW_ROUNDS:
                turn(model, name, way, mask, 1 + (SLOW_TOKENS if slow else options.tokens - 1))
    row: dict[str, Any] = {"batch": batch, "lengths": lengths, "budget": options.budget, "ways": {}}
    for name, way in compared.items():
        times = [ms for part in way.milliseconds[1:] for ms in part]  # the first turn warms up
        median = statistics.median(times)
        row["ways"][name] = {
            "token_median_ms": median,
            "token_min_ms": min(times),
            "tokens_per_second": 1e3 * batch / median,
            "process_growth_bytes": way.growth,
            **held(way),
        }
    ms = {name: way["token_median_ms"] for name, way in row["ways"].items()}
    row["best_dense"] = min(("hf_dynamic", "hf_static"), key=ms.__getitem__)
    row["ratios"] = {
        f"{name} over {other}": ms[other] / ms[name]
        for name in ("dense", "gate", "quest", "gate_offloaded")
        for other in dict.fromkeys(("hf_dynamic", "hf_static"))
    }
    row["speedup"] = {name: ms[row["best_dense"]] / ms[name] for name in ("dense", "gate", "quest", "gate_offloaded")}
    return row


def add_ceilings(rows: list[dict[str, Any]], budget: int) -> None:
    """Add the largest gain that the budget allows at batch 1, where a context as long as it was measured."""
    dense = {row["lengths"][0]: row["ways"][row["best_dense"]]["token_median_ms"] for row in rows if row["batch"] == 1}
    for row in rows:
        if row["batch"] == 1 and budget in dense:
            row["ceiling"] = dense[row["lengths"][0]] / dense[budget]


def first_token(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, float]:
    """Seconds from a prompt to its first token, the median of three, each way."""
    ids = torch.randint(1, 1024, (1, options.prompt), device=options.device)
    seconds: dict[str, list[float]] = {}
    for _ in range(3):
        for name, way in ways(model, options, options.budget).items():
            _, times = answered(model, way, ids, torch.ones_like(ids), 1, room=2 * options.budget)
            seconds.setdefault(name, []).append(times[0] / 1e3)
    return {name: statistics.median(values) for name, values in seconds.items()}


def break_even(rows: list[dict[str, Any]], name: str) -> float | None:
    """Length from which on a way is faster than the best dense one at batch 1, between measured lengths on a line.

    ``None`` if it never is; the shortest measured length if it always is.
    """
    points = [(row["lengths"][0], 1 - 1 / row["speedup"][name]) for row in rows if row["batch"] == 1]
    points.sort()
    slower = [i for i, (_, gain) in enumerate(points) if gain <= 0]
    if not points or (slower and slower[-1] == len(points) - 1):
        return None
    if not slower:
        return points[0][0]
    (x0, y0), (x1, y1) = points[slower[-1]], points[slower[-1] + 1]
    return x0 - y0 * (x1 - x0) / (y1 - y0)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options of `build` and `ways`: two layers of the attention of Qwen3-8B, and the gates' blocks and budget."""
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)


def command_line() -> argparse.Namespace:
    """Options."""
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 3072, 8192, 16384, 32768], help="at batch 1")
    parser.add_argument("--batch-lengths", type=int, nargs="*", default=[16384], help="at batch 4, ragged")
    add_model_options(parser)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt whose first token is timed")
    parser.add_argument(
        "--memory-share", type=float, default=0.25, help="of keys and values, where they are offloaded"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8, help="of each way per round")
    options = parsed(parser)
    on_gpu = torch.device(options.device).type == "cuda"
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    return options


def main() -> None:
    """Prove, measure, print, save."""
    options = command_line()
    rows = []
    with torch.inference_mode():
        model = build(options)
        prove(model, options)
        cells = [(1, length) for length in options.lengths] + [(4, length) for length in options.batch_lengths]
        for batch, length in cells:
            row = measure(model, batch, length, options)
            rows.append(row)
            times = ", ".join(f"{name} {way['token_median_ms']:.1f}" for name, way in row["ways"].items())
            print(f"batch {batch}, {length} tokens, ms per token: {times}")
            faster = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in row["speedup"].items())
            print(f"    over {row['best_dense']}: {faster}", flush=True)
        seconds = first_token(model, options)
    add_ceilings(rows, options.budget)
    print("at most, at batch 1:", {row["lengths"][0]: round(row["ceiling"], 2) for row in rows if "ceiling" in row})
    print("first token after", options.prompt, "tokens:", {name: round(value, 3) for name, value in seconds.items()})
    even = {name: break_even(rows, name) for name in ("gate", "quest", "gate_offloaded")}
    print("break-even length:", {name: length and round(length) for name, length in even.items()})
    device, dtype = torch.device(options.device), str(options.dtype).removeprefix("torch.")
    said = vars(options) | {"dtype": dtype, "output": None, "first_token_seconds": seconds, "break_even": even}
    said |= {"transformers": version("transformers")}
    name = f"end_to_end-{device.type}-{dtype}" + f"-{options.threads}t" * (device.type == "cpu")
    print("saved", save(name, said, rows, options.output, device))


if __name__ == "__main__":
    main()
