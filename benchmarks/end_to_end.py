"""Decoding in transformers' `generate`: tokens per second, memory and bytes read, compared with its own caches.

    python benchmarks/end_to_end.py                               # two layers of Qwen3-8B's attention on a CPU
    python benchmarks/end_to_end.py --threads 1 --lengths 16384 --batches 1

The model has random weights. Prefill of a long context would take hours on a CPU, so every cache is filled with the
same random keys and values. As many bytes are read as in a real run, but whether a block is selected again in the next
step is random, so an offloaded cache fetches more bytes than for a real text. Time to first token is measured on a
real, shorter prompt.

Before anything is timed, every way must decode the plain model's tokens with a budget that covers everything. The ways
take turns of a few tokens, so that other load on the machine slows all of them; times are medians over tokens, and
``ratios`` are ratios of medians. ``best_dense`` is the faster of transformers' two caches. At batch 1, ``ceiling`` is
its time divided by its time at a context as long as the budget: the upper bound of the speedup of any way that reads
the budget.
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
from common import arguments, parsed, random_model, resident, save
from torch import Tensor
from transformers import Cache, CompileConfig, DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

import seergate
from seergate import GateBank, GateConfig, methods
from seergate.cache.forward import CACHE, PROMPT, ForwardContext
from seergate.cache.layer import GatedLayer
from seergate.cache.offload import Offload
from seergate.decode.step import make_step
from seergate.eval.environment import version_of
from seergate.inference_mode import outside_inference_mode
from seergate.models.families import head_dim_of

SHORTER = (1.0, 0.875, 0.75, 0.5)
"""Lengths of a batch's rows as shares of the longest, in turn."""
SLOW_TOKENS, SLOW_ROUNDS = 3, 2
"""Tokens per round, and rounds, of the way that copies its cache at every token (``hf_dynamic``)."""
CHUNK = 2048
"""Tokens per call when a cache is filled."""


@dataclass
class Way:
    """One way to decode, with its measurements so far.

    Attributes:
        method: the decoding method; ``None`` for transformers without seergate.
        static: use transformers' static cache.
        compiled: compile the step, which needs a static cache.
        memory_share: share of keys and values kept in memory, with the others in a file; ``None`` keeps all.
        milliseconds: milliseconds of each token, per turn.
        growth: largest growth of the process in a turn, in bytes.
    """

    method: methods.Method | None = None
    static: bool = False
    compiled: bool = False
    memory_share: float | None = None
    offload: Offload | None = None
    cache: Cache | None = None
    ids: Tensor | None = None
    milliseconds: list[list[float]] = field(default_factory=list)
    growth: int = 0
    stats: dict[str, Any] = field(default_factory=dict)

    def attached(self, model: PreTrainedModel, **options: Any) -> Any:
        """Context manager that attaches the method to the model, if there is one."""
        if self.method is None:
            return nullcontext()
        return seergate.attached(model, self.method, storage=self.offload, **options)


class Clock(BaseStreamer):
    """Streamer that records when each token arrives."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, list[float]()

    def put(self, value: Tensor) -> None:
        """Record the time of one token of each row; the first call is for the prompt."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def ways(
    model: PreTrainedModel, options: argparse.Namespace, budget: int, bank: GateBank | None = None
) -> dict[str, Way]:
    """The ways that are compared, with random gates if ``bank`` is ``None``."""
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
    model: PreTrainedModel, ids: Tensor, mask: Tensor, new: int, cache: Cache | None = None, compiled: bool = False
) -> tuple[Tensor, list[float]]:
    """Generate ``new`` tokens; return all tokens and the milliseconds taken by each new one."""
    clock = Clock(ids.device)
    start = time.perf_counter()
    options: dict[str, Any] = {} if cache is None else {CACHE: cache}
    if compiled:
        options["compile_config"] = CompileConfig(mode="default", fullgraph=True, dynamic=False)
        options["compile_config"]._compile_all_devices = True  # else transformers compiles on GPUs only
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, streamer=clock, **options)
    times = [start, *clock.times[1:]]  # the first call is for the prompt
    return out, [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]


def answered(
    model: PreTrainedModel, way: Way, ids: Tensor, mask: Tensor, new: int, room: int
) -> tuple[Tensor, list[float]]:
    """`generate` in one way on an empty cache; an offloaded cache keeps ``room`` tokens in memory."""
    way.offload = room_for(model, room) if way.memory_share is not None else None
    cache = StaticCache(model.config, max_cache_len=ids.shape[1] + new) if way.static else None
    with way.attached(model):
        return generate(model, ids, mask, new, cache)


def prove(model: PreTrainedModel, options: argparse.Namespace) -> None:
    """Exit if a way with a budget that covers everything gives other tokens than the plain model."""
    ids = torch.randint(1, 1024, (2, 3 * options.block_size), device=options.device)
    mask = torch.ones_like(ids)
    mask[1, : options.block_size // 2] = 0
    want = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8)
    for name, way in ways(model, options, 8 * options.block_size).items():
        got, _ = answered(model, way, ids, mask, 8, room=2 * ids.numel() * 8)
        if not torch.equal(got, want):
            sys.exit(f"{name} with a budget for everything gives other tokens than the plain model")


def room_for(model: PreTrainedModel, tokens: int) -> Offload:
    """Offload that keeps the keys and values of ``tokens`` tokens in memory."""
    config = model.config
    per_layer = 2 * config.num_key_value_heads * head_dim_of(model) * model.dtype.itemsize
    return Offload(tokens * config.num_hidden_layers * per_layer)


