"""vLLM's FlashAttention backend on CPUs: its kernels in PyTorch, which refuse what the compiled ones would."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backends import fa_utils, flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum

UNUSED = ("alibi_slopes", "dynamic_causal", "s_aux", "mask_mod", "aux_tensors")


def flash_attn_varlen_func(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
    softcap: float,
    fa_version: int,
    scheduler_metadata: Any,
    num_splits: int,
    window_size: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    **unused: Any,
) -> None:
    """Causal attention to pages, with the checks of hopper/flash_api.cpp in vllm-project/flash-attention."""
    assert causal and not softcap and window_size in (None, [-1, -1])
    assert all(name in UNUSED and value is None for name, value in unused.items())
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert {block_table.dtype, seqused_k.dtype, cu_seqlens_q.dtype} == {torch.int32}
    assert q.shape == out.shape and k.shape == v.shape and q.shape[1] % k.shape[2] == 0
    assert len(block_table) == len(seqused_k) == len(cu_seqlens_q) - 1
    assert scheduler_metadata == (len(seqused_k), max_seqlen_q, max_seqlen_k, q.shape[1:], k.shape[1:3], num_splits)
    assert all(x.is_contiguous() for x in (cu_seqlens_q, seqused_k, block_table)) and q.stride(-1) == 1
    for cache in (k, v):
        assert cache.stride(-1) == 1 and not any(step * cache.element_size() % 16 for step in cache.stride()[:-1])
    assert max_seqlen_k <= block_table.shape[1] * k.shape[1]
    if max_seqlen_q == 1:  # nothing is read back, as in a graph
        out.copy_(attended(q[:, None], k, v, block_table, seqused_k, softmax_scale)[:, 0])
        return
    for row, (first, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        assert end - first <= max_seqlen_q and int(seqused_k[row]) <= max_seqlen_k
        here = slice(row, row + 1)
        out[first:end] = attended(q[first:end][None], k, v, block_table[here], seqused_k[here], softmax_scale)[0]


def attended(query: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Attention of the last queries ``[Q, S, H, D]`` of sequences of ``lengths [Q]`` tokens."""
    group, queries = query.shape[2] // k.shape[2], query.shape[1]
    keys, values = (
        x[table.long()].flatten(1, 2).float().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v)
    )  # [Q, H, T, D]
    last = lengths[:, None] - queries + torch.arange(queries)
    seen = torch.arange(keys.shape[2]) <= last[..., None]
    scores = (query.float().transpose(1, 2) @ keys.transpose(2, 3)) * scale
    values = values.masked_fill(~seen[:, -1, :, None][:, None], 0)
    shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return (shares @ values).transpose(1, 2).to(query.dtype)


def get_scheduler_metadata(
    *,
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype,
    cu_seqlens_q: Tensor,
    page_size: int,
    causal: bool,
    num_splits: int,
    window_size: Any = None,
) -> Any:
    """The sizes of a schedule, which `flash_attn_varlen_func` compares with its own."""
    assert len(cache_seqlens) == len(cu_seqlens_q) - 1 == batch_size and causal and window_size in (None, (-1, -1))
    return batch_size, max_seqlen_q, max_seqlen_k, (num_heads_q, headdim), (page_size, num_heads_kv), num_splits


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *rest: Any
) -> None:
    """Write tokens to slots of pages ``[pages, page, K, D]``; negative slots are padding."""
    rows = (slots >= 0).nonzero()[:, 0]
    page, place = slots[rows] // key_cache.shape[1], slots[rows] % key_cache.shape[1]
    key_cache[page, place], value_cache[page, place] = key[rows], value[rows]


def use_kernels(patch: pytest.MonkeyPatch) -> None:
    """Put the kernels where vLLM and seergate look for them."""
    for kernel in (flash_attn_varlen_func, get_scheduler_metadata, reshape_and_cache_flash):
        for module in (fa_utils, flash_attn):
            patch.setattr(module, kernel.__name__, kernel, raising=False)


def use_backend(patch: pytest.MonkeyPatch) -> None:
    """Have engines on CPUs take FlashAttention's backend, version 3."""
    use_kernels(patch)
    path = AttentionBackendEnum.FLASH_ATTN.get_path()
    patch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(lambda cls, *args, **named: path))
    patch.setattr(selector, "_cached_get_attn_backend", selector._cached_get_attn_backend.__wrapped__)
    patch.setattr(flash_attn, "get_flash_attn_version", lambda *args, **named: 3)
    patch.setattr(flash_attn, "flash_attn_supports_quant_query_input", lambda: False)
