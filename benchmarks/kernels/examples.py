"""Calls of the ops on meta tensors that together launch every configuration that ships."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seergate.ops.attention import Pack
from seergate.ops.gate_math import Branch
from seergate.ops.losses import LossOptions
from seergate.ops.triton_impl import compression, decode, gate_kl, packed_attention, packs, selection, teacher
from seergate.serving.vllm import decode_kernels as paged


@dataclass(frozen=True)
class Example:
    """A call of an op on meta tensors: no kernel runs, and only the launches are of interest.

    Attributes:
        name: unique, such as ``"sparse_decode bfloat16 d128 b64 g8"``.
        call: runs the op.
        products: names of its kernels that must use tensor cores (matrix products of 16-bit numbers).
        wide: names of its kernels that must load 16 bytes per thread at a time.
        one_stage: those of ``products`` that do not load ahead: gates wider than 128. (fp32, not among the products,
            does not either.) `launch` gives both one stage, because they already take up to 232 of 255 registers. The
            cost has not been measured on a GPU.
    """

    name: str
    call: Callable[[], Any]
    products: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    one_stage: tuple[str, ...] = ()

    def required(self, kernel: str) -> dict[str, bool]:
        """Requirements on one of its kernels, as arguments of `machine_code.faults`."""
        products = kernel in self.products
        ahead = products and kernel not in self.one_stage
        return {"products": products, "wide": kernel in self.wide, "ahead": ahead}


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def short(dtype: torch.dtype) -> str:
    """A dtype's name in tables."""
    return str(dtype).removeprefix("torch.")


