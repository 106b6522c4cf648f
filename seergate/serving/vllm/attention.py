"""Attention of a gated layer inside vLLM: dense for prefill, block-sparse for rows that decode.

All layers share the `Plan` of a step. It is made on the host with vLLM's own metadata or, if all rows decode and a
CUDA graph captures the step, on the device. Each layer first computes the summaries of the blocks that the step
completes. Then decoding rows read the blocks that the method selects; all other rows read what they would read without
seergate. A request with drafts to verify has one row per token of the step, each as long as if decoded alone.

Shape suffixes: R rows that decode sparsely, B requests, C completed blocks, N blocks of the longest row, r
pages of a block, K KV heads, X blocks read, others as in `seergate.serving.common.scoring`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seergate.errors import SeergateError
from seergate.methods import SelectingMethod
from seergate.serving.common.rows import PagedRows
from seergate.serving.common.scoring import GateScores, Scores
from seergate.serving.vllm.pages import PAGES, Pages

SCORED_BYTES = 256 << 20
"""Limit of the memory for scoring, in bytes; vLLM's memory planning does not include it."""
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""vLLM's names of the supported cache layouts, best first: layers, pages (B), heads, tokens (N), channels."""


@dataclass(eq=False)
class Counts:
    """Statistics, on the device so that CUDA graphs update them. Layers of a builder share them if all read as much.

    Attributes:
        read, held: tokens that decoding rows have read so far, and tokens that they held, both summed over the KV
            heads of a layer.
    """

    read: Tensor
    held: Tensor


