"""Times and memory on GPUs, computed from shapes and from assumed rates. Nothing here was measured on a GPU.

    python benchmarks/estimates.py            # print the tables
    python benchmarks/estimates.py --write    # put them into docs/scale.md

`RATES` has the assumed rates, as shares of the data sheet or as operations per second; the rest follows from the shape
of Qwen3-8B in ``configs/architectures`` and from what the code launches and stores. To measure on a GPU, use
`benchmarks/gpu_check.py` or ``seergate plan``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/scale.md"
WIDTH, FLOAT32 = 2, 4
"""Bytes of a number: in decoding, for model, cache and gates (bfloat16), and in training, for gates (float32)."""


class Gpu(NamedTuple):
    """Memory in bytes and bandwidth in bytes per second, from the data sheet."""

    memory: float
    bandwidth: float


GPUS = {"H100": Gpu(80e9, 3.35e12), "H200": Gpu(141e9, 4.8e12)}
RATES = {
    "weights and attention of a decode step, share of the bandwidth": 0.85,
    "compressed keys and gates, share of the bandwidth": 0.6,
    "a launch in a CUDA graph, seconds": 2e-6,
    "products in bfloat16, FLOP/s": 580e12,
    "causal attention, FLOP/s": 330e12,
    "block maxima, FLOP/s": 350e12,
    "products in TF32, three for one of float32, FLOP/s": 25e12,
    "products in float32, FLOP/s": 45e12,
    "elementwise operations, bytes/s": 3e12,
    "integer operations, 1/s": 33e12,
}
"""Rates that an H100 is assumed to sustain."""

LAUNCHES = {"dense": 2, "gate": 5}
"""Launches per layer for attention in a vLLM step; `tests/serving/vllm/test_gpu_parts.py` checks that with a gate."""
BLOCK, BUDGET, FREE = 64, 4096, 0.9
"""Block size and budget in tokens, and the share of GPU memory that vLLM may use."""
PACK, BUDGETS, BITS = 32768, 3, 32
"""Tokens of a pack, number of recall budgets, and counting passes per search for the best blocks."""
QUERY_COPIES = 7.4
"""Intermediate results of the gate's query branch per output, in float32 (see `seergate.distill.memory`)."""
PLANS = (
    ("qwen3-8b", 1),
    ("llama-3.3-70b", 8),
    ("llama-3.3-70b", 16),
    ("qwen3-30b-a3b", 1),
    ("qwen3-30b-a3b", 8),
    ("qwen3-235b-a22b", 16),
    ("gpt-oss-20b", 8),
    ("gpt-oss-120b", 8),
    ("qwen3.5-9b", 8),
    ("qwen3.5-27b", 8),
)
"""Preset and number of processes of each plan."""


