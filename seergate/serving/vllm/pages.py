"""vLLM's paged caches: how the keys of a page are read, and how each KV head attends to its own pages.

To the stock kernel, every KV head is a separate sequence with its own block table. Viewed as a cache with one head,
the same memory has page ``p`` of head ``k`` at place ``p * page_step + k * head_step``, in every layout. Cached keys
are already rotated, so the order of pages does not matter; the current page comes last, because it may be incomplete.

Shape suffixes: P pages, K KV heads, S tokens per page, D head dimension, W width of a block's summary, R rows, N
blocks, r pages of a block, Q sequences (R * K), X pages read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seergate.errors import SeergateError
from seergate.serving.common.rows import PagedRows


class Pages(ABC):
    """The cache of a layer, ``[P, K, S, 2 * D]``.

    Args:
        impl: the stock attention of the layer.
        layer: vLLM's module that contains it.
        cache: the layer's cache.
        width: W; 0 without summaries.

    Attributes:
        heads, size, dim: K, S and D.
        page_step, head_step: see the module's docstring.
        unit, places: distance between adjacent places, in elements, and number of places.
        summary_PKW: summaries of blocks, stored in the cache after the keys and values of each page.
        summary_rows, summary_steps: the same memory as rows of W elements, and its strides, in rows, from page to page
            and from head to head.
    """

    def __init__(self, impl: Any, layer: Any, cache: Tensor, width: int = 0) -> None:
        # A view, because the cache itself is the weak key by which this object is stored.
        self.impl, self.layer, self.cache = impl, layer, cache.view(cache.shape)
        pages, self.heads, self.size, twice = cache.shape
        self.dim = twice // 2
        page, head = cache.stride()[:2]
        self.unit = math.gcd(page, head)
        self.page_step, self.head_step = page // self.unit, head // self.unit
        self.places = (pages - 1) * self.page_step + (self.heads - 1) * self.head_step + 1
        if self.places >= 2**31:
            raise SeergateError(
                f"the cache of a layer has {self.places} places of pages; a block table holds numbers below 2^31: "
                "lower num_gpu_blocks_override or set VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        start = cache.storage_offset() + self.heads * self.size * twice
        self.summary_PKW = cache.as_strided((pages, self.heads, width), (page, width, 1), start)
        # Rows may overlap where a page is not a multiple of W.
        unit = math.gcd(page, width)
        self.summary_steps = page // unit, width // unit
        rows = (pages - 1) * self.summary_steps[0] + (self.heads - 1) * self.summary_steps[1] + 1
        self.summary_rows = cache.as_strided((rows, width), (unit, 1), start)
        shape, strides, apart = self.layout()
        offset = cache.storage_offset()
        self.keys, self.values = (cache.as_strided(shape, strides, offset + part) for part in (0, apart))

    def read_summaries(self, rows: PagedRows) -> Tensor:
        """The summaries ``[R, K, N, W]`` of the rows' blocks."""
        key = "summaries", self.heads, self.summary_steps
        last_RKN = rows.once(key, lambda: self._places(rows.table_RNr[..., -1:], *self.summary_steps)[..., 0])
        return F.embedding(last_RKN, self.summary_rows)

    def table(self, rows: PagedRows, indices_RKX: Tensor) -> Tensor:
        """The places ``[Q, X * r]`` of selected blocks, int32. For the padding of a selection, any place."""
        steps = self.page_step, self.head_step
        key, device = (self.heads, steps), indices_RKX.device
        table_RKNr = rows.once(("places", key), lambda: self._places(rows.table_RNr, *steps).int())
        heads_K1 = rows.once(("heads", key), lambda: torch.arange(self.heads, device=device)[:, None])
        chosen_RKXr = table_RKNr[rows.each[:, None, None], heads_K1, indices_RKX]  # padding has the index -1
        return chosen_RKXr.view(len(rows) * self.heads, -1)

    def _places(self, table_RNr: Tensor, page_step: int, head_step: int) -> Tensor:
        """The places ``[R, K, N, r]`` of pages, int64."""
        head_K11 = torch.arange(self.heads, device=table_RNr.device)[:, None, None] * head_step
        return table_RNr[:, None] * page_step + head_K11

    @abstractmethod
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Shape and strides of the keys at all places, as the kernel expects them, and the offset of the values."""

    @abstractmethod
    def read(self, pages_N: Tensor) -> Tensor:
        """The keys ``[N, K, S, D]`` of some pages."""

    @abstractmethod
    def schedule(self, query_QGD: Tensor, table_QX: Tensor, lengths_Q: Tensor) -> Any:
        """The kernel's schedule for sequences with one query each; layers with equal lengths share it."""

    @abstractmethod
    def attend(
        self, query_QGD: Tensor, table_QX: Tensor, lengths_Q: Tensor, schedule: Any, output_QGD: Tensor
    ) -> None:
        """Compute attention of each sequence's newest query over the pages in its table, into ``output_QGD``."""


