"""`dense_decode` in Triton: the kernels of `sparse_decode` without a selection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from seergate.ops.triton_impl.decode_kernels import decode_kernel
from seergate.ops.triton_impl.example import Example, meta
from seergate.ops.triton_impl.sparse_decode import DTYPES, MAX_ROW_BYTES, attend, decode_work, supports


@torch.no_grad()
def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    sm_scale: float,
    *,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
) -> Tensor:
    """See `seergate.ops.dense_decode`."""
    if not supports(q, v):
        from seergate.ops.torch_impl.dense_decode import dense_decode as in_torch

        return in_torch(q, k, v, lengths, sm_scale, sinks=sinks, softcap=softcap, page_table=page_table)
    run = _dense_decode if torch.compiler.is_compiling() else attend_to_all  # as one node, which takes 10 us longer
    return run(q, k, v, lengths, sm_scale, sinks, softcap, page_table)


def attend_to_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    sm_scale: float,
    sinks: Tensor | None,
    softcap: float | None,
    page_table: Tensor | None,
) -> Tensor:
    """`attend` without a selection."""
    return attend(q, k, v, None, lengths, 1, sm_scale, sinks, softcap, page_table)


_dense_decode = torch.library.custom_op(
    "seergate::dense_decode",
    attend_to_all,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? lengths, float sm_scale, Tensor? sinks, float? softcap, "
        "Tensor? page_table) -> Tensor"
    ),
)
_dense_decode.register_fake(lambda q, k, v, *_: q.new_empty(*q.shape[:2], v.shape[-1]))


def examples() -> Iterator[Example]:
    """Head dimensions and dtypes, and a paged cache."""
    for dtype in DTYPES:
        for dim in (64, 96, 128, 256):
            if dim * dtype.itemsize <= MAX_ROW_BYTES:
                yield dense_example(dtype, dim)
    yield dense_example(torch.bfloat16, 128, page=16)
    yield dense_example(torch.bfloat16, 128, page=64)


def dense_example(dtype: torch.dtype, dim: int, page: int = 0) -> Example:
    """32k tokens, 8 rows, 64 query and 8 KV heads."""
    batch, kv_heads, capacity = 8, 8, 32768
    q = meta(batch, 8 * kv_heads, dim, dtype=dtype)
    cache = meta(batch, kv_heads, capacity, dim, dtype=dtype)
    table = None
    if page:
        cache = meta(batch * capacity // page, kv_heads, page, dim, dtype=dtype)
        table = meta(batch, capacity // page, dtype=torch.int32)
    lengths = meta(batch, dtype=torch.int64)
    return Example(
        f"dense_decode {str(dtype).removeprefix('torch.')} d{dim}" + f" page {page}" * bool(page),
        lambda: attend(q, cache, cache, None, lengths, 1, dim**-0.5, None, None, table),
        decode_work(q, kv_heads, capacity),
        products=(decode_kernel.__name__,) if dtype != torch.float32 else (),
        wide=(decode_kernel.__name__,),
    )
