"""vLLM's paged caches: how a page's keys are read, and how each KV head attends to pages of its own.

Every KV head is a sequence of its own for the stock kernel, with a block table of its own: the same memory seen as a
cache with one head has page ``p`` of head ``k`` at place ``p * step + k``. Keys carry their
RoPE already, so the order of pages does not matter; the current one comes last, because it is not full.

Shape suffixes: P pages, K KV heads, S tokens per page, D head dimension, R rows, Q sequences (R * K), X pages read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Pages(ABC):
    """The cache of a layer, ``[P, K, S, 2 * D]``.

    Args:
        impl: the stock attention of the layer.
        layer: vLLM's module around it.
        cache: the layer's.

    Attributes:
        pages, heads, size, dim: how many pages and KV heads there are, S and D.
        step: see above.
    """

    step: int

    def __init__(self, impl: Any, layer: Any, cache: Tensor) -> None:
        self.impl, self.layer, self.cache = impl, layer, cache
        self.pages, self.heads, self.size, twice = cache.shape
        self.dim = twice // 2

    @abstractmethod
    def read(self, pages_N: Tensor) -> Tensor:
        """The keys ``[N, K, S, D]`` of some pages."""

    @abstractmethod
    def schedule(self, lengths_Q: Tensor, dtype: torch.dtype) -> Any:
        """What the kernel wants to know of sequences with one query each; the same for all layers."""

    @abstractmethod
    def attend(self, query_RHD: Tensor, table_QX: Tensor, lengths_Q: Tensor, schedule: Any) -> Tensor:
        """Attention of each row's newest query to the pages in its heads' tables: ``[R, H, D]``."""


class CPUPages(Pages):
    """The cache of vLLM's CPU backend: within a page, keys are packed for the processor."""

    def __init__(self, impl: Any, layer: Any, cache: Tensor) -> None:
        super().__init__(impl, layer, cache)
        self.step = self.heads
        self.keys, self.values = cache.view(self.pages * self.heads, 1, 2 * self.size, self.dim).chunk(2, dim=2)
        self.order = self._order()

    def read(self, pages_N: Tensor) -> Tensor:
        packed = self.cache[pages_N].flatten(2)[..., : self.size * self.dim]
        return packed[..., self.order].unflatten(-1, (self.size, self.dim))

    def schedule(self, lengths_Q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        from vllm import _custom_ops as ops

        starts = torch.arange(len(lengths_Q) + 1, dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths_Q),
            num_heads=self.impl.num_heads // self.heads,
            num_kv_heads=1,
            head_dim=self.dim,
            seq_lens=lengths_Q,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.layer.isa,
            enable_kv_split=True,
            kv_cache_dtype=self.impl.kv_cache_dtype,
        )
        return starts, plan

    def attend(
        self, query_RHD: Tensor, table_QX: Tensor, lengths_Q: Tensor, schedule: tuple[Tensor, Tensor]
    ) -> Tensor:
        from vllm import _custom_ops as ops

        query = query_RHD.contiguous().view(len(lengths_Q), -1, self.dim)
        output = torch.empty_like(query)
        starts, plan = schedule
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.keys,
            value_cache=self.values,
            output=output,
            query_start_loc=starts,
            seq_lens=lengths_Q,
            scale=self.impl.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table_QX,
            softcap=self.impl.logits_soft_cap,
            scheduler_metadata=plan,
            s_aux=None,
            k_scale=self.layer._k_scale_float,
            v_scale=self.layer._v_scale_float,
            kv_cache_dtype=self.impl.kv_cache_dtype,
        )
        return output.view_as(query_RHD)

    def _order(self) -> Tensor:
        """Where each number of a page's keys ``[S, D]`` lies in memory: what the kernel's own writing does to numbers
        that say where they belong, digit by digit, because the cache may hold few different numbers exactly.
        """
        from vllm import _custom_ops as ops

        index = torch.arange(self.size * self.dim)
        found = torch.zeros_like(index)
        slots, scale = torch.arange(self.size), 1
        while scale <= index[-1]:
            digits = (index // scale % 128).to(self.cache.dtype).view(self.size, 1, self.dim)
            page = torch.zeros(1, 1, 2 * self.size, self.dim, dtype=self.cache.dtype)
            keys, values = page.chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(digits, digits, keys, values, slots, self.layer.isa)
            found += keys.flatten().long() * scale
            scale *= 128
        order = found.argsort()
        assert torch.equal(found[order], index), "the keys of a page are not a permutation of what was written"
        return order


class FlashPages(Pages):
    """The cache of vLLM's FlashAttention backend, in whatever order in memory. Not run on a GPU."""

    def __init__(self, impl: Any, layer: Any, cache: Tensor) -> None:
        super().__init__(impl, layer, cache)
        self.step = cache.stride(0) // cache.stride(1)
        strides = (cache.stride(1), cache.stride(2), self.dim, 1)
        shape = ((self.pages - 1) * self.step + self.heads, self.size, 1, self.dim)
        offset = cache.storage_offset()
        self.keys, self.values = (cache.as_strided(shape, strides, offset + part) for part in (0, self.dim))

    def read(self, pages_N: Tensor) -> Tensor:
        return self.cache[pages_N][..., : self.dim]

    def schedule(self, lengths_Q: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.arange(len(lengths_Q) + 1, dtype=torch.int32, device=lengths_Q.device)

    def attend(self, query_RHD: Tensor, table_QX: Tensor, lengths_Q: Tensor, schedule: Tensor) -> Tensor:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        query = query_RHD.contiguous().view(len(lengths_Q), -1, self.dim)
        output = torch.empty_like(query)
        flash_attn_varlen_func(
            q=query,
            k=self.keys,
            v=self.values,
            out=output,
            cu_seqlens_q=schedule,
            max_seqlen_q=1,
            seqused_k=lengths_Q,
            max_seqlen_k=table_QX.shape[1] * self.size,
            softmax_scale=self.impl.scale,
            causal=True,
            block_table=table_QX,
            softcap=self.impl.logits_soft_cap,
            fa_version=self.impl.vllm_flash_attn_version,
        )
        return output.view_as(query_RHD)


PAGES: dict[str, type[Pages]] = {"CPU_ATTN": CPUPages, "FLASH_ATTN": FlashPages}
"""Attention backend of vLLM -> its cache."""