class CPUPages(Pages):
    """The cache of vLLM's CPU backend, where keys are packed within a page for the instruction set."""

    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        numbers = self.size * self.dim
        return (self.places, 1, self.size, self.dim), (self.unit, 2 * numbers, self.dim, 1), numbers

    def read(self, pages_N: Tensor) -> Tensor:
        packed = self.cache.flatten(2)[..., : self.size * self.dim][pages_N]
        order = packed_order(self.size, self.dim, self.cache.dtype, self.layer.isa)
        return packed[..., order].unflatten(-1, (self.size, self.dim))

    def schedule(self, query_QGD: Tensor, table_QX: Tensor, lengths_Q: Tensor) -> tuple[Tensor, Tensor]:
        from vllm import _custom_ops as ops

        starts = torch.arange(len(lengths_Q) + 1, dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths_Q),
            num_heads=query_QGD.shape[1],
            num_kv_heads=1,
            head_dim=self.dim,
            seq_lens=lengths_Q,
            dtype=query_QGD.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.layer.isa,
            enable_kv_split=True,
            kv_cache_dtype=self.impl.kv_cache_dtype,
        )
        return starts, plan

    def attend(
        self,
        query_QGD: Tensor,
        table_QX: Tensor,
        lengths_Q: Tensor,
        schedule: tuple[Tensor, Tensor],
        output_QGD: Tensor,
    ) -> None:
        from vllm import _custom_ops as ops

        starts, plan = schedule
        ops.cpu_attention_with_kv_cache(
            query=query_QGD,
            key_cache=self.keys,
            value_cache=self.values,
            output=output_QGD,
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


@cache
def packed_order(size: int, dim: int, dtype: torch.dtype, isa: str) -> Tensor:
    """Where each element of a page's keys ``[S, D]`` is in memory on a CPU. Found by letting vLLM's kernel write every
    element's index, one base-128 digit at a time because the cache's dtype holds few integers exactly.
    """
    from vllm import _custom_ops as ops

    index = torch.arange(size * dim)
    stored_index = torch.zeros_like(index)
    slots, scale = torch.arange(size), 1
    while scale <= index[-1]:
        digits = (index // scale % 128).to(dtype).view(size, 1, dim)
        page = torch.zeros(1, 1, 2 * size, dim, dtype=dtype)
        keys, values = page.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(digits, digits, keys, values, slots, isa)
        stored_index += keys.flatten().long() * scale
        scale *= 128
    order = stored_index.argsort()
    assert torch.equal(stored_index[order], index), "the keys of a page are not a permutation of what was written"
    return order


class FlashPages(Pages):
    """The cache of vLLM's FlashAttention backend, in any memory layout. Not yet run on a GPU."""

    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        return (self.places, self.size, 1, self.dim), (self.unit, self.cache.stride(2), self.dim, 1), self.dim

    def read(self, pages_N: Tensor) -> Tensor:
        return self.cache[..., : self.dim][pages_N]

    def schedule(self, query_QGD: Tensor, table_QX: Tensor, lengths_Q: Tensor) -> tuple[Tensor, Tensor | None]:
        from vllm.v1.attention.backends import fa_utils

        starts = torch.arange(len(lengths_Q) + 1, dtype=torch.int32, device=lengths_Q.device)
        if self.impl.vllm_flash_attn_version != 3:  # other versions schedule within each call
            return starts, None
        plan = fa_utils.get_scheduler_metadata(
            batch_size=len(lengths_Q),
            max_seqlen_q=1,
            max_seqlen_k=table_QX.shape[1] * self.size,
            num_heads_q=query_QGD.shape[1],
            num_heads_kv=1,
            headdim=self.dim,
            cache_seqlens=lengths_Q,
            qkv_dtype=query_QGD.dtype,
            cu_seqlens_q=starts,
            page_size=self.size,
            causal=True,
            num_splits=0,  # FlashAttention chooses
        )
        return starts, plan

    def attend(
        self,
        query_QGD: Tensor,
        table_QX: Tensor,
        lengths_Q: Tensor,
        schedule: tuple[Tensor, Tensor | None],
        output_QGD: Tensor,
    ) -> None:
        from vllm.v1.attention.backends import fa_utils

        starts, plan = schedule
        fa_utils.flash_attn_varlen_func(
            q=query_QGD,
            k=self.keys,
            v=self.values,
            out=output_QGD,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lengths_Q,
            max_seqlen_k=table_QX.shape[1] * self.size,
            softmax_scale=self.impl.scale,
            causal=True,
            block_table=table_QX,
            softcap=self.impl.logits_soft_cap,
            scheduler_metadata=plan,
            num_splits=0,
            fa_version=self.impl.vllm_flash_attn_version,
        )


PAGES: dict[str, type[Pages]] = {"CPU_ATTN": CPUPages, "FLASH_ATTN": FlashPages}
"""Name of vLLM's attention backend -> class of its cache."""
