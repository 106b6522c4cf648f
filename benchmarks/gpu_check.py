"""Checks that every kernel is right on this GPU, and how close to its limits. At most ten minutes on an H100.

    python benchmarks/gpu_check.py                       # everything; needs torch, triton and transformers only
    python benchmarks/gpu_check.py --only right large    # some steps
    python benchmarks/gpu_check.py --list

The cheapest steps come first. Each runs in its own process with a deadline, so that a kernel that hangs or crashes the
device does not stop the other steps. The JSON is saved after each step. The verdict at the end has a line per kernel:
right or wrong, its fraction of the roofline as it ships, and its speedup over other libraries' kernels where they
exist.

Without a GPU, the same steps run with tiny shapes in Triton's interpreter: this tests the script, and its times are
meaningless. Exits with 1 if a kernel is wrong or a step did not end well.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    exact_decode,
    peak_bytes,
    provenance,
    random_model,
    read_bandwidth,
    relative,
    timed,
    timed_rotated,
)
from torch import Tensor

from seergate import ops
from seergate.ops import reference

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Triton's interpreter has a bug in bfloat16 matrix products.
NARROW, NARROW_LIMIT = (torch.bfloat16, 2e-2) if ON_GPU else (torch.float16, 4e-3)
Row = dict[str, Any]


def sizes(full: Any, tiny: Any) -> Any:
    """Return ``full`` on a GPU, ``tiny`` in the interpreter."""
    return full if ON_GPU else tiny


EIGHT_B: Row = {"hidden_size": 4096, "intermediate_size": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128}
EIGHT_B |= {"vocabulary": 32768, "initializer_range": 0.02, "dtype": NARROW}
"""Qwen3-8B's shape, with a smaller vocabulary."""
LESSON_BYTES = 0.7e9
"""Limit of the extra memory for training one layer's gate at 32k tokens, in bytes."""

KL_LIMIT = 5e-3
"""Limit of the relative error of a step's KL on the GPU in bfloat16, against float32 on the CPU: six times the effect
of bfloat16 on the CPU (8e-4), and less than that of a learning rate 2 % off (7e-3) or of another seed (5e-2)."""


def randn(*shape: int, dtype: torch.dtype = NARROW) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def compared(kernel: str, case: str, got: Tensor, want: Tensor, limit: float) -> Row:
    """Row with the relative error of a result. A limit of 0 requires equality."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    error = relative(got, want)
    right = torch.equal(got, want) if limit == 0 else error < limit  # false for NaN
    return {"kernel": kernel, "case": case, "error": error, "limit": limit, "right": right}


# ------------------------------------------------------------------------------------------------------- the steps


def read_rate() -> float:
    """Bytes per second, the roofline of kernels that mostly read. An arbitrary number in the interpreter."""
    return read_bandwidth(DEVICE, 5) if ON_GPU else 1e9


def product_rate() -> float:
    """FLOP/s of PyTorch's product of large matrices: the roofline of kernels that mostly multiply."""
    side = sizes(8192, 64)
    a, b = randn(side, side), randn(side, side)
    return 2 * side**3 / timed_rotated([lambda: a @ b], 10, DEVICE)["min"] * 1e3