def fill(model: PreTrainedModel, compared: dict[str, Way], mask: Tensor, room: int, budget: int) -> None:
    """Put the same random keys and values into every cache, as if after prefill of a prompt with this mask. Keys of
    layers with a sliding window are not rotated, which does not change a step's time.
    """
    config, (batch, length) = model.config, mask.shape
    shape = (batch, config.num_key_value_heads, length, head_dim_of(model))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for way in compared.values():
        way.cache = StaticCache(config, max_cache_len=length + room) if way.static else DynamicCache(config=config)
        way.ids = torch.ones(batch, length + 1, dtype=torch.long, device=mask.device)
        if way.memory_share is not None:
            tokens = max(way.memory_share * int(mask.sum()), 2 * batch * budget)  # twice the blocks of a step
            way.offload = room_for(model, int(tokens))
    for layer in range(config.num_hidden_layers):
        k_pre, values = (torch.randn(shape, device=mask.device, dtype=model.dtype) for _ in "kv")
        with seergate.attached(model, "dense") as handle:
            full = {binding.layer: place for place, binding in enumerate(handle.bindings)}
            keys = handle.bindings[full[layer]].spec.rotary.rotate(k_pre, positions) if layer in full else k_pre
        for way in compared.values():
            if way.method is None or layer not in full:
                way.cache.update(keys, values, layer)
                continue
            with way.attached(model) as handle:
                announce(handle.bindings[full[layer]].cache_layer(way.cache), k_pre, keys, values, mask)


@outside_inference_mode
def announce(layer: GatedLayer, k_pre: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> None:
    """Give keys and values to one layer of a cache as in prefill, a chunk at a time."""
    heads = layer.num_heads
    for begin in range(0, mask.shape[1], CHUNK):
        some = slice(begin, begin + CHUNK)
        valid = mask[:, some].bool()
        queries = keys.new_zeros(()).expand(len(keys), heads, valid.shape[1], keys.shape[3])  # unused in prefill
        context = ForwardContext(PROMPT, None if valid.all() else valid)
        context.take(queries, k_pre[:, :, some])
        layer.store(context, keys[:, :, some], values[:, :, some])
        layer.state.append(make_step(layer, context, queries, {}))


def turn(model: PreTrainedModel, name: str, way: Way, mask: Tensor, tokens: int) -> None:
    """Decode a few tokens in one way."""
    whole = torch.cat((mask, mask.new_ones(len(mask), way.ids.shape[1] - mask.shape[1])), dim=1)
    before = resident(reset_peak=True)
    with way.attached(model) as handle:
        way.ids, times = generate(model, way.ids, whole, tokens, way.cache, way.compiled)
        if handle is not None:
            way.stats = handle.stats()
    way.growth = max(way.growth, resident() - before)
    way.milliseconds.append(times[1:])  # the first time includes the set-up of `generate`


def bytes_of(way: Way) -> dict[str, float]:
    """Bytes held by the cache (mean and peak) and bytes read per step."""
    if way.stats:
        names = ("resident_bytes_mean", "resident_bytes_peak", "state_bytes", "bytes_read_per_step", "density")
        return {name: way.stats[name] for name in (*names, "bytes_fetched_per_step") if name in way.stats}
    bytes_held = sum(layer.keys.nbytes + layer.values.nbytes for layer in way.cache.layers)
    return dict.fromkeys(("resident_bytes_mean", "resident_bytes_peak", "bytes_read_per_step"), bytes_held)


def measure(model: PreTrainedModel, batch: int, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell of the grid."""
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
            **bytes_of(way),
        }
    ms = {name: way["token_median_ms"] for name, way in row["ways"].items()}
    theirs = ("hf_dynamic", "hf_static")
    ours = [name for name in ms if name not in theirs]
    row["best_dense"] = best = min(theirs, key=ms.__getitem__)
    row["ratios"] = {f"{name} over {other}": ms[other] / ms[name] for name in ours for other in theirs}
    row["speedup"] = {name: ms[best] / ms[name] for name in ours}
    return row


def add_ceilings(rows: list[dict[str, Any]], budget: int) -> None:
    """Add the upper bound of the speedup at batch 1, if a context as long as the budget was measured."""
    dense = {row["lengths"][0]: row["ways"][row["best_dense"]]["token_median_ms"] for row in rows if row["batch"] == 1}
    for row in rows:
        if row["batch"] == 1 and budget in dense:
            row["ceiling"] = dense[row["lengths"][0]] / dense[budget]


def first_token(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, float]:
    """Seconds from a prompt to its first token in each way, median of three runs."""
    ids = torch.randint(1, 1024, (1, options.prompt), device=options.device)
    seconds: dict[str, list[float]] = {}
    for _ in range(3):
        for name, way in ways(model, options, options.budget).items():
            _, times = answered(model, way, ids, torch.ones_like(ids), 1, room=2 * options.budget)
            seconds.setdefault(name, []).append(times[0] / 1e3)
    return {name: statistics.median(values) for name, values in seconds.items()}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add options of the model and of `ways`: by default two layers of Qwen3-8B's attention; block size and budget."""
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)


def command_line() -> argparse.Namespace:
    """Parse the options."""
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
    """Check, measure, print and save."""
    options = command_line()
    rows = []
    with torch.inference_mode():
        names = ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "dtype")
        model = random_model(**{name: getattr(options, name) for name in names}).to(options.device)
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
    device, dtype = torch.device(options.device), str(options.dtype).removeprefix("torch.")
    settings = vars(options) | {"dtype": dtype, "output": None, "first_token_seconds": seconds}
    settings |= {"transformers": version_of("transformers")}
    name = f"end_to_end-{device.type}-{dtype}" + f"-{options.threads}t" * (device.type == "cpu")
    print("saved", save(name, settings, rows, options.output, device))


if __name__ == "__main__":
    main()