class Shape:
    """Weight counts of a preset's model (dense, with grouped queries and a gated MLP) and of its gates."""

    def __init__(self, name: str) -> None:
        architecture = json.loads((ROOT / f"configs/architectures/{name}.json").read_text(encoding="utf-8"))
        self.hidden, self.layers, self.mlp = (
            architecture[x] for x in ("hidden_size", "num_hidden_layers", "intermediate_size")
        )
        self.heads, self.kv_heads, self.dim = (
            architecture[x] for x in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.queries, self.keys = self.heads * self.dim, self.kv_heads * self.dim
        attention = 2 * self.hidden * (self.queries + self.keys)
        self.linear = self.layers * (attention + 3 * self.hidden * self.mlp)
        self.embedding = architecture["vocab_size"] * self.hidden
        # The linear maps of queries and of three poolings of keys, all of the head dimension.
        self.gates = self.layers * self.kv_heads * self.dim * self.dim * (self.heads // self.kv_heads + 3)
        self.cache = self.layers * 2 * self.keys * WIDTH
        """Bytes of keys and values per token."""
        self.compressed = self.layers * self.keys * WIDTH
        """Bytes of compressed keys per block."""


def decode_seconds(shape: Shape, gpu: Gpu, rows: int, context: int, *, gate: bool) -> float:
    """Seconds of a decode step with ``rows`` rows of equal length. Launches other than those of attention are ignored.

    A step reads the whole LM head, but only a few rows of the embedding.
    """
    fast = RATES["weights and attention of a decode step, share of the bandwidth"] * gpu.bandwidth
    slow = RATES["compressed keys and gates, share of the bandwidth"] * gpu.bandwidth
    read = WIDTH * (shape.linear + shape.embedding) + rows * shape.cache * (min(context, BUDGET) if gate else context)
    chosen = WIDTH * shape.gates + rows * shape.compressed * (context // BLOCK) if gate else 0
    launches = shape.layers * LAUNCHES["gate" if gate else "dense"]
    return read / fast + chosen / slow + launches * RATES["a launch in a CUDA graph, seconds"]


def most_rows(shape: Shape, gpu: Gpu, context: int) -> int:
    """Number of rows whose keys, values and compressed keys fit into memory in addition to the weights."""
    free = FREE * gpu.memory - WIDTH * (shape.linear + 2 * shape.embedding + shape.gates)
    return int(free / (context * shape.cache + context // BLOCK * shape.compressed))


def reading_table(shape: Shape) -> list[str]:
    """Table of the bytes of a decode step."""
    rows = (
        ("weights, bfloat16", f"{WIDTH * (shape.linear + shape.embedding) / 1e9:.1f} GB per step, whatever the batch"),
        (
            "keys and values of one token",
            f"{shape.layers} layers x 2 x {shape.kv_heads} heads x {shape.dim} x {WIDTH} bytes = {shape.cache:,}",
        ),
        (f"a row of {PACK:,} tokens, dense", f"{PACK * shape.cache / 1e9:.2f} GB"),
        (f"the same with a budget of {BUDGET:,}", f"{BUDGET * shape.cache / 1e9:.2f} GB"),
        (
            f"its compressed keys ({PACK // BLOCK} blocks of {BLOCK}, bfloat16 gates)",
            f"{PACK // BLOCK * shape.compressed / 1e9:.2f} GB",
        ),
        ("gates", f"{WIDTH * shape.gates / 1e9:.2f} GB per step"),
    )
    return table(("", "bytes"), rows)


def decode_table(shape: Shape) -> list[str]:
    """Table of milliseconds per step and tokens per second, by GPU, context and rows, up to the rows that fit."""
    rows = []
    for name, gpu in GPUS.items():
        for context in (8192, 32768, 131072):
            most = most_rows(shape, gpu, context)
            for many in sorted({1, *(n for n in (8, 32) if n < most), most}):
                dense, sparse = (decode_seconds(shape, gpu, many, context, gate=gate) for gate in (False, True))
                cells = (f"{1e3 * x:.1f} ms, {many / x:,.0f} tokens/s" for x in (dense, sparse))
                rows.append((name, f"{context // 1024}k", f"{many}", *cells, f"{dense / sparse:.1f}x"))
    return table(("GPU", "context", "rows", "dense", f"budget {BUDGET:,}", ""), rows)


def break_even_table(shape: Shape) -> list[str]:
    """Table of the context lengths above which a step with a gate is faster."""
    counts, rows = (1, 4, 8, 16, 32), []
    for name, gpu in GPUS.items():
        lengths = (
            next(
                context
                for context in range(BLOCK, 1 << 20, BLOCK)
                if decode_seconds(shape, gpu, many, context, gate=True)
                < decode_seconds(shape, gpu, many, context, gate=False)
            )
            for many in counts
        )
        rows.append((name, *(f"{context:,}" for context in lengths)))
    return table(("rows", *map(str, counts)), rows)


def pack_seconds(shape: Shape, samples: Sequence[int], block: int, row_start: float, stride: int) -> dict[str, float]:
    """Seconds of a pack of samples on an H100, by part; the first `FROZEN` parts belong to the frozen model."""
    tokens, counted = sum(samples), sum(len(range(int(n * row_start), n)) for n in samples) / stride
    seen = sum(n * n / 2 for n in samples)
    compared = sum((n * n - int(n * row_start) ** 2) / 2 for n in samples) / stride
    layers, stream = shape.layers, tokens * shape.hidden * WIDTH
    # Bytes read and written: each norm compiled into one kernel, likewise the MLP's activation and product; the
    # residuals; RoPE in five kernels, not compiled.
    norms = 2 * (2 * stream + tokens * (shape.queries + shape.keys) * WIDTH)
    mlp = 3 * tokens * shape.mlp * WIDTH
    rope = 10 * tokens * (shape.queries + shape.keys) * WIDTH
    elementwise = norms + mlp + 6 * stream + rope
    product = 2 * compared / block * shape.keys * 3 / RATES["products in TF32, three for one of float32, FLOP/s"]
    outputs = counted * shape.keys
    branch = counted * shape.queries * (WIDTH + 2 * FLOAT32) + 4 * QUERY_COPIES * outputs * FLOAT32
    maps = 2 * 2 * outputs * shape.queries / shape.kv_heads
    recall = BUDGETS * counted * shape.kv_heads * (tokens // block) * 2 * BITS
    per_layer = {
        "linear layers": 2 * shape.linear / layers * tokens / RATES["products in bfloat16, FLOP/s"],
        "norms, activations, residuals, RoPE": elementwise / RATES["elementwise operations, bytes/s"],
        "attention": 4 * shape.queries * seen / RATES["causal attention, FLOP/s"],
        "the teacher's block maxima": 2 * shape.queries * compared / RATES["block maxima, FLOP/s"],
        "the gate's logits and gradients": 4 * product,
        "recall at three budgets": recall / RATES["integer operations, 1/s"],
        "the gate's queries": branch / RATES["elementwise operations, bytes/s"]
        + maps / RATES["products in float32, FLOP/s"],
    }
    return {name: layers * seconds for name, seconds in per_layer.items()}


FROZEN = 3
"""Number of parts of `pack_seconds` that the frozen model needs without gates."""
PACKS = {f"{PACK // n} x {n // 1024}k": [n] * (PACK // n) for n in (4096, 8192, PACK)}


def pack_table(shape: Shape) -> list[str]:
    """Table of seconds per pack, by sample length: the paper's recipe by part, and the recommended recipe's sum."""
    columns = {name: pack_seconds(shape, samples, BLOCK, 0.5, 1) for name, samples in PACKS.items()}
    short = [pack_seconds(shape, samples, 16, 0.25, 8) for samples in PACKS.values()]
    parts = list(next(iter(columns.values())))
    rows = [(part, *(f"{column[part]:.2f}" for column in columns.values())) for part in parts]
    sums = ((sum(x.values()), sum(list(x.values())[:FROZEN])) for x in columns.values())
    rows.append(("**sum** (frozen model alone)", *(f"**{whole:.1f}** ({frozen:.1f})" for whole, frozen in sums)))
    rows.append(("sum with the recommended recipe", *(f"{sum(x.values()):.1f}" for x in short)))
    return table((f"seconds of a pack of {PACK:,} tokens", *columns), rows)


def plan_table(_: Shape) -> list[str]:
    """Table of the output of ``seergate plan --memory-gb 80`` for `PLANS`, at 300 TFLOP/s."""
    from seergate.distill import load_train_config
    from seergate.distill.estimate import make_plan

    rows = []
    for name, processes in PLANS:
        plan = make_plan(load_train_config(name), memory_gb=80, processes=processes, tflops=300)
        memory = plan.memory
        share = f"{memory.base / 1e9:.1f}"
        if plan.config.shard_base:
            share += f" of {(memory.base + memory.base_elsewhere) / 1e9:.1f}"
        if not plan.fits:
            raise ValueError(f"{name} in {processes} processes does not fit; it must have more of them")
        numbers = (f"{plan.total / 1e9:.1f}", share, f"{memory.gathered / 1e9:.1f}", f"{plan.step_seconds:.1f}")
        rows.append((f"`{name}`", f"{processes}", *numbers))
    return table(("preset", "processes", "GB", "frozen model", "layers", "seconds a step"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


TABLES: dict[str, Callable[[Shape], list[str]]] = {
    "reading": reading_table,
    "decode": decode_table,
    "break-even": break_even_table,
    "pack": pack_table,
    "plans": plan_table,
}


def filled(page: str) -> str:
    """The page with each table between its markers, ``<!-- estimate: NAME -->`` and ``<!-- end -->``.

    Raises:
        ValueError: unless the page has each of them once.
    """
    shape = Shape("qwen3-8b")
    for name, make in TABLES.items():
        begin = f"<!-- estimate: {name} -->"
        text = "\n".join([begin, "", *make(shape), "", "<!-- end -->"])
        page, places = re.subn(rf"{begin}.*?<!-- end -->", lambda _, text=text: text, page, flags=re.DOTALL)
        if places != 1:
            raise ValueError(f"the page has {places} places for {begin!r}; it must have one")
    return page


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    if parser.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, make in TABLES.items():
        print(f"\n{name}\n", *make(Shape("qwen3-8b")), sep="\n")
    print("\nNot measured on a GPU. Rates:", *(f"  {name}: {rate:g}" for name, rate in RATES.items()), sep="\n")


if __name__ == "__main__":
    main()
