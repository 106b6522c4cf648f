"""Distillation loss with gradients: `ops.gate_kl` against the data flow that materialises targets and logits.

    python benchmarks/distill.py --threads 1

The baseline is what one would write first, at its best: softmax per KV head, block maxima, then all targets ``[Hkv, T,
NB]`` and the gate's logits as whole tensors, KL by autograd. Extra memory is counted by torch's allocator.
"""

from __future__ import annotations

import argparse
import math

import torch
from common import save, timed
from torch import Tensor
from torch.nn import functional as F

from seergate import ops


def materialised(q: Tensor, k: Tensor, qg: Tensor, kg: Tensor, block_size: int) -> Tensor:
    """The same loss for one segment whose length is a multiple of the block size."""
    (length, heads, dim), kv_heads = q.shape, k.shape[1]
    group, blocks = heads // kv_heads, length // block_size
    with torch.no_grad():
        targets = torch.empty(kv_heads, length, blocks, device=q.device)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        for head in range(kv_heads):
            some = q[:, head * group : (head + 1) * group].transpose(0, 1).reshape(group * length, dim)
            scores = (some @ k[:, head].T).mul_(1 / math.sqrt(dim)).view(group, length, length)
            probs = scores.masked_fill_(future, -torch.inf).softmax(-1)
            targets[head] = probs.view(group, length, blocks, block_size).amax(-1).amax(0)
        past = torch.arange(blocks, device=q.device) < torch.arange(length, device=q.device)[:, None] // block_size
        targets.masked_fill_(~past, 0)
        targets /= targets.sum(-1, keepdim=True) + 1e-9
    logits = qg.transpose(0, 1) @ kg.permute(1, 2, 0) / math.sqrt(qg.shape[-1])
    log_pi = logits.masked_fill(~past, -1e20).log_softmax(-1)
    return F.kl_div(log_pi, targets, reduction="sum") / (kv_heads * (length - block_size))


def peak_bytes(run, device: torch.device) -> int:
    """Most bytes allocated at once during ``run()``, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    now = top = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


def measure(length: int, options: argparse.Namespace) -> dict[str, float | int]:
    """One segment of ``length`` tokens."""
    device = torch.device(options.device)
    heads, dim, size = options.kv_heads * options.group, options.head_dim, options.block_size
    q = torch.randn(length, heads, dim, device=device)
    k = torch.randn(length, options.kv_heads, dim, device=device)
    qg = torch.randn(length, options.kv_heads, dim, device=device, requires_grad=True)
    kg = torch.randn(length // size, options.kv_heads, dim, device=device, requires_grad=True)
    cu = torch.tensor([0, length], dtype=torch.int32)

    def fused() -> Tensor:
        loss, _ = ops.gate_kl(q, k, qg, kg, cu, size)
        torch.autograd.grad(loss, (qg, kg))
        return loss.detach()

    def baseline() -> Tensor:
        loss = materialised(q, k, qg, kg, size)
        torch.autograd.grad(loss, (qg, kg))
        return loss.detach()

    row: dict[str, float | int] = {"length": length}
    runs = {"gate_kl": fused}
    if length <= options.baseline_up_to:
        torch.testing.assert_close(fused(), baseline(), rtol=1e-4, atol=1e-6)  # time only what agrees
        runs["materialised"] = baseline
    for name, run in runs.items():
        row |= {f"{name}_{which}_ms": round(ms, 1) for which, ms in timed(run, options.repeats, device).items()}
        row[f"{name}_peak_mb"] = round(peak_bytes(run, device) / 1e6, 1)
    if "materialised" in runs:
        row["time_ratio"] = round(row["gate_kl_median_ms"] / row["materialised_median_ms"], 3)
        row["memory_ratio"] = round(row["gate_kl_peak_mb"] / row["materialised_peak_mb"], 4)
    return row


def main() -> None:
    """Parse the command line, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--baseline-up-to", type=int, default=8192, help="longest length to materialise")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for length in options.lengths:
        if length % options.block_size:
            parser.error(f"--lengths has {length}; each must be a multiple of --block-size ({options.block_size})")
        rows.append(measure(length, options))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    name = f"distill-{torch.device(options.device).type}-{options.threads}t"
    print("saved", save(name, torch.device(options.device), vars(options), rows))


if __name__ == "__main__":
    main()
