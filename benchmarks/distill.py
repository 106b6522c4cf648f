"""The gate's loss with gradients, and attention with block targets, against a baseline that materialises both.

    python benchmarks/distill.py                                 # 8k to 128k on a GPU, 4k to 16k on a CPU
    python benchmarks/distill.py --threads 1 --block-sizes 16

Results are checked before they are timed: irregular packs against the reference in float64, then the last rows of the
timed tensors against float64. A wrong result ends the run.

The baseline keeps the same tensors as the published training code: attention pooled to blocks for every query head
``[H, T, NB]``, its maximum over each group, the gate's logits and their log-softmax; autograd differentiates the loss.
(The published code pools attention in a kernel. The baseline pools chunks of rows, so that scores do not add to its
peak.) Compare its memory; its time is that of eager PyTorch operations. Extra memory is measured by torch's
allocator in a first call, which is not timed. Then all take turns, and times are medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import TOLERANCE, arguments, described, parsed, peak_bytes, relative, save, shown, timed_in_turns
from torch import Tensor
from torch.nn import functional as F

from seergate import ops
from seergate.ops import reference
from seergate.ops.backend import choose

CHUNK_CPU, CHUNK_DEVICE = 2**20, 2**25
"""Scores that the baseline holds at a time: few compared with what it keeps, but enough to fill the device."""
PROVEN_ROWS = 16
"""Number of last rows, which attend to the whole pack, that are checked in float64."""


class Case:
    """One pack of one segment."""

    def __init__(self, length: int, block_size: int, options: argparse.Namespace) -> None:
        self.length, self.block_size, device = length, block_size, torch.device(options.device)
        heads, kv_heads, dim = options.kv_heads * options.group, options.kv_heads, options.head_dim

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=options.dtype)

        self.q, self.k, self.v = randn(length, heads, dim), randn(length, kv_heads, dim), randn(length, kv_heads, dim)
        self.qg = randn(length, kv_heads, options.gate_dim).requires_grad_()
        self.kg = randn(-(-length // self.block_size), kv_heads, options.gate_dim).requires_grad_()
        self.cu = torch.tensor([0, length], dtype=torch.int32)
        # Matrix products: queries with keys (causal half), the gate's logits, and its two gradients.
        cells = length * len(self.kg) / 2
        self.flops = length * length * heads * dim + 3 * 2 * cells * kv_heads * options.gate_dim

    def gate_kl(self, lse: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradients."""
        loss, _ = ops.gate_kl(self.q, self.k, self.qg, self.kg, self.cu, self.block_size, lse=lse, **options)
        return loss.detach(), *torch.autograd.grad(loss, (self.qg, self.kg))

    def attention(self) -> ops.AttentionWithTargets:
        """Attention with block targets: output, log-sum-exp and targets."""
        return ops.attention_with_block_targets(self.q, self.k, self.v, self.cu, self.block_size)

    def plain_attention(self) -> Tensor:
        """PyTorch's attention, which computes the output only."""
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    def errors(self) -> dict[str, float]:
        """Relative errors of loss and gradients of the last rows, against float64."""
        (length, heads, dim), (blocks, kv_heads, _) = self.q.shape, self.kg.shape
        begin = int(length * (1 - PROVEN_ROWS / length))
        loss, dqg, dkg = self.gate_kl(row_start=1 - PROVEN_ROWS / length)
        own = torch.arange(begin, length, device=self.q.device) // self.block_size
        past = torch.arange(blocks, device=self.q.device) < own[:, None]
        future = (
            torch.arange(length, device=self.q.device) > torch.arange(begin, length, device=self.q.device)[:, None]
        )
        total = torch.zeros((), dtype=torch.float64, device=self.q.device)
        qg, kg = (
            x.detach()[rows].double().requires_grad_()
            for x, rows in ((self.qg, slice(begin, None)), (self.kg, slice(None)))
        )
        for g in range(kv_heads):
            some = slice(g * heads // kv_heads, (g + 1) * heads // kv_heads)
            scores = self.q[begin:, some].double().transpose(0, 1) @ self.k[:, g].double().T / math.sqrt(dim)
            log_probs = scores.masked_fill(future, -math.inf).log_softmax(-1)
            padded = F.pad(log_probs, (0, blocks * self.block_size - length), value=-math.inf)
            u = padded.unflatten(-1, (blocks, -1)).amax(-1).amax(0).masked_fill(~past, -math.inf)
            log_p = u.log_softmax(-1).masked_fill(~past, 0.0)
            logits = (qg[:, g] @ kg[:, g].T / math.sqrt(qg.shape[-1])).masked_fill(~past, -math.inf)
            log_pi = logits.log_softmax(-1).masked_fill(~past, 0.0)
            total = total + (log_p.exp().masked_fill(~past, 0.0) * (log_p - log_pi)).sum()
        want = total / (kv_heads * (length - begin))
        want_dqg, want_dkg = torch.autograd.grad(want, (qg, kg))
        pairs = {"loss": (loss, want), "dqg": (dqg[begin:], want_dqg), "dkg": (dkg, want_dkg)}
        return {name: relative(got, exact) for name, (got, exact) in pairs.items()}


def prove(block: int, options: argparse.Namespace) -> None:
    """Exit if a kernel is wrong: irregular packs with empty segments against the reference."""
    device, dtype = torch.device(options.device), options.dtype
    lengths = [2 * block + 5, 0, 1, block, block + 1, 3 * block - 1]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    kv_heads, tokens, blocks = 2, sum(lengths), sum(-(-length // block) for length in lengths)
    shapes = {
        "q": (tokens, kv_heads * options.group, options.head_dim),
        "k": (tokens, kv_heads, options.head_dim),
        "v": (tokens, kv_heads, options.head_dim),
        "qg": (tokens, kv_heads, options.gate_dim),
        "kg": (blocks, kv_heads, options.gate_dim),
    }
    here = {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}
    exact = {name: x.cpu().double() for name, x in here.items()}
    for x in (here["qg"], here["kg"], exact["qg"], exact["kg"]):
        x.requires_grad_()
    rules = {"row_start": 0.25, "recall_budgets": (2 * block, 3 * block)}
    compared: dict[str, tuple[Tensor, Tensor]] = {}
    attention = ops.attention_with_block_targets(here["q"], here["k"], here["v"], cu, block)
    want_attention = reference.attention_with_block_targets(exact["q"], exact["k"], exact["v"], cu, block)
    past = want_attention.log_targets > -math.inf
    compared["output"] = attention.output.cpu(), want_attention.output
    compared["lse"] = attention.lse.cpu(), want_attention.lse
    compared["log_targets"] = attention.log_targets.cpu()[past], want_attention.log_targets[past]
    for name, lse in (("", None), (" with lse", attention.lse)):
        loss, stats = ops.gate_kl(*(here[x] for x in ("q", "k", "qg", "kg")), cu, block, lse=lse, **rules)
        want_loss, want_stats = reference.gate_kl(*(exact[x] for x in ("q", "k", "qg", "kg")), cu, block, **rules)
        grads = torch.autograd.grad(loss, (here["qg"], here["kg"]))
        want_grads = torch.autograd.grad(want_loss, (exact["qg"], exact["kg"]))
        compared[f"loss{name}"] = loss.detach().cpu(), want_loss
        compared[f"recall{name}"] = stats.recall.cpu(), want_stats.recall
        for which, got, want in zip(("dqg", "dkg"), grads, want_grads, strict=True):
            compared[f"{which}{name}"] = got.cpu(), want
    for name, (got, want) in compared.items():
        error = relative(got, want)
        if not error < TOLERANCE[dtype]:
            sys.exit(f"{name} has a relative error of {error:.1e} on {device}: nothing is timed")


def materialised(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of one segment by `materialised_loss`."""
    loss = materialised_loss(case.q, case.k, case.qg, case.kg, case.block_size)
    return loss.detach(), *torch.autograd.grad(loss, (case.qg, case.kg))


def materialised_loss(q: Tensor, k: Tensor, qg: Tensor, kg: Tensor, size: int, begin: int = 0) -> Tensor:
    """Loss of one segment, with pooled attention and logits as whole tensors in the inputs' dtype.

    Args:
        q, k: ``[length, heads, dim]``, ``[length, KV heads, dim]``.
        qg, kg: the gate's queries ``[length, KV heads, E]`` and keys ``[blocks, KV heads, E]``.
        size: tokens per block.
        begin: first row that counts.
    """
    (length, heads, dim), kv_heads, blocks = q.shape, k.shape[1], len(kg)
    with torch.no_grad():
        pooled = torch.empty(heads, length, blocks, device=q.device, dtype=q.dtype)
        rows = max(1, (CHUNK_CPU if q.device.type == "cpu" else CHUNK_DEVICE) // length)
        for head in range(heads):
            keys = k[:, head * kv_heads // heads]
            for first in range(0, length, rows):
                end = min(length, first + rows)
                scores = (q[first:end, head] @ keys[:end].T).float() / math.sqrt(dim)
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(first + 1), -math.inf)
                probs = F.pad(scores.softmax(-1), (0, blocks * size - end))
                pooled[head, first:end] = probs.view(end - first, blocks, size).amax(-1)
        targets = pooled.view(kv_heads, -1, length, blocks).amax(1)
        past = torch.arange(blocks, device=q.device) < torch.arange(length, device=q.device)[:, None] // size
        targets = targets.masked_fill(~past, 0)
        targets = (targets / (targets.sum(-1, keepdim=True) + 1e-9))[:, begin:]
    logits = qg[begin:].transpose(0, 1) @ kg.permute(1, 2, 0) / math.sqrt(qg.shape[-1])
    log_pi = logits.masked_fill(~past[begin:], -1e4 if q.dtype == torch.float16 else -1e20).log_softmax(-1)
    return F.kl_div(log_pi.float(), targets.float(), reduction="sum") / (kv_heads * (length - max(begin, size)))


def measure(length: int, block_size: int, options: argparse.Namespace) -> dict[str, float | int]:
    """Measure a pack of one segment; exit if a result is wrong on its tensors."""
    case, device = Case(length, block_size, options), torch.device(options.device)
    row: dict[str, float | int] = {"length": length, "block_size": block_size}
    for name, error in case.errors().items():
        if not error < TOLERANCE[options.dtype]:
            sys.exit(f"{name} has a relative error of {error:.1e} on the tensors to be timed")
        row[f"{name}_error"] = error
    lse = torch.empty(case.q.shape[:2], device=device, dtype=torch.float32)
    runs: dict[str, Callable[[], Any]] = {
        "attention_with_block_targets": case.attention,
        "gate_kl": case.gate_kl,
        "gate_kl_given_lse": lambda: case.gate_kl(lse),
        "plain_attention": case.plain_attention,
    }
    if length <= options.baseline_up_to:
        runs["materialised"] = lambda: materialised(case)
    losses = {}
    for name, run in runs.items():
        results: list[Any] = []
        peak = peak_bytes(lambda: results.append(run()), device)  # noqa: B023 (called at once)
        row[f"{name}_peak_mb"] = round(peak / 1e6, 1)
        if name == "attention_with_block_targets":
            lse.copy_(results[0].lse)
        losses[name] = results.pop()[0].clone()
    for name, ms in timed_in_turns(runs, options.rounds, device).items():
        row |= {f"{name}_{which}_ms": round(value, 2) for which, value in ms.items()}
    row["gate_kl_tflops"] = round(case.flops / row["gate_kl_median_ms"] / 1e9, 3)
    row["given_lse_ratio"] = round(row["gate_kl_given_lse_median_ms"] / row["gate_kl_median_ms"], 3)
    if "materialised" in runs:
        row["materialised_loss_error"] = relative(losses["materialised"], losses["gate_kl"])
        row["time_ratio"] = round(row["gate_kl_median_ms"] / row["materialised_median_ms"], 3)
        row["memory_ratio"] = round(row["gate_kl_peak_mb"] / row["materialised_peak_mb"], 4)
    return row


def command_line() -> argparse.Namespace:
    """Parse the options; defaults depend on the device."""
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 8k 32k 64k 128k, on a CPU 4k 8k 16k")
    parser.add_argument("--baseline-up-to", type=int, help="longest length to materialise; default: 32k, on a CPU 16k")
    parser.add_argument("--kv-heads", type=int, help="default: 8, on a CPU, which takes them one by one, 2")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--gate-dim", type=int, default=128)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16, on a CPU float32"
    )
    parser.add_argument("--rounds", type=int, help="in which each takes its turn; default: 10, on a CPU 3")
    parser.add_argument("--only-prove", action="store_true", help="compare with the reference, time nothing")
    options = parsed(parser)
    gpu = torch.device(options.device).type == "cuda"
    options.lengths = options.lengths or ([8192, 32768, 65536, 131072] if gpu else [4096, 8192, 16384])
    options.baseline_up_to = options.baseline_up_to or (32768 if gpu else 16384)
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if gpu else "float32"))
    options.rounds = options.rounds or (10 if gpu else 3)
    options.kv_heads = options.kv_heads or (8 if gpu else 2)
    if min(options.lengths) < 2 * max(options.block_sizes):
        parser.error(f"--lengths has {min(options.lengths)}; each must be at least two blocks")
    return options


def main() -> None:
    """Check, measure, print and save."""
    options = command_line()
    torch.manual_seed(0)
    for block_size in options.block_sizes:
        prove(block_size, options)
    print("proven")
    if options.only_prove:
        return
    rows = []
    for length, block_size in itertools.product(options.lengths, options.block_sizes):
        rows.append(measure(length, block_size, options))
        print(shown(rows[-1]), flush=True)
    device = torch.device(options.device)
    name = f"distill-{device.type}-{str(options.dtype).removeprefix('torch.')}"
    name += f"-{options.threads}t" * (device.type == "cpu")
    settings = described(options, "only_prove") | {"dtype": str(options.dtype), "backend": choose(device)}
    print("saved", save(name, settings, rows, options.output, device))


if __name__ == "__main__":
    main()
