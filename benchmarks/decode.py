"""Decode attention of one token: block-sparse against the fastest dense kernel here, with the cost of selection.

    python benchmarks/decode.py                                  # the paper's grid on a GPU, a small one on a CPU
    python benchmarks/decode.py --threads 1 --group 4 --budgets 1024 2048 4096

Every kernel, ours and others', is compared with float64 before it is timed, and a wrong kernel of ours ends the run.
On a GPU, calls are captured in a CUDA graph and read their caches from several buffers in turn, so that neither Python
nor the L2 cache affects the times. The roofline is the bandwidth of summing a large array on this device.

Columns: ``sparse`` is attention alone, as in Figure 6 of SeerAttention-R; ``select`` is all work of a gate in a step
(query branch, block scores, selection); ``x`` is the speedup of ``sparse`` over the fastest dense kernel, ``x+select``
the speedup of ``sparse`` and ``select`` together.

A failure in a cell, such as out of memory, is recorded there, and the other cells are still measured. Results are
saved after every cell.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from common import TOLERANCE, arguments, exact_decode, parsed, read_bandwidth, relative, save, timed_rotated
from dense_baselines import Attention, available, first_line_of
from torch import Tensor

from seergate import GateConfig, ops
from seergate.gates.gate import AttnGate
from seergate.gates.geometry import ModelGeometry
from seergate.ops import reference

CACHE_BYTES = {"cuda": 256 << 20, "cpu": 128 << 20}
"""Minimum bytes of the rotated buffers together, several times the size of a processor's caches."""