def cache_of(batch: int, kv_heads: int, capacity: int, dim: int, page: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Keys or values ``[B, Hkv, S, d]``, or pages of ``page`` tokens and their table."""
    if not page:
        return meta(batch, kv_heads, capacity, dim, dtype=dtype), None
    pages = meta(batch * capacity // page, kv_heads, page, dim, dtype=dtype)
    return pages, meta(batch, capacity // page, dtype=torch.int32)


DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes; float16 is left out, as its machine code differs from bfloat16's only in the names of the products."""


def examples() -> Iterator[Example]:
    """The examples of all ops."""
    for of_op in (
        compressions,
        dense_decodes,
        lessons,
        packed_attentions,
        paged_steps,
        scorings,
        selections,
        sparse_decodes,
        teachers,
    ):
        yield from of_op()


def compressions() -> Iterator[Example]:
    """Dtypes, head dimensions and block sizes; 8 rows, 8 KV heads, a gate as wide as a head."""
    for dtype in DTYPES:
        for dim in (64, 128, 256):
            yield update_example(dtype, dim, 64)
    for block_size in (16, 32, 128, 256):
        yield update_example(torch.bfloat16, 128, block_size)
    yield update_example(torch.bfloat16, 128, 64, gate_dtype=torch.float32)  # gates as they are trained
    yield update_example(torch.bfloat16, 128, 64, position_offset=63)  # `compat="published"`


def update_example(
    dtype: torch.dtype, dim: int, block_size: int, *, gate_dtype: torch.dtype | None = None, position_offset: int = 0
) -> Example:
    """Every row completes a block: at most one step in ``block_size`` is like that."""
    gate_dtype = gate_dtype or dtype
    batch, kv_heads = 8, 8
    k, recent = meta(batch, kv_heads, dim, dtype=dtype), meta(batch, kv_heads, 2 * block_size, dim, dtype=dtype)
    compressed = meta(batch, kv_heads, 32768 // block_size, dim, dtype=gate_dtype)
    weight, norm_weight = meta(kv_heads, 3 * dim, dim, dtype=gate_dtype), meta(dim, dtype=gate_dtype)
    inv_freq, lengths = meta(dim // 2, dtype=torch.float32), meta(batch, dtype=torch.int64)
    name = f"{short(dtype)} d{dim} block {block_size}"
    name += f" gate {short(gate_dtype)}" * (gate_dtype != dtype)
    name += f" offset {position_offset}" * (position_offset > 0)
    return Example(
        f"update_compressed_keys {name}",
        lambda: compression.update(
            k, lengths, recent, compressed, weight, block_size, ("max", "min", "avg"), norm_weight, inv_freq, 1.0,
            position_offset,
        ),
        wide=("update_kernel",),
    )  # fmt: skip


def dense_decodes() -> Iterator[Example]:
    """Head dimensions and dtypes, and a paged cache."""
    for dtype in DTYPES:
        for dim in (64, 96, 128, 256):
            if dim * dtype.itemsize <= decode.MAX_ROW_BYTES:
                yield dense_example(dtype, dim)
    yield dense_example(torch.bfloat16, 128, page=16)
    yield dense_example(torch.bfloat16, 128, page=64)


def dense_example(dtype: torch.dtype, dim: int, page: int = 0) -> Example:
    """32k tokens, 8 rows, 64 query and 8 KV heads."""
    batch, kv_heads, capacity = 8, 8, 32768
    q = meta(batch, 8 * kv_heads, dim, dtype=dtype)
    cache, table = cache_of(batch, kv_heads, capacity, dim, page, dtype)
    lengths = meta(batch, dtype=torch.int64)
    return Example(
        f"dense_decode {short(dtype)} d{dim}" + f" page {page}" * bool(page),
        lambda: decode.attend(q, cache, cache, dim**-0.5, None, None, table, None, None, lengths, 1),
        products=("decode_kernel",) if dtype != torch.float32 else (),
        wide=("decode_kernel",),
    )


LESSONS: tuple[tuple[torch.dtype, torch.dtype, int, int, int, int, int, bool], ...] = (
    # dtype of teacher and of gate, head dimension of both, group, block size, tokens, rows, is the log-sum-exp known
    # What `seergate train` launches: gates in fp32 with a model in bf16, every group of the shipped configurations.
    *((torch.bfloat16, torch.float32, 128, group, 64, 32768, 4096, True) for group in (4, 2, 5, 6, 7, 8)),
    # The other presets: GPT-OSS, Qwen3-235B, both Qwen3.5, whose gates are too wide for fp32.
    (torch.bfloat16, torch.float32, 64, 8, 64, 32768, 4096, True),
    (torch.bfloat16, torch.float32, 128, 16, 64, 32768, 4096, True),
    *((torch.bfloat16, torch.bfloat16, 256, group, 64, 32768, 4096, True) for group in (4, 6)),
    # The block sizes of the ablation.
    (torch.bfloat16, torch.float32, 128, 4, 16, 32768, 1024, True),
    (torch.bfloat16, torch.float32, 128, 4, 32, 32768, 2048, True),
    (torch.bfloat16, torch.float32, 128, 4, 128, 32768, 8192, True),
    # Shorter packs: the rows for recall are narrower.
    (torch.bfloat16, torch.float32, 128, 4, 16, 16384, 2048, True),
    (torch.bfloat16, torch.float32, 128, 4, 64, 16384, 8192, True),
    (torch.bfloat16, torch.float32, 128, 4, 64, 8192, 8192, True),
    (torch.bfloat16, torch.float32, 128, 4, 64, 4096, 4096, True),
    *((torch.bfloat16, torch.bfloat16, 256, 4, 64, tokens, 4096, True) for tokens in (16384, 8192, 4096)),
    # What else the op takes: no log-sum-exp, other dtypes and gate dimensions, narrow and very wide rows of blocks.
    (torch.bfloat16, torch.float32, 128, 4, 16, 131072, 512, False),
    (torch.bfloat16, torch.bfloat16, 128, 4, 64, 4096, 4096, True),
    (torch.float16, torch.float16, 128, 4, 16, 4096, 4096, True),
    (torch.bfloat16, torch.bfloat16, 64, 4, 64, 32768, 4096, True),
    (torch.bfloat16, torch.bfloat16, 256, 4, 64, 131072, 1024, True),
)
"""Configurations to compile. The teacher's kernels depend on the group and not on the gate's dtype, the gate's kernels
the other way round."""

KV_HEADS = 8
"""KV heads of the examples. All numbers but 1 give the same kernels, as Triton makes an argument of 1 a constant."""


def lessons() -> Iterator[Example]:
    """Calls on meta tensors, each of one chunk, that launch what ships."""
    for shipped in LESSONS:
        yield gate_kl_example(*shipped)
    # Evaluations of a training run.
    for block_size, rows in ((64, 4096), (16, 1024), (32, 2048), (128, 8192)):
        yield gate_kl_example(torch.bfloat16, torch.float32, 128, 4, block_size, 32768, rows, True, gradients=False)
    for dim, gate_dtype in ((64, torch.float32), (256, torch.bfloat16)):
        yield gate_kl_example(torch.bfloat16, gate_dtype, dim, 4, 64, 32768, 4096, True, gradients=False)
    # The recommended recipe: without a first block, every eighth row; SmolLM2's shape, and Qwen3-8B's.
    for dim, group, tokens in ((64, 3, 4096), (128, 4, 32768)):
        for gradients in (True, False):
            yield gate_kl_example(
                torch.bfloat16, torch.float32, dim, group, 16, tokens, tokens // 4, True, gradients=gradients,
                sink_blocks=1, row_stride=8,
            )  # fmt: skip


def gate_kl_example(
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
    dim: int,
    group: int,
    block_size: int,
    tokens: int,
    rows: int,
    known: bool = False,
    *,
    kv_heads: int = KV_HEADS,
    gradients: bool = True,
    sink_blocks: int = 0,
    row_stride: int = 1,
) -> Example:
    """One segment of ``tokens`` tokens, one recall budget; one in ``row_stride`` of the last ``rows`` rows counts."""
    blocks = tokens // block_size
    q, k = meta(tokens, group * kv_heads, dim, dtype=dtype), meta(tokens, kv_heads, dim, dtype=dtype)
    qg, kg = meta(tokens, kv_heads, dim, dtype=gate_dtype), meta(blocks, kv_heads, dim, dtype=gate_dtype)
    lse = meta(tokens, group * kv_heads, dtype=torch.float32) if known else None
    row_start = 1 - rows / tokens
    gate_products = () if gate_dtype == torch.float32 else ("rows_kernel", "columns_kernel")
    teacher_kernel = "maxima_kernel" if known else "attention_kernel"
    kernels = ("rows_kernel", "columns_kernel", teacher_kernel)
    return Example(
        f"gate_kl {short(dtype)} gate {short(gate_dtype)} d{dim} g{group} b{block_size} t{tokens}"
        + " no lse" * (not known)
        + f" sinks {sink_blocks}" * bool(sink_blocks)
        + f" rows by {row_stride}" * (row_stride > 1)
        + " evaluation" * (not gradients),
        partial(
            gate_kl.evaluate, Pack(q, k, torch.tensor([0, tokens], dtype=torch.int32), 0.1), qg, kg, block_size, 0.1,
            LossOptions(row_start, "row_mean", (4096,), sink_blocks, row_stride), lse, gradients, gradients,
        ),
        gate_products + ((teacher_kernel,) if dtype != torch.float32 else ()),
        kernels,
        gate_products if dim > 128 else (),
    )  # fmt: skip


def packed_attentions() -> Iterator[Example]:
    """Attention without a kernel of PyTorch's: soft caps (Gemma 2), and on AMD all, here with GPT-OSS' window."""
    for dim, group, window, softcap in (
        (256, 2, None, 50.0),
        (256, 2, 4096, 50.0),
        (128, 4, None, None),
        (64, 8, 128, None),
    ):
        q, k = (meta(32768, n, dim, dtype=torch.bfloat16) for n in (group * KV_HEADS, KV_HEADS))
        cu_seqlens = torch.tensor([0, len(q)], dtype=torch.int32)
        pack = Pack(q, k, cu_seqlens, dim**-0.5, None, softcap)
        yield Example(
            f"packed_attention bfloat16 d{dim} g{group}"
            + f" window {window}" * bool(window)
            + " softcap" * bool(softcap),
            partial(packed_attention.packed_attention, pack, k, window),
            ("attention_kernel",),
            ("attention_kernel",),
        )


def paged_steps() -> Iterator[Example]:
    """Launches of a decode step inside vLLM before attention: head dimensions, and blocks of one page and of two."""
    for dtype, dim, block_size, page in (
        (torch.bfloat16, 128, 64, 64),
        (torch.bfloat16, 64, 64, 64),
        (torch.bfloat16, 256, 64, 64),
        (torch.bfloat16, 128, 16, 16),
        (torch.bfloat16, 128, 128, 64),
    ):
        yield paged_example(dtype, dim, block_size, page)


def paged_example(dtype: torch.dtype, dim: int, block_size: int, page: int) -> Example:
    """8 rows of up to 32k tokens, 32 query and 8 KV heads, a budget of 4,096 tokens, gates in the cache's dtype."""
    rows, kv_heads, group = 8, 8, 4
    numbers = kv_heads * (page * 2 * dim + dim)
    memory = meta(2048 * numbers, dtype=dtype)
    cache = memory.as_strided((2048, kv_heads, page, 2 * dim), (numbers, page * 2 * dim, 2 * dim, 1))
    summary = memory.as_strided((2048, kv_heads, dim), (numbers, dim, 1), kv_heads * page * 2 * dim)
    table, lengths = meta(rows, 32768 // page, dtype=torch.int32), meta(rows, dtype=torch.int32)
    q = meta(rows, (group + 2) * kv_heads, dim, dtype=dtype)[:, : group * kv_heads]
    angles = meta(40960, dim, dtype=dtype)
    key_weight, query_weight = meta(kv_heads, 3 * dim, dim, dtype=dtype), meta(kv_heads, group, dim, dim, dtype=dtype)
    end = meta(dim, dtype=dtype), meta(dim // 2, dtype=torch.float32), 1.0
    step = summary, table, lengths, angles, True

    def call() -> None:
        paged.close_blocks(cache, *step, Branch(key_weight, *end), block_size, ("max", "min", "avg"))
        scores, _ = paged.score_pages(q, *step, Branch(query_weight, *end), block_size, page)
        paged.selected_block_table(scores, table, lengths, block_size, page, 4096, 0, 2 * page + 1, 2 * page)

    name = f"paged step {short(dtype)} d{dim} block {block_size} page {page}"
    return Example(name, call, wide=("close_kernel", "paged_score_kernel"))


def scorings() -> Iterator[Example]:
    """Dtypes, head dimensions, groups and block sizes; 8 KV heads, 32k tokens, a gate as wide as a head."""
    for dtype in DTYPES:
        for dim in (64, 128, 256):
            yield score_example(dtype, dim)
    for group in (5, 7, 8, 16):
        yield score_example(torch.bfloat16, 128, group)
    for block_size in (16, 32, 128):
        yield score_example(torch.bfloat16, 128, block_size=block_size)
    yield score_example(torch.bfloat16, 128, gate_dtype=torch.float32)  # gates as they are trained
    for group in (7, 16):
        yield score_example(torch.bfloat16, 128, group, 16, one_query=False)


def score_example(
    dtype: torch.dtype,
    dim: int,
    group: int = 4,
    block_size: int = 64,
    gate_dtype: torch.dtype | None = None,
    one_query: bool = True,
) -> Example:
    """8 rows, a static cache of 32k tokens; a gate query per KV head, or one per query head."""
    gate_dtype = gate_dtype or dtype
    batch, kv_heads = 8, 8
    queries = (kv_heads, group) if one_query else (kv_heads * group, 1)
    q, weight = meta(batch, kv_heads * group, dim, dtype=dtype), meta(*queries, dim, dim, dtype=gate_dtype)
    compressed = meta(batch, kv_heads, 32768 // block_size, dim, dtype=gate_dtype)
    norm_weight, inv_freq = meta(dim, dtype=gate_dtype), meta(dim // 2, dtype=torch.float32)
    lengths = meta(batch, dtype=torch.int64)
    name = f"{short(dtype)} d{dim} group {group} block {block_size}"
    name += f" gate {short(gate_dtype)}" * (gate_dtype != dtype) + " a query per head" * (not one_query)
    return Example(
        f"score_blocks {name}",
        lambda: selection.score(q, lengths, compressed, weight, block_size, norm_weight, inv_freq, 1.0),
        wide=("score_kernel",),
    )


def selections() -> Iterator[Example]:
    """The three rules, from 8k tokens in blocks of 64 to 128k in blocks of 16."""
    for blocks in (128, 512, 2048, 8192):
        for rule in ({"token_budget": 4096}, {"threshold": 4e-3}, {"top_p": 0.95}):
            yield select_example(torch.float32, blocks, rule)
    yield select_example(torch.bfloat16, 512, {"token_budget": 4096})
    for blocks in (128, 512, 2048):  # as decoding does by default
        yield select_example(torch.float32, blocks, {"token_budget": 4096}, sink_blocks=0)


def select_example(dtype: torch.dtype, blocks: int, rule: dict[str, Any], sink_blocks: int = 1) -> Example:
    """8 rows, 8 KV heads, blocks of 64 tokens."""
    scores, lengths = meta(8, 8, blocks, dtype=dtype), meta(8, dtype=torch.int64)
    return Example(
        f"select_blocks {next(iter(rule))} of {blocks} {short(dtype)}" + " without sinks" * (sink_blocks == 0),
        lambda: selection.select(
            scores, lengths, 64, rule.get("token_budget"), rule.get("threshold"), rule.get("top_p"), sink_blocks
        ),
    )


def sparse_decodes() -> Iterator[Example]:
    """Head dimensions, dtypes, blocks in and across tiles, groups, pages, sinks and softcap; one split and several."""
    for dtype in DTYPES:
        for dim in (64, 96, 128, 256):
            if dim * dtype.itemsize <= decode.MAX_ROW_BYTES:
                yield sparse_example(dtype, dim, 64)
                yield sparse_example(dtype, dim, 16)
    for block_size in (32, 128):
        yield sparse_example(torch.bfloat16, 128, block_size)
    for dim in (64, 128, 256):
        yield sparse_example(torch.bfloat16, dim, 64, batch=1)
    yield sparse_example(torch.bfloat16, 128, 64, counted=False)
    for group in (1, 4, 5, 7, 17):
        yield sparse_example(torch.bfloat16, 128, 64, group=group)
    for block_size in (16, 64):
        yield sparse_example(torch.bfloat16, 128, block_size, page=128)
        yield sparse_example(torch.bfloat16, 128, block_size, extras=True)
        yield sparse_example(torch.bfloat16, 128, block_size, batch=64, extras=True)


def sparse_example(
    dtype: torch.dtype,
    dim: int,
    block_size: int,
    *,
    batch: int = 8,
    group: int = 8,
    page: int = 0,
    extras: bool = False,
    counted: bool = True,
) -> Example:
    """A tenth of 32k tokens, 8 KV heads: a cell of the paper's Figure 6 if the group is 8 and the blocks are of 64."""
    kv_heads, capacity = 8, 32768
    selected = math.ceil(capacity / 10 / block_size)
    q = meta(batch, kv_heads * group, dim, dtype=dtype)
    cache, table = cache_of(batch, kv_heads, capacity, dim, page, dtype)
    indices = meta(batch, kv_heads, selected, dtype=torch.int32)
    counts = meta(batch, kv_heads, dtype=torch.int32) if counted else None
    lengths = meta(batch, dtype=torch.int64)
    sinks, softcap = (meta(kv_heads * group, dtype=dtype), 50.0) if extras else (None, None)
    name = f"{short(dtype)} d{dim} block {block_size} group {group} batch {batch}"
    name += f" page {page}" * bool(page) + " sinks softcap" * extras + " uncounted" * (not counted)
    return Example(
        f"sparse_decode {name}",
        partial(
            *(decode.attend, q, cache, cache, dim**-0.5, sinks, softcap, table),
            *(indices, counts, lengths, block_size),
        ),
        products=("decode_kernel",) if dtype != torch.float32 else (),
        wide=("decode_kernel",),
    )


TEACHERS: tuple[tuple[torch.dtype, int, int, int, dict[str, Any]], ...] = (
    # dtype, head dimension, block size, group, sinks and cap
    (torch.bfloat16, 128, 64, 4, {}),
    (torch.bfloat16, 128, 16, 5, {}),  # two heads a tile, three turns
    (torch.bfloat16, 128, 8, 8, {}),
    (torch.float16, 128, 32, 7, {}),
    (torch.bfloat16, 128, 128, 2, {}),
    (torch.float16, 128, 256, 1, {}),
    (torch.bfloat16, 64, 64, 8, {"sinks": True}),
    (torch.bfloat16, 96, 64, 1, {}),
    (torch.bfloat16, 256, 16, 2, {"softcap": 50.0}),
    (torch.bfloat16, 256, 128, 8, {}),
    (torch.float32, 128, 64, 4, {}),
)
"""Configurations to compile: every head dimension, block size and dtype, every way to pack a group."""


def teachers() -> Iterator[Example]:
    """Calls on meta tensors that launch what ships."""
    tokens, kv_heads = 4096, 8
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    for dtype, dim, block_size, group, extras in TEACHERS:
        heads = kv_heads * group
        q = meta(tokens, heads, dim, dtype=dtype)
        k = meta(tokens, kv_heads, dim, dtype=dtype)
        sinks = meta(heads, dtype=dtype) if "sinks" in extras else None
        pack = Pack(q, k, cu_seqlens, dim**-0.5, sinks, extras.get("softcap"))
        name = f"{short(dtype)} d{dim} b{block_size} g{group}"
        products = ("attention_kernel", "maxima_kernel") if dtype != torch.float32 else ()
        yield Example(
            f"attention_with_block_targets {name}",
            partial(teacher.attention_with_block_targets, pack, k, block_size),
            products[:1],
            ("attention_kernel",),
        )
        yield Example(
            f"block targets from lse {name}",
            partial(_from_lse, pack._replace(sm_scale=1.0), block_size),
            products[1:],
            ("maxima_kernel",),
        )


def _from_lse(pack: Pack, block_size: int) -> None:
    """Block targets as `gate_kl` computes them when the log-sum-exp is known."""
    q, side = pack.q, teacher.Teacher(pack, block_size)
    pieces = packs.whole_segments(packs.segments(pack.cu_seqlens, len(q)))
    (tiles,) = packs.to_device([packs.row_tiles(pieces, side.launch().rows, packed=True)], q.device)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    width = -(-q.shape[0] // block_size)
    side.maxima(tiles, lse, lse.new_empty(q.shape[0], side.kv_heads, width), 1)
