"""Sparse decode attention on a CPU: gathering the selected blocks, or compiled FlexAttention that skips the others.

    python benchmarks/flex_decode.py --threads 1

Columns: ``gather`` is `seergate.ops.sparse_decode`; ``flex`` the compiled kernel alone, with its block mask at hand;
``flex_with_mask`` with the mask made from the selection, as every step needs it; ``compile_seconds`` what the first
call of a process takes for each length of the cache. seergate gathers: see docs/decode-engine.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save, timed_rotated
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from seergate import ops


def block_mask(indices_BKX: Tensor, blocks: int, group: int, block_size: int) -> BlockMask:
    """FlexAttention's form of a selection in which every block is full."""
    batch, heads, chosen = indices_BKX.shape
    none = torch.zeros(batch, heads, 1, dtype=torch.int32)
    nowhere = torch.zeros(batch, heads, 1, blocks, dtype=torch.int32)
    places = torch.nn.functional.pad(indices_BKX[:, :, None].int(), (0, blocks - chosen))
    count = torch.full_like(none, chosen)
    return BlockMask.from_kv_blocks(
        *(none, nowhere, count, places),
        BLOCK_SIZE=(group, block_size),
        seq_lengths=(group, blocks * block_size),
        compute_q_blocks=False,  # only a backward pass needs them
    )


def measure(length: int, budget: int, options: argparse.Namespace) -> dict[str, Any]:
    """One length of the cache, in rotation over several selections so that no block is found in a cache."""
    heads, group, dim, size = options.kv_heads, options.group, options.head_dim, options.block_size
    blocks, chosen = length // size, budget // size
    k, v = torch.randn(2, 1, heads, length, dim)
    q = torch.randn(1, heads, group, dim)
    lengths = torch.tensor([length])
    picks = [
        torch.stack([torch.randperm(blocks)[:chosen].sort().values for _ in range(heads)])[None] for _ in range(8)
    ]
    masks = [block_mask(pick, blocks, group, size) for pick in picks]
    compiled = torch.compile(flex_attention, dynamic=False)
    start = time.perf_counter()
    compiled(q, k, v, block_mask=masks[0])
    row: dict[str, Any] = {"length": length, "budget": budget, "compile_seconds": time.perf_counter() - start}
    row["largest_difference"] = max(
        float((compiled(q, k, v, block_mask=mask) - gather(q, k, v, pick, lengths, size)).abs().max())
        for mask, pick in zip(masks, picks, strict=True)
    )
    if row["largest_difference"] > 1e-5:
        raise SystemExit(f"the two differ by {row['largest_difference']}")
    ways = {
        "gather": [lambda pick=pick: gather(q, k, v, pick, lengths, size) for pick in picks],
        "flex": [lambda mask=mask: compiled(q, k, v, block_mask=mask) for mask in masks],
        "flex_with_mask": [
            lambda pick=pick: compiled(q, k, v, block_mask=block_mask(pick, blocks, group, size)) for pick in picks
        ],
    }
    for name, runs in ways.items():
        row |= {f"{name}_{kind}_ms": ms for kind, ms in timed_rotated(runs, options.repeats, k.device).items()}
    for name in ("flex", "flex_with_mask"):
        row[f"gather over {name}"] = row[f"{name}_median_ms"] / row["gather_median_ms"]
    return row


def gather(q: Tensor, k: Tensor, v: Tensor, pick: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Our own kernel, in FlexAttention's layout."""
    return ops.sparse_decode(q.flatten(1, 2), k, v, pick, lengths, size).view_as(q)


def main() -> None:
    """Compare, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    with torch.inference_mode():
        for length in options.lengths:
            for budget in options.budgets:
                row = measure(length, budget, options)
                rows.append(row)
                shown = {name: round(value, 2) for name, value in row.items() if name.endswith("median_ms")}
                print(length, budget, shown, f"compiled in {row['compile_seconds']:.0f} s", flush=True)
    name = f"flex_decode-cpu-float32-{options.threads}t"
    print("saved", save(name, torch.device("cpu"), vars(options) | {"output": None}, rows, options.output))


if __name__ == "__main__":
    main()