def machine() -> Iterator[Row]:
    """The GPU's rates of reading, copying and multiplying: the rooflines of the later steps."""
    yield {"gpu": torch.cuda.get_device_name() if ON_GPU else None, "read_bytes_per_second": read_rate()}
    yield {"flops_per_second": product_rate()}
    x = torch.empty(sizes(2**30, 2**16), dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    yield {"copy_bytes_per_second": 2 * x.numel() / timed_rotated([lambda: y.copy_(x)], 10, DEVICE)["min"] * 1e3}


def right() -> Iterator[Row]:
    """Compare every op with float64, with NaN in all memory that must not be read."""
    yield from right_decode()
    yield from right_scores()
    yield from right_select()
    yield from right_keys()
    yield from right_attention()
    yield from right_teacher()


def right_decode() -> Iterator[Row]:
    cases = sizes(
        [
            (dim, block, group, length)
            for dim, block in ((64, 64), (128, 16), (128, 64), (128, 128), (256, 64))
            for group, length in ((1, 500), (4, 32768), (5, 3001), (8, 131072))
        ],
        [(64, 16, 5, 77)],
    )
    for dim, block, group, length in cases:
        lengths = torch.tensor([length, max(1, length // 3)], device=DEVICE)
        capacity = -(-(length + 9) // block) * block
        q, k, v = randn(2, 2 * group, dim), randn(2, 2, capacity, dim), randn(2, 2, capacity, dim)
        scores = randn(2, 2, capacity // block, dtype=torch.float32)
        chosen = ops.select_blocks(scores, lengths, block_size=block, token_budget=max(block, length // 10))
        beyond = torch.arange(capacity, device=DEVICE) >= lengths[:, None]
        k, v = (x.masked_fill(beyond[:, None, :, None], math.nan) for x in (k, v))
        name = f"d{dim} block {block} group {group} length {length}"
        want = exact_decode(q, k, v, chosen.indices, lengths, block)
        for counts in (None, chosen.counts):
            got = ops.sparse_decode(q, k, v, chosen.indices, lengths, block, counts=counts)
            yield compared("sparse_decode", name, got, want, NARROW_LIMIT)
        want = exact_decode(q, k, v, None, lengths, block)
        yield compared("dense_decode", name, ops.dense_decode(q, k, v, lengths), want, NARROW_LIMIT)
        pages = [x.unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1) for x in (k, v)]
        table = torch.arange(len(pages[0]), device=DEVICE).view(2, -1)
        got = ops.sparse_decode(q, *pages, chosen.indices, lengths, block, page_table=table)
        want = exact_decode(q, k, v, chosen.indices, lengths, block)
        yield compared("sparse_decode", f"{name}, pages", got, want, NARROW_LIMIT)


def right_scores() -> Iterator[Row]:
    blocks, dim = sizes((2048, 128), (40, 32))
    lengths = torch.tensor([16 * blocks, 16 * blocks // 3])
    complete = torch.arange(blocks, device=DEVICE) < (lengths // 16)[:, None].to(DEVICE)
    for dtype, limit in ((NARROW, NARROW_LIMIT), (torch.float32, 2e-5)):
        for group, queries in sizes(((1, 1), (4, 1), (5, 1), (8, 1), (1, 5), (1, 8)), ((5, 1), (1, 5))):
            q, norm = randn(2, 2 * queries * group, dim, dtype=dtype), randn(dim, dtype=dtype)
            weight = randn(2 * queries, group, dim, dim, dtype=dtype) / math.sqrt(group * dim)
            compressed = randn(2, 2, blocks, dim, dtype=dtype).masked_fill(~complete[:, None, :, None], math.nan)
            freq = torch.rand(dim // 2, device=DEVICE) / 16
            exact = [x.double().cpu() for x in (q, compressed, weight, norm, freq)]
            extras = {"norm_weight": exact[3], "inv_freq": exact[4]}
            want = reference.score_blocks(exact[0], lengths, *exact[1:3], block_size=16, **extras)
            extras = {"norm_weight": norm, "inv_freq": freq}
            got = ops.score_blocks(q, lengths.to(DEVICE), compressed, weight, 16, **extras)
            got = got.where(complete[:, None], 0.0)
            name = f"group {group} {dtype}" if queries == 1 else f"{queries} queries {dtype}"
            yield compared("score_blocks", name, got, want, limit)


def right_select() -> Iterator[Row]:
    for blocks in sizes((512, 2048, 8192), (40,)):
        scores = randn(2, 2, blocks, dtype=torch.float32).mul(4).round()  # many ties
        scores[0, :, ::7], scores[1, :, 3] = math.nan, math.inf
        lengths = torch.tensor([16 * blocks, 16 * blocks // 3], device=DEVICE)
        for rule in ({"token_budget": 16 * max(4, blocks // 10)}, {"threshold": 1e-3}, {"top_p": 0.9}):
            got = ops.select_blocks(scores, lengths, block_size=16, **rule)
            want = reference.select_blocks(scores.cpu(), lengths.cpu(), block_size=16, **rule)
            width = want.indices.shape[-1]
            name = f"{blocks} blocks, {next(iter(rule))}"
            yield compared("select_blocks", name, got.indices[..., :width], want.indices, 0)
            yield compared("select_blocks", name, got.counts, want.counts, 0)


def right_keys() -> Iterator[Row]:
    block, dim = sizes((64, 128), (16, 32))
    k, lengths = randn(2, 2, 5 * block, dim), torch.tensor([5 * block, block + 3])
    for kind, limit in (("max", 0), ("min", 0), ("avg", float(torch.finfo(NARROW).eps))):
        want = reference.pool_keys(k.cpu(), block, (kind,), lengths)
        yield compared("pool_keys", kind, ops.pool_keys(k, block, (kind,), lengths.to(DEVICE)), want, limit)
    for dtype, limit in ((NARROW, 3e-2), (torch.float32, 2e-5)):
        new, recent = randn(2, 2, dim, dtype=dtype), randn(2, 2, 2 * block, dim, dtype=dtype)
        weight, norm = randn(2, 3 * dim, dim, dtype=dtype) / math.sqrt(dim), randn(dim, dtype=dtype)
        compressed, freq = randn(2, 2, 5, dim, dtype=dtype), torch.rand(dim // 2, device=DEVICE)
        ends = torch.tensor([4 * block, block + 3])
        exact = [x.double().cpu() for x in (new, recent, compressed, weight, norm, freq)]
        extras = {"norm_weight": exact[4], "inv_freq": exact[5]}
        reference.update_compressed_keys(exact[0], ends, *exact[1:4], block_size=block, **extras)
        extras = {"norm_weight": norm, "inv_freq": freq}
        ops.update_compressed_keys(new, ends.to(DEVICE), recent, compressed, weight, block, **extras)
        yield compared("update_compressed_keys", str(dtype), compressed, exact[2], limit)
        yield compared("update_compressed_keys", f"{dtype}, ring", recent, exact[1], 0)


def right_attention() -> Iterator[Row]:
    cu, tokens = torch.tensor([0, 21, 21, 22, 150]).int(), 150
    for dtype, limit in ((NARROW, NARROW_LIMIT), (torch.float32, 1e-4)):
        for dim, extras in itertools.product(sizes((64, 128, 256), (16,)), ({}, {"softcap": 5.0}, {"window": 50})):
            q, k, v = randn(tokens, 8, dim, dtype=dtype), *(randn(tokens, 2, dim, dtype=dtype) for _ in range(2))
            sinks = randn(8, dtype=torch.float32)
            got = ops.packed_attention(q, k, v, cu, sinks=sinks, **extras)
            exact = [x.double().cpu() for x in (q, k, v)]
            want = reference.packed_attention(*exact, cu, sinks=sinks.double().cpu(), **extras)
            name = f"d{dim} {str(dtype).removeprefix('torch.')} {extras or 'plain'}"
            yield compared("packed_attention", f"{name}, output", got.output, want.output, limit)
            yield compared("packed_attention", f"{name}, lse", got.lse, want.lse, 1e-5)


def right_teacher() -> Iterator[Row]:
    lengths = sizes([300, 0, 1, 63, 64, 257], [21, 0, 1, 16])
    cu, tokens = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
    for block, group, gate_dtype, dim in sizes(
        [(b, g, torch.float32, 128) for b, g in ((8, 5), (16, 4), (32, 7), (64, 4), (128, 8), (256, 1))]
        + [(64, 4, NARROW, 128), (64, 8, NARROW, 128), (64, 4, torch.float32, 256)],
        [(8, 5, torch.float32, 16)],
    ):
        blocks = sum(-(-length // block) for length in lengths)
        q, k, v = randn(tokens, 2 * group, dim), randn(tokens, 2, dim), randn(tokens, 2, dim)
        qg, kg = randn(tokens, 2, dim, dtype=gate_dtype), randn(blocks, 2, dim, dtype=gate_dtype)
        name = f"d{dim} block {block} group {group} gates {str(gate_dtype).removeprefix('torch.')}"
        exact = [x.double().cpu() for x in (q, k, v)]
        want = reference.attention_with_block_targets(*exact, cu, block)
        got = ops.attention_with_block_targets(q, k, v, cu, block)
        past = want.log_targets > -math.inf
        yield compared("attention_with_block_targets", f"{name}, output", got.output, want.output, NARROW_LIMIT)
        yield compared("attention_with_block_targets", f"{name}, lse", got.lse, want.lse, 1e-5)
        targets = got.log_targets.cpu()[past]
        yield compared("attention_with_block_targets", f"{name}, targets", targets, want.log_targets[past], 2e-5)
        sides = [x.double().cpu().requires_grad_() for x in (qg, kg)]
        wide = gate_dtype == torch.float32 and dim <= 128
        limit = 1e-4 if wide else 2e-2
        sparse: Row = {"sink_blocks": 1, "row_stride": 8, "row_shift": 3}  # as in the recommended recipe
        for lse, rule in ((None, {}), (got.lse, {}), (None, sparse), (got.lse, sparse)):
            options: Row = {"row_start": 0.25, "recall_budgets": (3 * block,), **rule}
            want_loss, want_stats = reference.gate_kl(*exact[:2], *sides, cu, block, **options)
            want_grads = torch.autograd.grad(want_loss, sides)
            here = [qg.requires_grad_(), kg.requires_grad_()]
            loss, stats = ops.gate_kl(q, k, *here, cu, block, lse=lse, **options)
            case = name + ", lse known" * (lse is not None) + ", every eighth row" * bool(rule)
            yield compared("gate_kl", f"{case}, loss", loss, want_loss, 1e-5 if wide else limit)
            yield compared("gate_kl", f"{case}, recall", stats.recall, want_stats.recall, 1e-3)
            for which, a, b in zip(("dqg", "dkg"), torch.autograd.grad(loss, here), want_grads, strict=True):
                yield compared("gate_kl", f"{case}, {which}", a, b, limit)


def lesson(length: int, block: int) -> Any:
    """A pack of one layer of Qwen3-8B's shape, with its gate in fp32."""
    import distill

    shape = sizes((8, 4, 128, 128), (2, 2, 16, 16))
    named = dict(zip(("kv_heads", "group", "head_dim", "gate_dim"), shape, strict=True))
    case = distill.Case(length, block, argparse.Namespace(device=str(DEVICE), dtype=NARROW, **named))
    case.qg, case.kg = (x.detach().float().requires_grad_() for x in (case.qg, case.kg))
    return case


def large() -> Iterator[Row]:
    """Long packs: last rows against float64, and two runs bit for bit; and offsets beyond 2^31."""
    for length, block in sizes(((32768, 64), (131072, 16)), ((96, 16),)):
        case = lesson(length, block)
        for name, error in case.errors().items():
            fact = {"case": f"{length} tokens, block {block}, {name}", "error": error, "limit": 1e-4}
            yield {"kernel": "gate_kl", **fact, "right": error < 1e-4}
        first, second = case.gate_kl(), case.gate_kl()
        for name, a, b in zip(("loss", "dqg", "dkg"), first, second, strict=True):
            yield compared("gate_kl", f"{length} tokens, block {block}, {name} again", a, b, 0)
    far = 2**31 + 64
    buffer = torch.empty(2 * far if ON_GPU else 4096, dtype=NARROW, device=DEVICE)
    k = buffer.as_strided((2, 1, 64, 16), (far if ON_GPU else 2048, 1024, 16, 1))
    k.copy_(randn(2, 1, 64, 16))
    q, lengths, indices = randn(2, 2, 16), torch.full((2,), 64, device=DEVICE), torch.zeros(2, 1, 1).int().to(DEVICE)
    want = exact_decode(q, k, k, indices, lengths, 64)
    got = ops.sparse_decode(q, k, k, indices, lengths, 64)
    yield compared("sparse_decode", "offsets beyond 2^31", got, want, NARROW_LIMIT)
    q = buffer.as_strided((64, 4, 16), (16, 2**30 if ON_GPU else 1024, 1))  # heads first in memory
    q.copy_(randn(64, 4, 16))
    k, cu = randn(64, 2, 16), torch.tensor([0, 64]).int()
    got, want = (ops.block_targets(x, k, cu, 8) for x in (q, q.contiguous()))
    yield compared("attention_with_block_targets", "offsets beyond 2^31", got, want, 0)


def sanitizer() -> Iterator[Row]:
    """Run NVIDIA's compute-sanitizer on the small cases of `right`."""
    tool = shutil.which("compute-sanitizer")
    if not ON_GPU or tool is None:
        yield {"skipped": "no compute-sanitizer here"}
        return
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, __file__, "--step", "tiny"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
        yield {
            "kernel": "all",
            "case": check,
            "right": done.returncode == 0,
            "said": summary[-1:] or done.stderr[-500:],
        }


def tiny() -> Iterator[Row]:
    """Run every kernel on small cases, for the sanitizer, which slows execution about a hundredfold."""
    global sizes
    sizes = lambda full, tiny: tiny  # noqa: E731
    yield from right()


def generation() -> Iterator[Row]:
    """Check that `generate` with a budget that covers everything gives the plain model's tokens, on every cache."""
    import seergate

    model = small_model(layers=2)
    bank = seergate.GateBank.for_model(model, seergate.GateConfig(block_size=16, gate_dim=16)).to(DEVICE)
    ids = torch.randint(1, 100, (2, 50), device=DEVICE)
    new = sizes(200, 5)
    want = model.generate(input_ids=ids, max_new_tokens=new)
    ways: dict[str, Row] = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
    if ON_GPU:
        ways["static, compiled"] = {"cache_implementation": "static"}
    for name, options in ways.items():
        with seergate.attached(model, bank, token_budget=16 * 64):
            got = model.generate(input_ids=ids, max_new_tokens=new, **options)
        yield {"kernel": "generate", "case": f"{name} cache", "right": torch.equal(got, want)}
    sparse = {}
    for name, options in ways.items():
        with seergate.attached(model, bank, token_budget=48):
            sparse[name] = model.generate(input_ids=ids, max_new_tokens=new, **options)
    for name, tokens in sparse.items():
        same = torch.equal(tokens, sparse["dynamic"])
        yield {"kernel": "generate", "case": f"{name} cache, 48 tokens read", "right": same}
    if ON_GPU:
        from torch._dynamo.utils import counters

        breaks, graphs = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
        right = graphs > 0 and not breaks
        yield {"kernel": "generate", "case": "compiled without graph breaks", "right": right, "breaks": breaks}
    model = small_model(**sizes(EIGHT_B | {"layers": 2}, {"dtype": NARROW}))
    bank, ids = gates_of(model), torch.randint(1, 100, (2, sizes(300, 50)), device=DEVICE)
    arguments = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    arguments["prefix_allowed_tokens_fn"] = lambda *_: [1]  # forced, as rounding could change the choice
    want = model.generate(input_ids=ids, **arguments).logits[1]
    for name, options in ways.items():
        with seergate.attached(model, bank, token_budget=16 * 64):
            got = model.generate(input_ids=ids, **arguments, **options).logits[1]
        yield compared("generate", f"{name} cache, logits of 8B's shape in 16 bits", got, want, 3e-2)


def gates_of(model: Any) -> Any:
    """New gates with the width for Qwen3-8B's shape, in the model's dtype."""
    import seergate

    config = seergate.GateConfig(block_size=sizes(64, 16), gate_dim=sizes(128, 16))
    return seergate.GateBank.for_model(model, config).to(DEVICE, model.dtype)


def small_model(**changes: Any) -> Any:
    """A Qwen3 model with random weights, by default small and in fp32."""
    shape: Row = {"hidden_size": 64, "intermediate_size": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2}
    shape |= {"vocabulary": 128, "initializer_range": 0.2, "dtype": torch.float32} | changes
    with DEVICE:  # draw weights on the device: eight billion on a CPU take minutes
        return random_model(**shape)


def decode_times() -> Iterator[Row]:
    """Time attention of one token and the gate's selection, against the fastest dense kernel here."""
    import decode
    from dense_baselines import available

    shape: Row = {"kv_heads": 8, "group": 4, "head_dim": 128, "gate_dim": 128, "block_size": 64, "max_gib": 24.0}
    if not ON_GPU:
        shape |= {"kv_heads": 2, "group": 2, "head_dim": 16, "gate_dim": 8, "block_size": 16, "max_gib": 0.1}
    options = argparse.Namespace(device=str(DEVICE), dtype=NARROW, repeats=sizes(15, 1), seconds=1.0, **shape)
    with torch.inference_mode():
        q, k, v = randn(2, 4, 64), randn(2, 2, 512, 64), randn(2, 2, 512, 64)
        dense, left_out = available(q, k, v, NARROW_LIMIT)
        dense = {name: build for name, build in dense.items() if name != "flex"}  # would compile for each cell
        yield {"peers": list(dense), "left_out": left_out}
        bandwidth = read_rate()
        for batch in sizes((1, 4, 16), (1,)):
            for length in sizes((8192, 32768, 131072), (64,)):
                budgets = {f"sparsity {s}": math.ceil(length * (1 - s) / 64) * 64 for s in (0.5, 0.9)}
                for cell in decode.cells(batch, length, budgets, dense, bandwidth, options):
                    fact = {"case": f"batch {batch}, {length} tokens, {cell['series']}", **cell}
                    yield {"kernel": "sparse_decode", "peer": cell.get("best_dense"), **fact}


@torch.inference_mode()
def gate_times() -> Iterator[Row]:
    """Time each kernel that a gate launches in a step, and pooling: bytes read and written against the bandwidth."""
    import decode

    shape = (8, 8, 4, 128, 64, 32768) if ON_GPU else (1, 2, 2, 16, 16, 64)
    batch, kv_heads, group, dim, block, length = shape
    blocks, budget = length // block, max(block, length // 8)
    whole, one = (torch.full((batch,), tokens, device=DEVICE) for tokens in (length, block))
    extras = {"norm_weight": randn(dim), "inv_freq": torch.rand(dim // 2, device=DEVICE)}

    def score(q: Tensor, compressed: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (ops.score_blocks(q, whole, compressed, weight, block, **extras),)

    def select(scores: Tensor) -> tuple[Tensor, ...]:
        return ops.select_blocks(scores, whole, block_size=block, token_budget=budget)

    def update(new: Tensor, recent: Tensor, compressed: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        ops.update_compressed_keys(new, one, recent, compressed, weight, block, **extras)
        return ()

    def pool(k: Tensor) -> tuple[Tensor, ...]:
        return (ops.pool_keys(k, block),)

    keys, bandwidth = (batch, kv_heads), read_rate()
    step = [(batch, kv_heads * group, dim), (*keys, blocks, dim), (kv_heads, group, dim, dim)]
    last = [(*keys, dim), (*keys, block, dim), (*keys, 1, dim), (kv_heads, 3 * dim, dim)]
    for kernel, run, shapes in (
        ("score_blocks", score, step),
        ("select_blocks", select, [(*keys, blocks)]),
        ("update_compressed_keys", update, last),
        ("pool_keys", pool, [(1, kv_heads, length, dim)]),
    ):
        dtype = torch.float32 if run is select else NARROW
        given = [randn(*each, dtype=dtype) for each in shapes]
        moved = sum(x.nbytes for x in (*given, *run(*given)))
        many = sizes(min(64, math.ceil(decode.CACHE_BYTES["cuda"] / moved)), 1)  # larger than caches
        runs = [partial(run, *(x.clone() for x in given)) for _ in range(many)]
        ms = timed_rotated(runs, sizes(15, 1), DEVICE)["median"]
        fact = {"case": f"batch {batch}, {length} tokens", "ms": ms, "bytes": moved}
        yield {"kernel": kernel, **fact, "roofline_fraction": moved / bandwidth * 1e3 / ms}


def teacher_times() -> Iterator[Row]:
    """Time the teacher's kernels at 32k tokens, as shipped and with other launch options, and PyTorch's attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from seergate.ops.attention import Pack
    from seergate.ops.triton_impl import packs, teacher

    tokens, heads, kv_heads, dim, block = sizes((32768, 32, 8, 128, 64), (64, 4, 2, 16, 16))
    q, k, v = randn(tokens, heads, dim), randn(tokens, kv_heads, dim), randn(tokens, kv_heads, dim)
    cu, shipped, scratch = torch.tensor([0, tokens]).int(), teacher.teacher_launch, teacher.SCRATCH_BYTES
    flops, rate = tokens * tokens * heads * dim, product_rate()
    lse = ops.packed_attention(q, k, v, cu).lse

    def row(kernel: str, case: str, run: Callable[[], Any], work: float) -> Row:
        ms = timed(run, sizes(5, 1), DEVICE)["min"]
        return {"kernel": kernel, "case": case, "ms": ms, **speed(work, ms, rate)}

    def rows(case: str) -> Iterator[Row]:
        run = partial(ops.attention_with_block_targets, q, k, v, cu, block)
        yield row("attention_with_block_targets", case, run, 2 * flops)
        side = teacher.Teacher(Pack(q, k, cu, dim**-0.5), block)
        pieces = [packs.Piece(0, 0, range(tokens), 1.0)]
        (tiles,) = packs.to_device([packs.row_tiles(pieces, side.launch().rows, packed=True)], DEVICE)
        targets = torch.empty(tokens, kv_heads, -(-tokens // block), device=DEVICE)
        yield row("block targets, lse known", case, partial(side.maxima, tiles, lse, targets, 1), flops)

    yield row("packed_attention", "output and lse", partial(ops.packed_attention, q, k, v, cu), 2 * flops)
    as_shipped = list(rows("as shipped"))
    yield from as_shipped
    kernel, ours = as_shipped[0]["kernel"], as_shipped[0]["ms"]
    for stages, loops, room in itertools.product((2, 3), (False, True), (64, 256)):
        teacher.SCRATCH_BYTES = room << 20
        teacher.teacher_launch = lambda *shape, changed=(stages, loops): shipped(*shape)._replace(
            num_stages=changed[0], two_loops=changed[1]
        )
        case = f"stages {stages}, {'two loops' if loops else 'one loop'}, {room} MiB of scratch"
        yield from (fact | {"ablated": True} for fact in rows(case))
    teacher.teacher_launch, teacher.SCRATCH_BYTES = shipped, scratch
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    for backend in sizes((SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION), (SDPBackend.MATH,)):
        attention = torch.nn.functional.scaled_dot_product_attention
        with sdpa_kernel(backend):
            peer = f"{backend.name.lower()}, output only"
            run = partial(attention, q, k, v, is_causal=True, enable_gqa=True)
            ms = timed(run, sizes(5, 1), DEVICE)["min"]
        yield {"peer": peer, "ms": ms, **speed(2 * flops, ms, rate)}
        yield {"kernel": kernel, "case": "as shipped", "peer": peer, "speedup": ms / ours}


def speed(work: float, ms: float, rate: float) -> Row:
    """TFLOP/s of ``work`` FLOP in ``ms``, and their fraction of the roofline ``rate``."""
    return {"tflops": work / ms / 1e9, "roofline_fraction": work / ms * 1e3 / rate}


def lesson_times() -> Iterator[Row]:
    """Time training of one layer of Qwen3-8B's shape, gates in fp32: loss and gradients, and a whole step."""

    from seergate.distill.losses.block_loss import BlockLoss
    from seergate.distill.losses.teacher_forward import distill_step
    from seergate.models import families

    length, block = sizes((32768, 64), (64, 16))
    case = lesson(length, block)
    rate, budgets = product_rate(), sizes((1024, 2048, 4096), (32,))
    recalls = {"": {}, ", recall": {"recall_budgets": budgets}}
    for name, options in recalls.items():
        run = partial(case.gate_kl, row_start=0.5, **options)
        ms, peak = timed(run, sizes(5, 1), DEVICE)["min"], peak_bytes(run, DEVICE)
        fact = {"case": f"a layer of {length} tokens, rows from .5{name}", "ms": ms, "peak_bytes": peak}
        # The second half of the rows has three quarters of the products.
        yield {"kernel": "gate_kl", **fact, **speed(0.75 * case.flops, ms, rate)}
    model = small_model(**sizes(EIGHT_B, {}), layers=1)
    bank, ids = gates_of(model).float(), torch.randint(1, 100, (1, length), device=DEVICE)
    optimizer, learn = torch.optim.AdamW(bank.parameters(), lr=1e-3), BlockLoss.learn
    with torch.no_grad():
        frozen = timed(lambda: families.decoder_of(model)(input_ids=ids, use_cache=False), sizes(3, 1), DEVICE)["min"]
    peaks: list[int] = []

    def watched(*given: Any) -> None:
        peaks.append(peak_bytes(partial(learn, *given), DEVICE))

    for name, options in recalls.items():

        def step(options: Row = options) -> None:
            distill_step(bank, model, ids, **options).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        ms = timed(step, sizes(3, 1), DEVICE)["min"]
        BlockLoss.learn = watched  # type: ignore[method-assign]
        step()
        BlockLoss.learn = learn  # type: ignore[method-assign]
        fact = {"case": f"a layer of {length} tokens, with AdamW{name}", "ms": ms, "frozen_ms": frozen}
        fact |= {"peak_bytes": peaks[-1], "limit": LESSON_BYTES, "right": 0 < peaks[-1] <= LESSON_BYTES}
        yield {"kernel": "distill_step", **fact}


def train() -> Iterator[Row]:
    """`train.py` against the CPU; with 36 layers of Qwen3-8B's shape: no host sync, times, memory as planned."""
    yield from train_command()  # before a model is on the GPU

    import seergate
    from seergate.distill import load_train_config
    from seergate.distill.base_model import compile_elementwise
    from seergate.distill.losses.distill_loss import positions_of
    from seergate.distill.losses.teacher_forward import distill_step
    from seergate.distill.memory import estimate_memory
    from seergate.models import families
    from seergate.models.packed_forward import TeacherCall, intercepted_attention

    tokens, layer_bytes = sizes(32768, 48), 0.4e9
    layers = min(36, int((torch.cuda.mem_get_info()[0] - 12e9) / layer_bytes)) if ON_GPU else 1
    model = small_model(**sizes(EIGHT_B | {"vocabulary": 151936}, {}), layers=layers)
    model.set_output_embeddings(torch.nn.Identity())
    ids = torch.randint(1, 100, (1, tokens), device=DEVICE)
    counts = sizes((8, 4, 1), (2, 1))
    packs = {f"{n} x {tokens // n}": torch.arange(0, tokens + 1, tokens // n, dtype=torch.int32) for n in counts}

    def frozen(borders: Tensor) -> None:
        def attend(call: TeacherCall) -> Tensor:
            return call.attention(borders).output[None]

        with intercepted_attention(model, {}, attend), torch.no_grad():
            places = positions_of(borders).to(DEVICE)[None]
            families.decoder_of(model)(input_ids=ids, position_ids=places, use_cache=False)

    for recipe, compiled in (("paper", False), ("paper", True), ("recommended", True)):
        given = {"recipe": recipe, "max_length": tokens} | sizes({}, {"block_size": 8, "recall_budgets": [32]})
        config = load_train_config("someone/model", given)
        bank = seergate.GateBank.for_model(model, config.gates(families.head_dim_of(model))).to(DEVICE)
        optimizer = torch.optim.AdamW(bank.parameters(), lr=1e-3)
        options = config.loss_options
        if compiled and recipe == "paper":
            compile_elementwise(model, sizes("inductor", "eager"))

        def learn(borders: Tensor, bank: Any = bank, options: Row = options) -> None:
            distill_step(bank, model, ids, borders, **options).loss.backward()

        def step(borders: Tensor, learn: Callable = learn, optimizer: Any = optimizer) -> None:
            learn(borders)
            optimizer.step()
            optimizer.zero_grad()

        case = f"{recipe} recipe, {layers} layers" + ", norms and MLPs compiled" * compiled
        for borders in packs.values():
            step(borders)
        times = waits(partial(learn, packs[f"1 x {tokens}"]))
        yield {"kernel": "train", "case": f"{case}, nothing waits", **times}
        planned = estimate_memory(model, bank, config, DEVICE, 1)
        for name, borders in packs.items():
            frozen(borders)
            ms, alone = (timed(partial(run, borders), sizes(3, 1), DEVICE, warm=True)["min"] for run in (step, frozen))
            allocated = torch.cuda.memory_allocated() if ON_GPU else 0
            peak = allocated + peak_bytes(partial(step, borders), DEVICE)
            fact = {"case": f"{case}, samples {name}", "ms": ms, "frozen_ms": alone, "peak_bytes": peak}
            fact |= {"planned_bytes": planned.total}
            if ON_GPU:
                fact["right"] = 0 < peak <= 1.05 * planned.total
            yield {"kernel": "train", **fact, "peer": "the frozen model alone", "speedup": alone / ms}


def train_command() -> Iterator[Row]:
    """Compare the KL of three steps of `train.py` with the CPU's, plain and under DeepSpeed with ZeRO-2."""
    if importlib.util.find_spec("datasets") is None:
        yield {"skipped": "no datasets here, which train.py reads with"}
        return
    launchers: dict[str, list[str]] = {"python": []}
    if ON_GPU and importlib.util.find_spec("deepspeed"):
        launchers["deepspeed"] = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
    with tempfile.TemporaryDirectory() as folder:
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "SEERGATE_BACKEND": "reference", "TRITON_INTERPRET": "0"}
        want, output = kl_of_steps([], f"{folder}/cpu", on_cpu)
        if want.isnan().any():
            yield {"kernel": "train", "case": "train.py on the CPU", "right": False, "said": output}
            return
        for name, launcher in launchers.items():
            kl, output = kl_of_steps(launcher, f"{folder}/{name}", {})
            for step in range(3):
                row = compared("train", f"{name} train.py, KL of step {step + 1}", kl[step], want[step], KL_LIMIT)
                yield row | ({} if row["right"] else {"said": output})


def kl_of_steps(launcher: list[str], folder: str, environment: dict[str, str]) -> tuple[Tensor, str]:
    """The KL of three training steps, NaN if the run failed; and the end of its output."""
    options: Row = {"model": "tiny-reasoner", "output_dir": folder, "token_cache": f"{folder}/tokens", "dtype": "auto"}
    options |= {"max_length": sizes(512, 64), "recall_budgets": sizes(128, 32), "data_limit": 40, "report_to": "none"}
    options |= {"max_steps": 3, "warmup_steps": 0, "eval_steps": 0, "logging_steps": 1}
    command = [sys.executable, *launcher, "train.py", *(f"--{name}={value}" for name, value in options.items())]
    place, given = Path(__file__).resolve().parent.parent, os.environ | environment
    done = subprocess.run(command, cwd=place, env=given, capture_output=True, text=True, check=False)
    kls = [float(kl) for kl in re.findall(r"step \d/3  KL ([\d.]+)", done.stdout + done.stderr)]
    whole = done.returncode == 0 and len(kls) == 3
    return torch.tensor(kls if whole else 3 * [math.nan]), (done.stdout + done.stderr)[-1500:]


def waits(run: Callable[[], Any]) -> Row:
    """Check that ``run`` never makes the host wait for the device, by PyTorch's sync debug mode. No check on a CPU."""
    if not ON_GPU:
        run()
        return {}
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as problem:
        return {"right": False, "said": "".join(traceback.format_exception(problem)[-4:])}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"right": True}


def model_times() -> Iterator[Row]:
    """Time a token in 36 layers of Qwen3-8B's shape, with random weights and a compiled static cache."""
    from end_to_end import Clock

    import seergate
    from seergate import methods

    model = small_model(**sizes(EIGHT_B | {"layers": 36}, {}))
    bank, bandwidth, new = gates_of(model), read_rate(), sizes(24, 3)
    # A step reads only one row of the embedding per token.
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    for batch, length in sizes(((1, 32768), (8, 32768), (1, 131072)), ((1, 40),)):
        ids, per_token = torch.randint(1, 100, (batch, length), device=DEVICE), {}
        for name, method in {"dense": methods.Dense(), "gate": methods.Gate(bank=bank, token_budget=4096)}.items():
            with seergate.attached(model, method) as handle:
                clock = Clock(DEVICE)
                model.generate(ids, max_new_tokens=1 + new, cache_implementation="static", streamer=clock)
                read = weights + handle.stats()["bytes_read_per_step"]
            # Without the prompt's time; a median, because the first steps compile and capture.
            per_token[name] = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(clock.times[1:]))
            fact = {"case": f"batch {batch}, {length} tokens, {name}", "ms": per_token[name], "bytes": read}
            yield {"kernel": "generate", **fact, "roofline_fraction": read / bandwidth * 1e3 / per_token[name]}
        yield {"kernel": "generate", "case": f"batch {batch}, {length} tokens", "peer": "dense",
               "speedup": per_token["dense"] / per_token["gate"]}  # fmt: skip


def serving_times() -> Iterator[Row]:
    """vLLM, if installed, with four layers of Qwen3-8B's shape: start-up, dense tokens, milliseconds of a step."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # kernels are counted in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # without a GPU
    if importlib.util.find_spec("vllm") is None:
        yield {"skipped": "no vLLM here"}
        return
    from serving import COVERING, VLLMWay
    from vllm.distributed import cleanup_dist_env_and_memory

    import seergate

    lengths, batches = sizes(((8192, 32768), (1, 8, 32)), ((256,), (1, 2)))
    tiny_shape = {"hidden_size": 128, "head_dim": 32, "vocabulary": 1024}
    options = argparse.Namespace(lengths=lengths, block_size=sizes(64, 32), budget=0, vocabulary=1024)
    engine = {"dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.8} if ON_GPU else {}
    steps: dict[tuple[str, int, int], float] = {}
    texts = {}
    with tempfile.TemporaryDirectory() as directory:
        model = small_model(**sizes(EIGHT_B | {"layers": 4}, tiny_shape))
        config = seergate.GateConfig(block_size=options.block_size, gate_dim=sizes(128, 32))
        seergate.GateBank.for_model(model, config).save_pretrained(f"{directory}/gates")
        model.save_pretrained(f"{directory}/model")
        del model
        for name, budget in {"dense": 0, "covering": COVERING, "gate": sizes(4096, 64)}.items():
            start = time.perf_counter()
            way = VLLMWay(directory, options, budget, **engine)
            yield {"kernel": "vLLM", "case": f"{name}, start", "ms": 1e3 * (time.perf_counter() - start)}
            texts[name] = way.answers(way.prompts(min(lengths), 2), sizes(64, 8))
            for length, batch in itertools.product(lengths, batches) if name != "covering" else ():
                way.turn(length, batch, 1)  # prefill
                steps[name, length, batch] = ms = statistics.median(way.turn(length, batch, sizes(30, 3)))
                fact = {"case": f"{name}, batch {batch}, {length} tokens", "ms": ms}
                if ON_GPU:
                    few, many = (launched(partial(way.turn, length, batch, n)) for n in (10, 20))
                    fact["launches_per_step"] = (many - few) / 10
                yield {"kernel": "vLLM", **fact}
            del way
            cleanup_dist_env_and_memory()
    yield {"kernel": "vLLM", "case": "a budget for everything", "right": texts["covering"] == texts["dense"]}
    for length, batch in itertools.product(lengths, batches):
        speedup = steps["dense", length, batch] / steps["gate", length, batch]
        yield {"kernel": "vLLM", "case": f"batch {batch}, {length} tokens", "peer": "dense", "speedup": speedup}


def launched(run: Callable[[], Any]) -> int:
    """Number of kernels that run on the GPU during ``run()``, including those in CUDA graphs."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
    return sum(event.device_type == DeviceType.CUDA for event in seen.events())


# ------------------------------------------------------------------------------------------------- running the steps


STEPS = {
    machine: 60,
    right: 150,
    large: 90,
    sanitizer: 120,
    generation: 180,
    gate_times: 60,
    decode_times: 180,
    teacher_times: 90,
    lesson_times: 90,
    train: 300,
    model_times: 180,
    serving_times: 300,
}
"""Step -> deadline in seconds, after which it is killed."""
NAMED = {step.__name__: step for step in (*STEPS, tiny)}


def child(name: str, path: Path) -> None:
    """Run one step in this process, and write each row at once as a JSON line, so that a kill loses none."""
    torch.manual_seed(0)
    with path.open("w", encoding="utf-8") as file:
        try:
            for row in NAMED[name]():
                file.write(json.dumps(row, default=str) + "\n")
                file.flush()
        except BaseException as problem:
            lines = traceback.format_exception(problem)[-3:]
            file.write(json.dumps({"failed": f"{type(problem).__name__}: {problem}", "where": "".join(lines)}) + "\n")
            raise


def perform(name: str, seconds: float, folder: Path) -> Row:
    """Run one step in its own process; return its rows, its seconds, and how it ended."""
    path, start = folder / f"{name}.jsonl", time.perf_counter()
    environment = os.environ | ({} if ON_GPU else {"TRITON_INTERPRET": "1", "SEERGATE_BACKEND": "triton"})
    command = [sys.executable, __file__, "--step", name, "--rows", str(path)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        ended = {0: "well"}.get(process.wait(seconds), "with an error")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ended = f"stopped after {seconds:.0f} s"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return {"ended": ended, "seconds": time.perf_counter() - start, "rows": [json.loads(line) for line in lines]}


def verdict(steps: dict[str, Row]) -> dict[str, str]:
    """Kernel -> a line with its verdict: right or wrong, fraction of the roofline, speedup over peers."""
    rows = [row for step in steps.values() for row in step["rows"] if not row.get("ablated")]
    lines = {}
    for kernel in dict.fromkeys(row["kernel"] for row in rows if "kernel" in row):
        own = [row for row in rows if row.get("kernel") == kernel]
        checks = [row["right"] for row in own if "right" in row]
        wrong = [row["case"] for row in own if row.get("right") is False]
        parts = [f"right in {len(checks)} checks" if checks else "timed only"]
        if wrong:
            parts = [f"WRONG in {len(wrong)} of {len(checks)}: {wrong[0]}"]
        if shares := sorted(row["roofline_fraction"] for row in own if row.get("roofline_fraction") and ON_GPU):
            parts.append(f"roofline {shares[len(shares) // 2]:.2f} (median of {len(shares)})")
        for row in own:
            if row.get("tflops") and ON_GPU:
                parts.append(f"{row['tflops']:.0f} TFLOP/s ({row['case']})")
            if row.get("speedup") and ON_GPU:
                parts.append(f"{row['speedup']:.2f}x {row['peer']} ({row['case']})")
        lines[kernel] = "; ".join(parts)
    for name, step in steps.items():
        failed = [row["failed"] for row in step["rows"] if isinstance(row.get("failed"), str)]
        if step["ended"] != "well":
            lines[f"step {name}"] = f"{step['ended']}: {failed[0] if failed else 'no error was said'}"
    return lines


def main() -> None:
    """Run the steps in order, save after each, print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [step.__name__ for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--minutes", type=float, default=10.0, help="no step begins after these")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="name the steps and their deadlines")
    parser.add_argument("--step", choices=NAMED, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, default=Path(os.devnull), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{step.__name__:15} {seconds:4} s  {step.__doc__}" for step, seconds in STEPS.items()))
        return
    if options.step:
        child(options.step, options.rows)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    start, steps = time.perf_counter(), dict[str, Row]()
    path = options.output / f"gpu_check-{'gpu' if ON_GPU else 'interpreter'}.json"
    for name in options.only:
        left = 60 * options.minutes - (time.perf_counter() - start)
        if left <= 0:
            steps[name] = {"ended": "not begun", "seconds": 0.0, "rows": []}
            continue
        # The deadlines are for a GPU; in the interpreter only the total time is limited.
        steps[name] = perform(name, min(left, STEPS[NAMED[name]]) if ON_GPU else left, options.output)
        record = {"machine": provenance(DEVICE), "interpreted": not ON_GPU, "steps": steps, "verdict": verdict(steps)}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: ended {steps[name]['ended']}, {steps[name]['seconds']:.0f} s", flush=True)
    for kernel, line in verdict(steps).items():
        print(f"{kernel}: {line}")
    print("saved", path, "" if ON_GPU else "(in the interpreter: no time in it means anything)")
    bad = any(row.get("right") is False for step in steps.values() for row in step["rows"])
    sys.exit(bad or any(step["ended"] != "well" for step in steps.values()))


if __name__ == "__main__":
    main()
