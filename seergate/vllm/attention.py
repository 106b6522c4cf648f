"""Attention of a gated layer inside vLLM: dense for prompts, block-sparse for rows that decode.

A step's `Plan` is made once and shared by the layers: on the host, with vLLM's own metadata, or, where all rows decode
and a CUDA graph is to hold the step, on the device. In each layer, blocks that the step completed get their summaries;
then the rows that decode read the blocks that the method picks, and all others what they would read without seergate.

Shape suffixes: R rows that decode sparsely, C blocks that are completed, N blocks of the longest row, r pages of a
block, K KV heads, X blocks read, others as in `seergate.vllm.scoring`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seergate.methods import SelectingMethod
from seergate.vllm.pages import Pages
from seergate.vllm.scoring import Scores


@dataclass
class Plan:
    """What a step does beyond attention.

    Attributes:
        closed_Cr: pages of the blocks that it completes; ``starts_C`` the positions of their first tokens.
        rows_R: which rows read less than everything; ``tokens_R`` their places in the batch of tokens, ``lengths_R``
            their tokens so far, ``table_RNr`` the pages of their blocks.
        dense: vLLM's metadata with as good as nothing to do for those rows; ``None`` if there are no others.
        held, read_all: tokens that decoding rows hold, and those of them that are in rows which read everything.
        shared: lengths and schedule of the sparse rows' sequences, where they are the same in all layers.
    """

    closed_Cr: Tensor
    starts_C: Tensor
    rows_R: Tensor
    tokens_R: Tensor
    lengths_R: Tensor
    table_RNr: Tensor
    dense: Any
    held: int | Tensor
    read_all: int | Tensor
    shared: tuple[Tensor, tuple[Tensor, Tensor]] | None = None


def plan_of(metadata: Any, common: Any, method: SelectingMethod, page: int) -> Plan:
    """What a step is to do.

    Args:
        metadata: vLLM's for the layers' kernel.
        common: vLLM's for all kernels.
        method: its rule says which rows are short enough to be read as a whole.
        page: tokens per page.
    """
    size, run = method.block_size, method.block_size // page
    on_host = common.seq_lens if common.seq_lens.is_cpu else common.seq_lens_cpu_upper_bound
    lengths = on_host[: common.num_reqs].numpy().astype(np.int64)
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy().astype(np.int64)
    queries = np.diff(starts)
    table = metadata.block_table.long()

    def here(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(table.device, non_blocking=True)

    before, after = (lengths - queries) // size, lengths // size
    closed = np.repeat(np.arange(len(lengths)), after - before)
    blocks = np.arange(len(closed)) - np.repeat(np.cumsum(after - before) - after, after - before)
    closed_Cr = table[here(closed)[:, None], here(blocks[:, None] * run + np.arange(run))]

    decodes = (queries == 1) & ~common.is_prefilling[: common.num_reqs].numpy()
    rows = np.flatnonzero(decodes & (lengths > max(method.covered_tokens, method.dense_below)))
    longest = int(lengths[rows].max(initial=0))
    rows_R = here(rows)
    held = int(lengths[decodes].sum())
    return Plan(
        closed_Cr=closed_Cr,
        starts_C=here(blocks * size),
        rows_R=rows_R,
        tokens_R=here(starts[rows]),
        lengths_R=here(lengths[rows]),
        table_RNr=by_block(table[rows_R], -(-longest // size), run),
        dense=metadata,
        held=held,
        read_all=held - int(lengths[rows].sum()),
    )


def plan_of_decodes(metadata: Any, method: SelectingMethod, page: int) -> Plan:
    """What a step is to do in which every row decodes. Shapes follow from the number of rows, and nothing is read back
    by the host, so a CUDA graph can hold it.

    Rows that the budget covers select all of their blocks. The newest block gets a summary at each step, which is not
    read before the step that completes the block has replaced it. Rows of no tokens are a graph's padding; vLLM's
    first page is nobody's, and they use it.

    Args:
        metadata: vLLM's for the layers' kernel.
        method: with a token budget.
        page: tokens per page.
    """
    size = method.block_size
    lengths_R = metadata.seq_lens.long()
    padding = (lengths_R == 0).sum()
    table = metadata.block_table.long()
    table_RNr = by_block(table, -(-table.shape[1] * page // size), size // page)
    rows_R = torch.arange(len(lengths_R), device=table.device)
    held, lengths_R = lengths_R.sum(), lengths_R.clamp(min=1)
    newest_R = (lengths_R - 1) // size
    return Plan(
        closed_Cr=table_RNr[rows_R, newest_R],
        starts_C=newest_R * size,
        rows_R=rows_R,
        tokens_R=rows_R,
        lengths_R=lengths_R,
        table_RNr=table_RNr,
        dense=None,
        held=held,
        read_all=-padding,  # their one token each is counted as read
    )


def by_block(table_RP: Tensor, blocks: int, run: int) -> Tensor:
    """The first ``blocks`` blocks ``[R, N, r]`` of rows' tables of pages; pages beyond the table are its last one."""
    columns = torch.arange(blocks * run, device=table_RP.device).clamp(max=table_RP.shape[1] - 1)
    return table_RP[:, columns].unflatten(1, (-1, run))