class Caches:
    """Queries, as many KV caches as rotation needs, and compressed keys, for one batch size and length; ``budget`` is
    the smallest number of tokens that will be read from a cache.
    """

    def __init__(self, batch: int, length: int, budget: int, options: argparse.Namespace) -> None:
        device, dtype = torch.device(options.device), options.dtype
        kv_heads, dim = options.kv_heads, options.head_dim
        self.q = torch.randn(batch, kv_heads * options.group, dim, device=device, dtype=dtype)
        token = 2 * batch * kv_heads * dim * dtype.itemsize
        copies = min(64, max(1, math.ceil(CACHE_BYTES[device.type] / (token * budget))))
        copies = min(copies, max(1, int(options.max_gib * 2**30 // (token * length))))
        self.copies = [
            [torch.randn(batch, kv_heads, length, dim, device=device, dtype=dtype) for _ in "kv"]
            for _ in range(copies)
        ]
        self.lengths = torch.full((batch,), length, device=device)
        width, blocks = options.gate_dim, -(-length // options.block_size)
        frequencies = tuple((1e6 ** -(torch.arange(0, width, 2) / width)).tolist())
        shape = ModelGeometry("qwen3", self.q.shape[1], kv_heads, dim, (0,), frequencies)
        config = GateConfig(options.block_size, width)
        self.gates, self.kg = list[AttnGate](), list[Tensor]()
        while not self.gates or (len(self.gates) < 64 and self.gate_bytes < CACHE_BYTES[device.type]):
            self.gates.append(AttnGate(config, shape).to(device, dtype))
            self.kg.append(torch.randn(batch, kv_heads, blocks, width, device=device, dtype=dtype))

    @property
    def gate_bytes(self) -> int:
        """Bytes that a step reads for all gates: the weights of their query branches, and the compressed keys."""
        return len(self.gates) * (self.gates[0].q_proj.weight.nbytes + self.kg[0].nbytes)

    def scores(self, which: int) -> Tensor:
        """A gate's scores ``[B, Hkv, NB]``, computed from the model's queries."""
        return self.gates[which].step_scores(self.q, self.lengths, self.kg[which])


class Case:
    """One cell of the grid: the caches, and a token budget."""

    def __init__(self, caches: Caches, budget: int, block_size: int) -> None:
        self.caches, self.block_size = caches, block_size
        self.rule = {"block_size": block_size, "token_budget": max(budget, block_size)}
        self.indices = self.select().indices
        # Keys and values, queries and outputs, and the block indices.
        batch, kv_heads, length, dim = caches.copies[0][0].shape
        resident = min(self.indices.shape[-1] * block_size, length)
        self.bytes = 2 * batch * kv_heads * resident * dim * caches.q.element_size()
        self.bytes += 2 * caches.q.nbytes + 4 * self.indices.numel()

    def sparse(self, k: Tensor, v: Tensor) -> Tensor:
        """Block-sparse attention."""
        return ops.sparse_decode(self.caches.q, k, v, self.indices, self.caches.lengths, self.block_size)

    def select(self, which: int = 0) -> ops.Selection:
        """A gate's query branch, scores and selection."""
        return ops.select_blocks(self.caches.scores(which), self.caches.lengths, **self.rule)

    def error(self) -> float:
        """Relative error of the sparse kernel on the timed tensors, against float64; maximum over rows."""
        q, (k, v), lengths = self.caches.q, self.caches.copies[0], self.caches.lengths
        want = exact_decode(q, k, v, self.indices, lengths, self.block_size)
        off = (self.sparse(k, v).double() - want).flatten(1).norm(dim=1)
        return float((off / want.flatten(1).norm(dim=1)).max())


def gate(options: argparse.Namespace) -> None:
    """Exit if a kernel is wrong: small cases against the reference, with odd lengths, and NaN in unread memory."""
    device, dtype = torch.device(options.device), options.dtype
    heads, dim, block = options.kv_heads, options.head_dim, options.block_size
    lengths = torch.tensor([1, 5 * block + 3, 9 * block])
    capacity, budget = 10 * block, 4 * block
    q = torch.randn(3, heads * options.group, dim).to(dtype)
    k, v = (torch.randn(3, heads, capacity, dim).to(dtype) for _ in "kv")
    scores = torch.randn(3, heads, 10)
    for rule in ({"token_budget": budget}, {"threshold": 0.1}, {"top_p": 0.5}):
        got = ops.select_blocks(scores.to(device), lengths.to(device), block_size=block, **rule)
        want = reference.select_blocks(scores, lengths, block_size=block, **rule)
        width = want.indices.shape[-1]
        same = torch.equal(got.indices[..., :width].cpu(), want.indices) and torch.equal(got.counts.cpu(), want.counts)
        if not same:
            sys.exit(f"select_blocks with {rule} is wrong on {device}: nothing is timed")
    indices = reference.select_blocks(scores, lengths, block_size=block, token_budget=budget).indices
    exact = reference.sparse_decode(q.double(), k.double(), v.double(), indices, lengths, block)
    token = torch.arange(capacity)
    read = (token // block == indices[..., None]).any(2) & (token < lengths[:, None, None])
    k, v = (x.masked_fill(~read[..., None], math.nan).to(device) for x in (k, v))
    out = ops.sparse_decode(q.to(device), k, v, indices.to(device), lengths.to(device), block).cpu().double()
    error = relative(out, exact)
    if not error < TOLERANCE[dtype]:
        sys.exit(f"sparse_decode has a relative error of {error:.1e} on {device}: nothing is timed")


def measure_dense(
    caches: Caches, dense: dict[str, Attention], options: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Times in milliseconds of every dense kernel, and the errors of those that failed.

    Dense kernels read whole caches whatever the budget, so they are timed once per `Caches`.
    """
    device, whole = torch.device(options.device), 2 * caches.copies[0][0].nbytes
    enough = caches.copies[: max(1, math.ceil(CACHE_BYTES[device.type] / whole))]
    times, failed = {}, {}
    for name, build in dense.items():
        if name == "flex":
            torch.compiler.reset()  # above the limit of recompilations it silently runs uncompiled
        try:
            runs = [build(caches.q, k, v) for k, v in enough]
            times[name] = timed_rotated(runs, options.repeats, device, options.seconds)
        except Exception as problem:  # any error of a third-party package at these sizes
            failed[name] = first_line_of(problem)
        runs = []
        torch.cuda.empty_cache()  # so that after a failure the next attempt has enough memory
    return times, failed


def measure(
    case: Case, dense: dict[str, dict[str, float]], bandwidth: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Times in milliseconds, with those of the ``dense`` kernels, and the ratios that follow."""
    if not dense:
        raise RuntimeError("no dense kernel ran, so there is nothing to compare with")
    error = case.error()
    if not error < TOLERANCE[options.dtype]:
        sys.exit(f"sparse_decode has a relative error of {error:.1e} on the tensors to be timed")
    device, copies = torch.device(options.device), case.caches.copies
    best = min(dense, key=lambda name: dense[name]["median"])
    limits = (options.repeats, device, options.seconds)
    times = dense | {
        "sparse": timed_rotated([partial(case.sparse, *each) for each in copies], *limits),
        "select": timed_rotated([partial(case.select, which) for which in range(len(case.caches.gates))], *limits),
    }
    ms = {name: both["median"] for name, both in times.items()}
    return {
        **{f"{name}_{which}_ms": round(value, 5) for name, both in times.items() for which, value in both.items()},
        "best_dense": best,
        "roofline_ms": round(case.bytes / bandwidth * 1e3, 5),
        "roofline_fraction": float(f"{case.bytes / bandwidth * 1e3 / ms['sparse']:.3g}"),
        "speedup": round(ms[best] / ms["sparse"], 2),
        "speedup_with_select": round(ms[best] / (ms["sparse"] + ms["select"]), 2),
        "speedup_over_stock": round(ms["sdpa_stock"] / ms["sparse"], 2) if "sdpa_stock" in ms else None,
        "select_share": round(ms["select"] / ms["sparse"], 3),
        "relative_error": error,
        "buffers": len(copies),
    }


def command_line() -> argparse.Namespace:
    """Parse the options; defaults of the grid depend on the device."""
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 4 8 16, on a CPU 1")
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 8k 32k 64k 128k, on a CPU 8k 16k 32k")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.8, 0.9])
    parser.add_argument("--budgets", type=int, nargs="+", help="tokens to read, instead of sparsities")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--gate-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16, on a CPU float32"
    )
    parser.add_argument("--repeats", type=int, default=15, help="at most, of each measurement")
    parser.add_argument("--seconds", type=float, default=1.5, help="on a CPU, a measurement stops after these")
    parser.add_argument("--max-gib", type=float, help="for the caches of one cell; default: 32, on a CPU 4")
    options = parsed(parser)
    on_gpu = torch.device(options.device).type == "cuda"
    options.batches = options.batches or ([1, 4, 8, 16] if on_gpu else [1])
    options.lengths = options.lengths or ([8192, 32768, 65536, 131072] if on_gpu else [8192, 16384, 32768])
    options.max_gib = options.max_gib or (32.0 if on_gpu else 4.0)
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    return options


def cells(
    batch: int,
    length: int,
    budgets: dict[str, int],
    dense: dict[str, Attention],
    bandwidth: float,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Rows of one batch size and length, one per entry of ``budgets``. ``failed`` has the errors of kernels."""
    caches, dense_times, failed = None, {}, {}
    try:
        caches = Caches(batch, length, min(budgets.values()), options)
        dense_times, failed = measure_dense(caches, dense, options)
    except Exception as problem:  # out of memory for these caches
        failed = {"cell": first_line_of(problem)}
    for series, budget in budgets.items():
        row = {"batch": batch, "length": length, "budget": budget, "series": series}
        row |= {"sparsity": round(max(0.0, 1 - budget / length), 3), "failed": dict(failed)}
        if caches is not None:
            try:
                row |= measure(Case(caches, budget, options.block_size), dense_times, bandwidth, options)
            except Exception as problem:
                row["failed"]["cell"] = first_line_of(problem)
        yield row


def show(row: dict[str, Any]) -> None:
    """Print a row and its failures."""
    start = f"{row['batch']:5} {row['length']:6} {row['sparsity']:9.2f} "
    if "speedup" in row:
        us = {name: 1e3 * row[f"{name}_median_ms"] for name in (row["best_dense"], "sparse", "select")}
        print(
            f"{start}{us[row['best_dense']]:10.1f} {row['best_dense']:16}{us['sparse']:11.1f} {us['select']:10.1f} "
            f"{row['roofline_fraction']:9.2f} {row['speedup']:5.1f} {row['speedup_with_select']:9.1f}",
            flush=True,
        )
    for name, reason in row["failed"].items():
        print(f"{start}{name} failed: {reason}", flush=True)


def main() -> None:
    """Check, measure, print and save."""
    options = command_line()
    device = torch.device(options.device)
    torch.manual_seed(0)
    dtype = str(options.dtype).removeprefix("torch.")
    name = f"decode-{device.type}-{dtype}-g{options.group}" + f"-{options.threads}t" * (device.type == "cpu")
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        gate(options)
        q = torch.randn(2, options.kv_heads * options.group, options.head_dim, device=device, dtype=options.dtype)
        k, v = torch.randn(2, 2, options.kv_heads, 1024, options.head_dim, device=device, dtype=options.dtype)
        dense, left_out = available(q, k, v, TOLERANCE[options.dtype])
        for baseline, reason in left_out.items():
            print(f"dense baseline {baseline} is left out: {reason}")
        bandwidth = read_bandwidth(device, options.repeats)
        facts = vars(options) | {"dtype": dtype, "output": None, "bandwidth": bandwidth, "left_out": left_out}
        print(f"memory bandwidth, reading: {bandwidth / 1e9:.1f} GB/s")
        print("batch length  sparsity   dense us (which)           sparse us  select us  roofline     x  x+select")
        for batch, length in itertools.product(options.batches, options.lengths):
            token_counts = {f"sparsity {s:g}": math.ceil(length * (1 - s)) for s in options.sparsities}
            if options.budgets:
                token_counts = {f"budget {n}": min(n, length) for n in options.budgets}
            block = options.block_size
            budgets = {series: max(1, math.ceil(tokens / block)) * block for series, tokens in token_counts.items()}
            for row in cells(batch, length, budgets, dense, bandwidth, options):
                rows.append(row)
                show(row)
                path = save(name, facts, rows, options.output, device)
            torch.cuda.empty_cache()
    print("saved", path)


if __name__ == "__main__":
    main()
