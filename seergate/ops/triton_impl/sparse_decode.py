"""`sparse_decode` in Triton. Kernels: `decode_kernels`; how they are launched: `decode_launch`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from seergate.ops.triton_impl.decode_kernels import decode_kernel, merge_kernel
from seergate.ops.triton_impl.decode_launch import decode_launch, padded
from seergate.ops.triton_impl.example import Example, Work, meta
from seergate.ops.triton_impl.gpus import gpu_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROW_BYTES = 512
"""Of a key or value: head dimension 256 in 16 bits, 128 in fp32. The registers hold no more."""

LOG2_E = math.log2(math.e)


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these numbers and sizes; where they do not, the torch backend runs."""
    return q.dtype in DTYPES and max(q.shape[-1], v.shape[-1]) * q.element_size() <= MAX_ROW_BYTES


@torch.no_grad()
def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    lengths: Tensor,
    block_size: int,
    sm_scale: float,
    *,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
) -> Tensor:
    """See `seergate.ops.sparse_decode`."""
    if not supports(q, v):
        from seergate.ops.torch_impl.sparse_decode import sparse_decode as in_torch

        return in_torch(
            q, k, v, indices, lengths, block_size, sm_scale, sinks=sinks, softcap=softcap, page_table=page_table
        )
    run = _sparse_decode if torch.compiler.is_compiling() else attend  # as one node, which takes 10 us longer
    return run(q, k, v, indices, lengths, block_size, sm_scale, sinks, softcap, page_table)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor | None,
    lengths: Tensor | None,
    block_size: int,
    sm_scale: float,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
) -> Tensor:
    """Attention of one token per row, ``[B, H, dv]``, to the selected blocks, or to all tokens if there are no
    indices.

    Two launches, or one if the rows and heads alone occupy the GPU. Nothing waits for the device, and no size depends
    on what lies on it, so this can be captured in a CUDA graph.
    """
    (batch, heads, dim), (kv_heads, cached), value_dim = q.shape, k.shape[1:3], v.shape[-1]
    group, capacity = heads // kv_heads, cached if page_table is None else cached * page_table.shape[1]
    selected = 0 if indices is None else indices.shape[-1]
    limit = capacity if indices is None else min(capacity, selected * block_size)
    out = q.new_empty(batch, heads, value_dim)
    if out.numel() == 0 or limit == 0:
        return out.zero_()
    tile, splits, num_warps, num_stages = decode_launch(
        batch * kv_heads, limit, dim, value_dim, q.element_size(), gpu_of(q.device)
    )
    lengths, sinks, page_table = (None if x is None else x.contiguous() for x in (lengths, sinks, page_table))
    alone = splits == 1
    partial = out if alone else q.new_empty(batch, heads, splits, value_dim, dtype=torch.float32)
    lse = None if alone else q.new_empty(batch, heads, splits, dtype=torch.float32)
    aligned = (indices is None or block_size % tile == 0) and (page_table is None or cached % tile == 0)
    decode_kernel[(batch, kv_heads, splits)](
        q, k, v, indices, lengths, page_table, sinks, partial, lse,
        *q.stride(), *k.stride(), *v.stride(), *((0, 0, 0) if indices is None else indices.stride()),
        0 if page_table is None else page_table.stride(0), selected, capacity, splits,
        sm_scale * LOG2_E * (1.0 if softcap is None else 2.0 / softcap), LOG2_E * (softcap or 1.0),
        HAS_CAP=softcap is not None, GROUP=group, ROWS=padded(group), DIM=dim, PADDED_DIM=padded(dim),
        VALUE_DIM=value_dim, PADDED_VALUE_DIM=padded(value_dim), BLOCK_SIZE=block_size,
        PAGE_SIZE=0 if page_table is None else cached, TILE=tile, ALONE=alone, ALIGNED=aligned,
        CHUNK=min(1024, padded(selected)), PRECISION="ieee", num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if lse is not None:
        merge_kernel[(batch * heads,)](
            partial, lse, sinks, out, heads, splits, VALUE_DIM=value_dim, PADDED_VALUE_DIM=padded(value_dim),
            PADDED_SPLITS=padded(splits, 2), num_warps=4,
        )  # fmt: skip
    return out


_sparse_decode = torch.library.custom_op(
    "seergate::sparse_decode",
    attend,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor lengths, int block_size, float sm_scale, "
        "Tensor? sinks, float? softcap, Tensor? page_table) -> Tensor"
    ),
)
_sparse_decode.register_fake(lambda q, k, v, *_: q.new_empty(*q.shape[:2], v.shape[-1]))


def examples() -> Iterator[Example]:
    """Head dimensions, dtypes, blocks in and across tiles, groups, pages, sinks and softcap; one split and several."""
    for dtype in DTYPES:
        for dim in (64, 96, 128, 256):
            if dim * dtype.itemsize <= MAX_ROW_BYTES:
                yield sparse_example(dtype, dim, 64)
                yield sparse_example(dtype, dim, 16)
    for block_size in (32, 128):
        yield sparse_example(torch.bfloat16, 128, block_size)
    for dim in (64, 128, 256):
        yield sparse_example(torch.bfloat16, dim, 64, batch=1)
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
) -> Example:
    """A tenth of 32k tokens, 8 KV heads: a cell of the paper's Figure 6 if the group is 8 and the blocks are of 64."""
    kv_heads, capacity = 8, 32768
    selected = math.ceil(capacity / 10 / block_size)
    q = meta(batch, kv_heads * group, dim, dtype=dtype)
    cache = meta(batch, kv_heads, capacity, dim, dtype=dtype)
    table = None
    if page:
        cache = meta(batch * capacity // page, kv_heads, page, dim, dtype=dtype)
        table = meta(batch, capacity // page, dtype=torch.int32)
    indices = meta(batch, kv_heads, selected, dtype=torch.int32)
    lengths = meta(batch, dtype=torch.int64)
    sinks, softcap = (meta(kv_heads * group, dtype=dtype), 50.0) if extras else (None, None)
    name = f"{str(dtype).removeprefix('torch.')} d{dim} block {block_size} group {group} batch {batch}"
    name += f" page {page}" * bool(page) + " sinks softcap" * extras
    return Example(
        f"sparse_decode {name}",
        lambda: attend(q, cache, cache, indices, lengths, block_size, dim**-0.5, sinks, softcap, table),
        decode_work(q, kv_heads, selected * block_size),
        products=(decode_kernel.__name__,) if dtype != torch.float32 else (),
        wide=(decode_kernel.__name__,),
    )


def decode_work(q: Tensor, kv_heads: int, tokens: int) -> dict[str, Work]:
    """Keys and values are read once; scores and weighted values are a product each. Partial results stay in the L2."""
    batch, heads, dim = q.shape
    launch = decode_launch(batch * kv_heads, tokens, dim, dim, q.element_size(), gpu_of(q.device))
    read = 2.0 * batch * kv_heads * tokens * dim * q.element_size()
    return {
        decode_kernel.__name__: Work(
            read,
            4.0 * batch * heads * tokens * dim,
            turns=math.ceil(tokens / launch.tile / launch.splits),
            fp32=q.dtype == torch.float32,
        ),
        merge_kernel.__name__: Work(float(q.numel() * q.element_size())),
    }
