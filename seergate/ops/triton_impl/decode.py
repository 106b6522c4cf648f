"""`sparse_decode` and `dense_decode` in Triton. Kernels: `decode_kernels`; launch parameters: `launch`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seergate.inference_mode import without_gradients
from seergate.ops.custom_op import custom_op
from seergate.ops.decode import DecodeInputs
from seergate.ops.rows import RowLengths
from seergate.ops.triton_impl.decode_kernels import decode_kernel, merge_kernel
from seergate.ops.triton_impl.gpus import gpu_of
from seergate.ops.triton_impl.launch import DTYPES, decode_launch, padded

LOG2_E = math.log2(math.e)
MAX_ROW_BYTES = 512
"""Size of the largest key or value that fits in registers: head dimension 256 in 16 bits, 128 in fp32."""


@without_gradients
def sparse_decode(
    inputs: DecodeInputs, indices: Tensor | None, counts: Tensor | None, rows: RowLengths | None, block_size: int
) -> Tensor:
    """The op on checked arguments; heads that are float64 or exceed `MAX_ROW_BYTES` run in the torch backend."""
    q, v = inputs.q, inputs.v
    if q.dtype not in DTYPES or max(q.shape[-1], v.shape[-1]) * q.element_size() > MAX_ROW_BYTES:
        return NotImplemented
    return attend(*inputs, indices, counts, None if rows is None else rows.tensor, block_size)


def dense_decode(inputs: DecodeInputs, rows: RowLengths | None) -> Tensor:
    """The op on checked arguments, by the kernels of `sparse_decode` without a selection."""
    return sparse_decode(inputs, None, None, rows, 1)


@custom_op(
    "decode_attention(Tensor q, Tensor k, Tensor v, float sm_scale, Tensor? sinks, float? softcap, "
    "Tensor? page_table, Tensor? indices, Tensor? counts, Tensor? lengths, int block_size) -> Tensor",
    lambda q, k, v, *_: q.new_empty(*q.shape[:2], v.shape[-1]),
)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
    indices: Tensor | None,
    counts: Tensor | None,
    lengths: Tensor | None,
    block_size: int,
) -> Tensor:
    """Attention of one token per row, ``[B, H, dv]``, to the selected blocks, or without ``indices`` to all tokens.

    Two launches, or one if rows x heads suffices to fill the GPU. Nothing waits for the device and no size depends on
    values there, so this can be captured in a CUDA graph.
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
    lengths, sinks, page_table, counts = (
        None if x is None else x.contiguous() for x in (lengths, sinks, page_table, counts)
    )
    alone = splits == 1
    partial = out if alone else q.new_empty(batch, heads, splits, value_dim, dtype=torch.float32)
    lse = None if alone else q.new_empty(batch, heads, splits, dtype=torch.float32)
    aligned = (indices is None or block_size % tile == 0) and (page_table is None or cached % tile == 0)
    decode_kernel[(batch, kv_heads, splits)](
        q, k, v, indices, counts, lengths, page_table, sinks, partial, lse,
        *q.stride(), *k.stride(), *v.stride(), *((0, 0, 0) if indices is None else indices.stride()),
        0 if page_table is None else page_table.stride(0), selected, capacity, splits,
        sm_scale * (LOG2_E if softcap is None else 1.0), softcap or 1.0,
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