@dataclass(kw_only=True)
class Step:
    """State that layers share in a step; a complete plan if kernels read vLLM's own lengths and block tables.

    Attributes:
        held, read_all: tokens held by all decoding rows, and by those of them that have dense attention.
        shared: lengths and schedule of the sparse rows' sequences, if they are the same in all layers.
        counted: the statistics to which this step has been added.
        chosen: the last anchor layer -> its blocks, which layers above it reuse (`SparseAttention.anchor`).
    """

    held: int | Tensor
    read_all: int | Tensor
    shared: tuple[Tensor, Any] | None = None
    counted: list[Counts] = field(default_factory=list)
    chosen: dict[Any, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Plan(Step):
    """The blocks that a step completes, and the rows that read sparsely.

    Attributes:
        closed_Cr, starts_C: pages of the completed blocks, and the positions of their first tokens.
        tokens_R, rows: indices in the batch of the tokens with sparse attention, and their lengths and pages.
        sparse_B: the requests whose tokens all have sparse attention.
        dense: vLLM's metadata for the other requests, in which the requests ``sparse_B`` are cut to their new tokens;
            ``None`` if there are no others.
    """

    closed_Cr: Tensor
    starts_C: Tensor
    tokens_R: Tensor
    rows: PagedRows
    sparse_B: Tensor
    dense: Any


def plan_of(metadata: Any, common: Any, method: SelectingMethod, page: int, drafts: int = 0) -> Plan:
    """Plan a step from vLLM's metadata for the layers' backend (``metadata``) and for all backends (``common``).

    Rows that fit into the method's budget have dense attention. A request with more than ``1 + drafts`` new tokens is
    handled like a prompt.
    """
    from vllm.utils.torch_utils import async_tensor_h2d

    size, run = method.block_size, method.block_size // page
    on_host = common.seq_lens if common.seq_lens.is_cpu else common.seq_lens_cpu_upper_bound
    lengths = on_host[: common.num_reqs].numpy().astype(np.int64)
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy().astype(np.int64)
    queries = np.diff(starts)
    table = metadata.block_table.long()

    def here(array: np.ndarray) -> Tensor:
        return async_tensor_h2d(array, table.device)

    before, after = (lengths - queries) // size, lengths // size
    closed = np.repeat(np.arange(len(lengths)), after - before)
    blocks = np.arange(len(closed)) - np.repeat(np.cumsum(after - before) - after, after - before)
    closed_Cr = table[here(closed)[:, None], here(blocks[:, None] * run + np.arange(run))]

    requests = np.repeat(np.arange(len(queries)), queries)  # of each token
    context_lengths = (lengths - starts[1:])[requests] + np.arange(len(requests)) + 1
    decodes = ((queries <= 1 + drafts) & ~common.is_prefilling[: common.num_reqs].numpy())[requests]
    tokens = np.flatnonzero(decodes & (context_lengths > max(method.covered_tokens, method.dense_below)))
    longest = int(context_lengths[tokens].max(initial=0))
    total = int(context_lengths[decodes].sum())
    return Plan(
        closed_Cr=closed_Cr,
        starts_C=here(blocks * size),
        tokens_R=here(tokens),
        rows=PagedRows(
            here(context_lengths[tokens]),
            by_block(table[here(requests[tokens])], -(-longest // size), run),
            host=context_lengths[tokens].tolist(),
        ),
        sparse_B=here(np.flatnonzero(np.bincount(requests[tokens], minlength=len(queries)) == queries)),
        dense=metadata,
        held=total,
        read_all=total - int(context_lengths[tokens].sum()),
    )


def plan_of_decodes(metadata: Any, method: SelectingMethod, page: int) -> Plan:
    """Plan a step in which every row decodes. Shapes depend only on the number of rows and nothing is copied to the
    host, so a CUDA graph can capture it.

    Rows that fit into the budget select all of their blocks. vLLM assigns its first page to no request: a row whose
    newest block is incomplete writes the summary there, because the last page of that block may not be allocated yet.
    Rows without tokens are padding of a graph and also use that page.
    """
    size = method.block_size
    lengths_R = metadata.seq_lens.long()
    padding = (lengths_R == 0).sum()
    table = metadata.block_table.long()
    table_RNr = by_block(table, -(-table.shape[1] * page // size), size // page)
    rows_R = torch.arange(len(lengths_R), device=table.device)
    held_tokens, lengths_R = lengths_R.sum(), lengths_R.clamp(min=1)
    newest_R = (lengths_R - 1) // size
    closes_R1 = (lengths_R % size == 0)[:, None]
    return Plan(
        closed_Cr=torch.where(closes_R1, table_RNr[rows_R, newest_R], 0),
        starts_C=newest_R * size,
        tokens_R=rows_R,
        rows=PagedRows(lengths_R, table_RNr),
        sparse_B=rows_R,
        dense=None,
        held=held_tokens,
        read_all=-padding,  # one token of each padding row is counted as read
    )


def by_block(table_RP: Tensor, blocks: int, run: int) -> Tensor:
    """The first ``blocks`` blocks ``[R, N, r]`` of the rows' page tables, padded with the last page of each table."""
    columns = torch.arange(blocks * run, device=table_RP.device).clamp(max=table_RP.shape[1] - 1)
    return table_RP[:, columns].unflatten(1, (-1, run))


def same_in_all_layers(method: SelectingMethod) -> bool:
    """Whether the method selects equally many blocks in every layer and head, as a token budget does."""
    return method.covered_tokens >= 0


class SparseBuilder:
    """Mixin for vLLM's metadata builder: adds the attribute ``plan``, a `Plan`, or ``None`` if the first layer makes
    it, so that a CUDA graph captures it.
    """

    supports_update_block_table = False  # a plan holds pages

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        impls = gated_impls(vllm_config, layer_names)
        impl = impls[0]
        self.method = impl.method
        if any(each.anchor not in impls for each in impls):
            raise SeergateError(
                f"anchors is {list(self.method.anchors)}; vLLM's cache has layers in groups with pages of their own, "
                "and an anchor must be in the group of the layers that it chooses for"
            )
        if same_in_all_layers(self.method):
            counts = Counts(impl.counts.read.clone(), impl.counts.held.clone())
            for each in impls:  # layers of other builders have other plans, which count for themselves
                each.counts = counts
        self.graphs, self.drafts = fits_graphs(self.method, vllm_config), vllm_config.num_speculative_tokens
        page, size = kv_cache_spec.block_size, self.method.block_size
        room = kv_cache_spec.page_size_bytes - kv_cache_spec.unpadded_page_size_bytes
        if room < impl.room:
            raise SeergateError(
                f"vLLM's pages have {room} bytes behind keys and values; seergate's summaries need {impl.room}"
            )
        if size % page:  # vLLM makes pages larger where layers of several sizes share them
            raise SeergateError(
                f"vLLM's cache has pages of {page} tokens; with seergate a block of {size} must be several"
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """CUDA graphs capture attention in steps in which all rows decode one token, or never."""
        from vllm.v1.attention.backend import AttentionCGSupport as Support

        graphs = fits_graphs(gated_impls(vllm_config)[0].method, vllm_config)
        return Support.UNIFORM_SINGLE_TOKEN_DECODE if graphs else Support.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Build the metadata of a step, with its plan. The names of the arguments are vLLM's."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        if self.graphs and common.max_query_len == 1:
            metadata.plan = None
            return metadata
        page = self.kv_cache_spec.block_size  # type: ignore[attr-defined]
        plan = metadata.plan = plan_of(metadata, common, self.method, page, self.drafts)
        if len(plan.sparse_B) == common.num_reqs:
            plan.dense = None
        elif len(plan.sparse_B):
            queries_B = common.query_start_loc.diff()[plan.sparse_B]
            lengths = common.seq_lens.index_copy(0, plan.sparse_B, queries_B)
            plan.dense = super().build(0, common.replace(seq_lens=lengths), fast_build)  # type: ignore[misc]
        return metadata


class SparseAttention:
    """Mixin for vLLM's attention of a layer, which still computes all dense attention.

    Attributes:
        counts: statistics, shared by layers of a builder that read equally many tokens.
        anchor: the layer that selects blocks for this one (`DecodeConfig.anchors`); usually itself.
        pages: the layer's cache -> its `Pages`; does not keep a cache alive that vLLM has replaced.
    """

    kind: type[Pages]
    method: SelectingMethod
    scoring: Scores
    counts: Counts
    anchor: SparseAttention
    pages: WeakTensorKeyDictionary
    num_kv_heads: int

    @property
    def room(self) -> int:
        """Bytes for summaries after the keys and values of a page: a multiple of 16, as strides require. The summary
        of a block is stored in its last page, which no other block shares. Pages have one size in all layers, so
        layers that reuse an anchor's blocks leave these bytes unused.
        """
        return -(-self.num_kv_heads * self.scoring.width * self.scoring.dtype.itemsize // 16) * 16

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        metadata: Any,
        output: Tensor,
        *scales: Any,
        **named: Any,
    ) -> Tensor:
        """Compute attention as vLLM's `AttentionImpl.forward`; new keys and values are already in the cache."""
        given = layer, query, key, value, cache
        if metadata is None:
            return super().forward(*given, metadata, output, *scales, **named)  # type: ignore[misc,no-any-return]
        pages = self.pages.get(cache)
        if pages is None:
            pages = self.pages[cache] = self.kind(self, layer, cache, self.scoring.width)
        if metadata.plan is None:
            blocks = -(-metadata.block_table.shape[1] * pages.size // self.method.block_size)
            if self.method.budget is not None and self.scoring.in_kernels(cache.device, blocks):
                padding = (metadata.seq_lens == 0).sum()  # one token of each padding row is counted as read
                metadata.plan = Step(held=metadata.seq_lens.sum(), read_all=-padding)
            else:
                metadata.plan = plan_of_decodes(metadata, self.method, pages.size)
        plan = metadata.plan
        if not isinstance(plan, Plan):
            self._in_kernels(pages, metadata, query, output)
            return output
        if len(plan.starts_C) and self.anchor is self:
            keys_CKSD = self._keys(pages, plan.closed_Cr)
            pages.summary_PKW[plan.closed_Cr[:, -1]] = self.scoring.summary(keys_CKSD, plan.starts_C)
        if plan.dense is not None:
            super().forward(*given, plan.dense, output, *scales, **named)  # type: ignore[misc]
        rows = len(plan.tokens_R)
        if not rows:
            self._count(plan, pages, None)
        elif plan.dense is None:  # every token is a row, in the same order
            self._attend(pages, plan, query[:rows], output[:rows])
        else:
            query_RHD = query[plan.tokens_R]
            attended_RHD = torch.empty_like(query_RHD)
            self._attend(pages, plan, query_RHD, attended_RHD)
            output[plan.tokens_R] = attended_RHD.view(rows, *output.shape[1:])
        return output

    def _in_kernels(self, pages: Pages, metadata: Any, query: Tensor, output: Tensor) -> None:
        """Run a step in which all rows decode, in three launches and those of attention."""
        from seergate.serving.vllm.decode_kernels import close_blocks, score_pages, selected_block_table

        assert isinstance(self.scoring, GateScores) and self.method.budget is not None
        plan, lengths_R, size = metadata.plan, metadata.seq_lens, self.method.block_size
        rows, rule = len(lengths_R), (self.method.budget, self.method.sink_blocks)
        given = metadata.block_table, lengths_R, size
        if self.anchor is self:
            gate, rotary = self.scoring.gate, self.scoring.unrotate.rotary
            angles, neox = (None, True) if rotary is None else (rotary.cos_sin_cache, rotary.is_neox_style)
            stored = pages.summary_PKW, metadata.block_table, lengths_R, angles, neox
            close_blocks(pages.cache, *stored, gate.branch("k"), size, gate.config.k_pooling)
            scores_RKN, query_QGD = score_pages(query[:rows], *stored, gate.branch("q"), size, pages.size)
            steps = pages.page_step, pages.head_step
            plan.chosen = {self: selected_block_table(scores_RKN, *given, pages.size, *rule, *steps)}
        else:
            query_QGD = query[:rows].reshape(rows * pages.heads, -1, pages.dim)
        table_QX, lengths_Q = plan.chosen[self.anchor]
        if plan.shared is None:
            plan.shared = lengths_Q, pages.schedule(query_QGD, table_QX, lengths_Q)
        lengths_Q, schedule = plan.shared
        self._count(plan, pages, lengths_Q)
        pages.attend(query_QGD, table_QX, lengths_Q, schedule, output[:rows].view_as(query_QGD))

    def _count(self, plan: Step, pages: Pages, lengths_Q: Tensor | None) -> None:
        if self.counts in plan.counted:
            return
        plan.counted.append(self.counts)
        self.counts.held += plan.held * pages.heads
        self.counts.read += plan.read_all * pages.heads
        if lengths_Q is not None:
            self.counts.read += lengths_Q.sum()

    def _keys(self, pages: Pages, table_Nr: Tensor) -> Tensor:
        """Cached keys ``[N, K, tokens, D]`` of runs of pages."""
        keys = pages.read(table_Nr.flatten()).unflatten(0, table_Nr.shape)  # [N, r, K, S, D]
        return keys.transpose(1, 2).flatten(2, 3)

    def _attend(self, pages: Pages, plan: Plan, query_RHD: Tensor, output_RHD: Tensor) -> None:
        rows = plan.rows
        if self.anchor is self:
            indices_RKX, counts_RK = self.method.choose(self._scores(pages, rows, query_RHD), rows)
            plan.chosen = {self: (pages.table(rows, indices_RKX), counts_RK)}
        table_QX, counts_RK = plan.chosen[self.anchor]
        query_QGD = query_RHD.contiguous().view(len(table_QX), -1, pages.dim)
        shared = plan.shared
        if shared is None:
            lengths_Q = rows.tokens(counts_RK, self.method.block_size).flatten().int()
            shared = lengths_Q, pages.schedule(query_QGD, table_QX, lengths_Q)
            if same_in_all_layers(self.method):
                plan.shared = shared
        lengths_Q, schedule = shared
        self._count(plan, pages, lengths_Q)
        pages.attend(query_QGD, table_QX, lengths_Q, schedule, output_RHD.view_as(query_QGD))

    def _scores(self, pages: Pages, rows: PagedRows, query_RHD: Tensor) -> Tensor:
        """Scores ``[R, K, N]``, computed for as many rows at a time as `SCORED_BYTES` allow."""
        blocks = rows.table_RNr.shape[1]
        most = max(1, SCORED_BYTES // (4 * max(1, blocks * pages.heads * self.scoring.numbers)))

        def of(query_RHD: Tensor, rows: PagedRows) -> Tensor:
            return self.scoring.scores(query_RHD, rows, pages.read_summaries(rows))

        if len(rows) <= most:
            return of(query_RHD, rows)
        return torch.cat([of(*part) for part in zip(query_RHD.split(most), rows.divided(most), strict=True)])


class SparseBackend:
    """Mixin for vLLM's attention backend of a layer."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Prefer layouts in which the tokens of a head are contiguous in a page, as each head has its own pages."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        layouts = super().supported_kv_cache_layouts()  # type: ignore[misc]
        return tuple(KVCacheLayout[name] for name in LAYOUTS if layouts is None or KVCacheLayout[name] in layouts)


@cache
def with_pages_of_16(stock: Any) -> Any:
    """Subclass vLLM's CPU backend to take pages of 16 tokens: it has a kernel for them, but offers multiples of 32."""
    from vllm.v1.attention.backend import MultipleOf

    sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
    return type(stock.__name__, (stock,), {"get_supported_kernel_block_sizes": sizes})


@cache
def sparse_backend(stock: Any) -> Any:
    """Subclass a backend of vLLM for sparse decoding; only its metadata builder and its attention differ."""
    builder = type("SparseMetadataBuilder", (SparseBuilder, stock.get_builder_cls()), {})
    impl = type("SparseImpl", (SparseAttention, stock.get_impl_cls()), {"kind": PAGES[stock.get_name()]})
    methods = {"get_builder_cls": staticmethod(lambda: builder), "get_impl_cls": staticmethod(lambda: impl)}
    return type("SparseBackend", (SparseBackend, stock), methods)


@cache
def sparse_layer(stock: Any) -> Any:
    """Subclass vLLM's layer to add room for summaries to each cache page, so that vLLM's memory plan counts it."""

    class SparseLayer(stock):  # type: ignore[misc] # one base only, so that an existing layer can be converted
        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            spec, room = super().get_kv_cache_spec(vllm_config), self.impl.room
            return replace(spec, page_size_padded=spec.page_size_bytes + room) if room else spec

    return SparseLayer


def gated_impls(vllm_config: Any, names: list[str] | None = None) -> list[SparseAttention]:
    """The attention of the gated layers, of all layers or of those in ``names``."""
    layers = vllm_config.compilation_config.static_forward_context
    impls = [getattr(layers[name], "impl", None) for name in (layers if names is None else names)]
    return [impl for impl in impls if isinstance(impl, SparseAttention)]


def fits_graphs(method: SelectingMethod, vllm_config: Any) -> bool:
    """Whether CUDA graphs may capture decode steps: on a GPU, for a method whose budget alone decides how much is
    read, from as many blocks as a kernel selects from. A CPU has no graphs, and shapes that do not depend on lengths
    would slow it down.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() and method.fixed_shapes and same_in_all_layers(method)):
        return False
    from seergate.ops.triton_impl.selection import MAX_BLOCKS

    return -(-vllm_config.model_config.max_model_len // method.block_size) <= MAX_BLOCKS
