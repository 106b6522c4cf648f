"""Decode attention of one token: dense (two ways) against block-sparse, with the cost of selecting.

    python benchmarks/decode.py --threads 1

The two dense baselines are what a user has: the stock call with grouped queries, and the same with the group folded
into the query axis, which reads keys and values once. Ratios are against the faster of the two.
"""

from __future__ import annotations

import argparse

import torch
from common import save, timed
from torch.nn import functional as F

from seergate import ops


def measure(length: int, budget: int, options: argparse.Namespace) -> dict[str, float | int]:
    """One context length and token budget."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    batch, kv_heads, group, dim = options.batch, options.kv_heads, options.group, options.head_dim
    q = torch.randn(batch, kv_heads * group, dim, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, length, dim, device=device, dtype=dtype)
    blocks = -(-length // options.block_size)
    scores = torch.randn(batch, kv_heads, blocks, device=device)
    lengths = torch.full((batch,), length, device=device)
    qg = torch.randn(batch, kv_heads, 1, dim, device=device)
    kg = torch.randn(batch, kv_heads, blocks, dim, device=device)
    rule = {"block_size": options.block_size, "token_budget": budget}
    indices = ops.select_blocks(scores, lengths, **rule).indices
    runs = {
        "dense_stock": lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True),
        "dense_packed": lambda: F.scaled_dot_product_attention(q.view(batch, kv_heads, group, dim), k, v),
        "sparse": lambda: ops.sparse_decode(q, k, v, indices, lengths, options.block_size),
        "score_and_select": lambda: ops.select_blocks((qg @ kg.transpose(2, 3))[:, :, 0], lengths, **rule),
    }
    times = {name: timed(run, options.repeats, device) for name, run in runs.items()}
    row: dict[str, float | int] = {"length": length, "budget": budget}
    row |= {f"{name}_{which}_ms": round(ms, 4) for name, both in times.items() for which, ms in both.items()}
    dense = min(times["dense_stock"]["median"], times["dense_packed"]["median"])
    row["speedup_over_best_dense"] = round(dense / times["sparse"]["median"], 2)
    row["speedup_over_stock"] = round(times["dense_stock"]["median"] / times["sparse"]["median"], 2)
    row["select_share"] = round(times["score_and_select"]["median"] / times["sparse"]["median"], 3)
    return row


def main() -> None:
    """Parse the command line, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    print(f"{'length':>8} {'budget':>7} {'stock':>9} {'packed':>9} {'sparse':>9} {'select':>8}   ms; x best, x stock")
    with torch.inference_mode():
        for length in options.lengths:
            for budget in options.budgets:
                row = measure(length, budget, options)
                rows.append(row)
                ms = [
                    row[f"{name}_median_ms"] for name in ("dense_stock", "dense_packed", "sparse", "score_and_select")
                ]
                print(
                    f"{length:8} {budget:7} {ms[0]:9.3f} {ms[1]:9.3f} {ms[2]:9.3f} {ms[3]:8.3f}   "
                    f"{row['speedup_over_best_dense']:.1f}x {row['speedup_over_stock']:.1f}x"
                )
    name = f"decode-{torch.device(options.device).type}-{options.dtype}-{options.threads}t"
    print("saved", save(name, torch.device(options.device), vars(options), rows))


if __name__ == "__main__":
    main()