class SparseBuilder:
    """Mixed into the builder of vLLM's metadata: puts a `Plan` beside it; ``None`` where the first layer makes it, so
    that a graph holds it.
    """

    method: SelectingMethod
    graphs: bool

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        """The metadata of a step, with its plan."""
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        if self.graphs and common.max_query_len == 1:
            metadata.plan = None
            return metadata
        plan = metadata.plan = plan_of(metadata, common, self.method, self.kv_cache_spec.block_size)  # type: ignore[attr-defined]
        if len(plan.rows_R) == common.num_reqs:
            plan.dense = None
        elif len(plan.rows_R):
            lengths = common.seq_lens.index_fill(0, plan.rows_R, 1)
            plan.dense = super().build(0, common.replace(seq_lens=lengths), fast_build)  # type: ignore[misc]
        return metadata


class SparseAttention:
    """Takes the place of a layer's ``impl.forward``.

    Args:
        impl: the attention that vLLM chose for the layer.
        method: turns scores into blocks.
        scoring: makes summaries of blocks, and scores them.
        kind: makes `Pages` of the layer's cache.

    Attributes:
        read: tokens read by rows that decode, all KV heads together, so far; ``held`` those that there were to read.
            They are on the layer's device, where graphs count too.
        summaries: ``[K, pages, W]``; that of a block is at its last page, which it shares with no other block.
    """

    summaries: Tensor

    def __init__(self, impl: Any, method: SelectingMethod, scoring: Scores, kind: Callable[..., Pages]) -> None:
        self.impl, self.method, self.scoring, self.kind = impl, method, scoring, kind
        self.pages: Pages | None = None
        self.read, self.held = (torch.zeros((), dtype=torch.long) for _ in range(2))
        self.dense, impl.forward = impl.forward, self.forward

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
        """Attend, as `AttentionImpl.forward` of vLLM; the new keys and values are in the cache already."""
        if metadata is None:
            return self.dense(layer, query, key, value, cache, metadata, output, *scales, **named)
        pages = self._bind(layer, cache)
        if metadata.plan is None:
            metadata.plan = plan_of_decodes(metadata, self.method, pages.size)
        plan = metadata.plan
        if len(plan.starts_C):
            keys_CKSD = self._keys(pages, plan.closed_Cr)
            summary_CKW = self.scoring.summary(keys_CKSD, plan.starts_C)
            self.summaries[:, plan.closed_Cr[:, -1]] = summary_CKW.transpose(0, 1)
        if plan.dense is not None:
            self.dense(layer, query, key, value, cache, plan.dense, output, *scales, **named)
        self.read += plan.read_all * pages.heads
        self.held += plan.held * pages.heads
        if not len(plan.rows_R):
            return output
        every = plan.dense is None  # then rows and tokens are the same, in order
        query_RHD = query[: len(plan.rows_R)] if every else query[plan.tokens_R]
        query_RHD = query_RHD.view(len(query_RHD), -1, pages.dim)
        attended = self._attend(pages, plan, query_RHD).view(len(query_RHD), *output.shape[1:])
        if every:
            output[: len(attended)] = attended
        else:
            output[plan.tokens_R] = attended
        return output

    def _bind(self, layer: Any, cache: Tensor) -> Pages:
        if self.pages is None or self.pages.cache.data_ptr() != cache.data_ptr():  # vLLM may profile with another one
            self.pages = self.kind(self.impl, layer, cache)
            shape = (self.pages.heads, self.pages.pages, self.scoring.width)
            self.summaries = torch.zeros(shape, dtype=self.scoring.dtype, device=cache.device)
            self.read, self.held = self.read.to(cache.device), self.held.to(cache.device)
        return self.pages

    def _keys(self, pages: Pages, table_Nr: Tensor) -> Tensor:
        """Cached keys ``[N, K, tokens, D]`` of runs of pages."""
        keys = pages.read(table_Nr.flatten()).unflatten(0, table_Nr.shape)  # [N, r, K, S, D]
        return keys.transpose(1, 2).flatten(2, 3)

    def _attend(self, pages: Pages, plan: Plan, query_RHD: Tensor) -> Tensor:
        size, run = self.method.block_size, plan.table_RNr.shape[2]
        last_RN = plan.table_RNr[..., -1]
        scores_RKN = self.scoring.scores(
            query_RHD,
            plan.lengths_R - 1,
            self.summaries.index_select(1, last_RN.flatten()).unflatten(1, last_RN.shape),
            lambda: self._keys(pages, plan.table_RNr.flatten(1)),
        )
        indices_RKX, counts_RK = self.method.choose(scores_RKN, plan.lengths_R)
        if plan.shared is None:
            current_R = (plan.lengths_R - 1) % size + 1  # tokens of the block that is still open, or just closed
            lengths_Q = ((counts_RK - 1) * size + current_R[:, None]).flatten().int()
            shared = lengths_Q, pages.schedule(lengths_Q, query_RHD.dtype)
            if self.method.covered_tokens >= 0:
                plan.shared = shared  # such a rule picks equally many blocks in every layer and head
        else:
            shared = plan.shared
        lengths_Q, schedule = shared
        self.read += lengths_Q.sum()
        device = query_RHD.device
        rows_R11 = torch.arange(len(query_RHD), device=device)[:, None, None]
        table_RKXr = plan.table_RNr[rows_R11, indices_RKX.clamp(min=0).long()] * pages.step
        table_RKXr += torch.arange(pages.heads, device=device)[:, None, None]
        table_QX = table_RKXr.view(len(lengths_Q), indices_RKX.shape[2] * run).int()
        return pages.attend(query_RHD, table_QX, lengths_Q, schedule)
