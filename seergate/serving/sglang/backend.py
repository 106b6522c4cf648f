"""SGLang's ``torch_native`` attention, with block-sparse decode steps.

A block is a run of pages of SGLang's cache. Viewed as a cache with a single head, slot ``s`` of KV head ``k`` is at
place ``s * K + k``, so to the stock attention each KV head is a separate request with its own slots. The summary of a
block is stored outside the cache, indexed by the block's last page. It is computed from the cached keys in the step
that completes the block, so prefix caching, chunked prefill and retracted requests need no special handling.

Shape suffixes: R requests, H query heads, K KV heads, G query heads per KV head, Q = R * K, N blocks, C completed
blocks, r pages of a block, X blocks read, T tokens, D head dimension, W width of a block's summary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from seergate.errors import SeergateError
from seergate.gates.bank import Gates
from seergate.models.loading import skeleton
from seergate.serving.common.checks import rope_kinds
from seergate.serving.common.rope import Unrotation
from seergate.serving.common.rows import PagedRows
from seergate.serving.common.scoring import Scores
from seergate.serving.common.statistics import statistics
from seergate.serving.sglang.checks import settings_of


@dataclass
class Plan:
    """The blocks that a step completes and the requests that read sparsely, the same in every sparse layer.

    Attributes:
        lengths_R, table_RNr: number of tokens of each request, with the new ones, and the pages of its blocks.
        closed_Cr, starts_C: pages of the completed blocks, and the positions of their first tokens.
        sparse, dense: indices of the requests with sparse and with dense attention, in a decode step.
        chosen: the last anchor layer -> its selection, which layers above it reuse.
    """

    lengths_R: Tensor
    table_RNr: Tensor
    closed_Cr: Tensor
    starts_C: Tensor
    sparse: Tensor
    dense: Tensor
    chosen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class SparseBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """Dense attention for prompts, and attention to the blocks that a method selects for decoding requests.

    Attributes:
        method, run: the method that selects blocks, and the number of pages of a block.
        counts: sparse layer -> tokens read and held so far, int64 ``[2]``.
        scores, summaries: sparse layer that selects blocks -> its scorer, and its block summaries
            ``[pages, K, W]``.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        config, self.page = runner.model_config.hf_config, runner.page_size
        settings = settings_of(config)
        assert settings is not None
        bank = settings.bank()
        self.method = settings.selector(bank, self.page)
        self.run = self.method.block_size // self.page
        self.scores: dict[int, Scores] = {}
        self.summaries: dict[int, Tensor] = {}
        self.counts: dict[int, Tensor] = {}
        self._add_layers(runner.model, bank, rope_kinds(skeleton(config)))
        logging.getLogger(__name__).info("%s", settings.said(self.method, len(self.counts)))

    def _add_layers(self, model: Any, bank: Gates | None, kinds: dict[int, Any]) -> None:
        scores: type[Scores] = resolve_name(str(self.method.serving_scores))
        for parent in model.modules():
            for layer in parent.children():
                number = getattr(layer, "layer_id", None)
                if not isinstance(layer, RadixAttention) or number not in kinds or not self.method.selects_in(number):
                    continue
                if layer.logit_cap:
                    raise SeergateError("the model caps its attention scores, which SGLang's torch_native leaves out")
                keys = self.token_to_kv_pool.get_key_buffer(number)
                if keys.dtype.itemsize < 2:  # a checkpoint may set it without any option
                    raise SeergateError(
                        f"the model's cache has the type {keys.dtype}, and cached keys must be readable"
                    )
                self.counts[number] = torch.zeros(2, dtype=torch.long, device=keys.device)
                if self.method.anchor_of(number) != number:
                    continue
                gate = unrotate = None
                if bank is not None:
                    unrotate = Unrotation(parent.rotary_emb if kinds[number] == "plain" else None)
                    gate = bank.gate(number).to(keys.device, keys.dtype).requires_grad_(False)
                scoring = scores(self.method, layer.qk_head_dim, keys.dtype, layer.scaling, 0.0, gate, unrotate)
                self.scores[number] = scoring
                shape = len(keys) // self.page, keys.shape[1], scoring.width
                self.summaries[number] = torch.zeros(shape, dtype=scoring.dtype, device=keys.device)
        if missing := {number for number in kinds if self.method.selects_in(number)} - self.counts.keys():
            raise SeergateError(f"SGLang's model has no attention of its own in the layers {sorted(missing)}")

    def seergate_stats(self) -> dict[str, Any]:
        """The `statistics` of this engine."""
        counts = ((layer, both.tolist()) for layer, both in self.counts.items())
        return statistics(counts, sum(summary.nbytes for summary in self.summaries.values()))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a step."""
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        size, lengths_R = self.method.block_size, forward_batch.seq_lens.long()
        new_R = torch.ones_like(lengths_R) if mode.is_decode() else forward_batch.extend_seq_lens.long()
        slots = self.req_to_token_pool.req_to_token
        columns = torch.arange(-(-int(lengths_R.max()) // size) * self.run) * self.page
        pages = slots[forward_batch.req_pool_indices][:, columns.clamp(max=slots.shape[1] - 1)].long() // self.page
        table_RNr = pages.unflatten(1, (-1, self.run))
        blocks = zip(((lengths_R - new_R) // size).tolist(), (lengths_R // size).tolist(), strict=True)
        closed = [(row, block) for row, (first, end) in enumerate(blocks) for block in range(first, end)]
        rows_C, blocks_C = torch.tensor(closed, dtype=torch.long).view(-1, 2).unbind(1)
        sparse = lengths_R > max(self.method.covered_tokens, self.method.dense_below)
        self.plan = Plan(
            lengths_R=lengths_R,
            table_RNr=table_RNr,
            closed_Cr=table_RNr[rows_C, blocks_C],
            starts_C=blocks_C * size,
            sparse=sparse.nonzero()[:, 0],
            dense=(~sparse).nonzero()[:, 0],
        )

    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        """Compute the dense attention of prompts as SGLang does, then summarise completed blocks."""
        output = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        self._summarise(layer)
        return output

    def forward_decode(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        """Compute the attention of each request's newest token, ``[R, H * D]``."""
        if layer.layer_id not in self.counts:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            place = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)
        self._summarise(layer)
        plan, heads = self.plan, layer.tp_k_head_num
        query_RHD = q.reshape(len(plan.lengths_R), -1, layer.qk_head_dim)
        output = torch.empty_like(query_RHD)
        if len(rows := plan.dense):
            slots_RKT = self._slots(plan.table_RNr[rows])[:, None].expand(-1, heads, -1)
            lengths_RK = plan.lengths_R[rows, None].expand(-1, heads)
            output[rows] = self._attend(query_RHD[rows], slots_RKT, lengths_RK, layer)
        if len(rows := plan.sparse):
            output[rows] = self._attend(query_RHD[rows], *self._chosen(query_RHD[rows], rows, layer), layer)
        self.counts[layer.layer_id][1] += heads * plan.lengths_R.sum()
        return output.flatten(1)

    def _chosen(self, query_RHD: Tensor, rows: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
        """The slots ``[R, K, T]`` of the tokens of the selected blocks, and their number ``[R, K]``."""
        anchor = self.method.anchor_of(layer.layer_id)
        if anchor != layer.layer_id:
            return self.plan.chosen[anchor]
        size, lengths_R = self.method.block_size, self.plan.lengths_R[rows]
        table_RNr = self.plan.table_RNr[rows, : -(-int(lengths_R.max()) // size)]
        summary_RKNW = self.summaries[layer.layer_id][table_RNr[..., -1]].transpose(1, 2)

        decoding = PagedRows(lengths_R, table_RNr)
        scores_RKN = self.scores[layer.layer_id].scores(query_RHD, decoding, summary_RKNW)
        indices_RKX, counts_RK = self.method.choose(scores_RKN, decoding)
        each = torch.arange(len(rows), device=rows.device)[:, None, None]
        slots_RKT = self._slots(table_RNr[each, indices_RKX.clamp(min=0).long()])
        chosen = slots_RKT, decoding.tokens(counts_RK, size)
        self.plan.chosen = {anchor: chosen}
        return chosen

    def _attend(self, query_RHD: Tensor, slots_RKT: Tensor, lengths_RK: Tensor, layer: Any) -> Tensor:
        """Attention to the tokens in the given slots, ``[R, H, D]``, computed by SGLang's own loop."""
        heads, pool = layer.tp_k_head_num, self.token_to_kv_pool
        self.counts[layer.layer_id][0] += lengths_RK.sum()
        query_QGD = query_RHD.unflatten(1, (heads, -1)).flatten(0, 1)
        caches = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        places_QT = (slots_RKT * heads + torch.arange(heads, device=slots_RKT.device)[:, None]).flatten(0, 1)
        output_QGD = torch.empty_like(query_QGD)
        self._run_sdpa_forward_decode(
            query_QGD,
            output_QGD,
            *(cache.view(-1, 1, cache.shape[-1]) for cache in caches),
            places_QT,
            torch.arange(len(query_QGD)),
            lengths_RK.flatten(),
            scaling=layer.scaling,
            enable_gqa=True,
        )
        return output_QGD.view_as(query_RHD)

    def _summarise(self, layer: Any) -> None:
        """Compute the summaries of the blocks that the step completes, if the layer selects blocks."""
        if len(self.plan.starts_C) and layer.layer_id in self.scores:
            keys_CKTD, scoring = self._keys(self.plan.closed_Cr, layer), self.scores[layer.layer_id]
            summary_CKW = scoring.summary(keys_CKTD, self.plan.starts_C).to(scoring.dtype)
            self.summaries[layer.layer_id][self.plan.closed_Cr[:, -1]] = summary_CKW

    def _keys(self, table_Nr: Tensor, layer: Any) -> Tensor:
        """The cached keys ``[N, K, T, D]`` of blocks."""
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return keys.view(-1, self.page, *keys.shape[1:])[table_Nr].flatten(1, 2).transpose(1, 2)

    def _slots(self, table: Tensor) -> Tensor:
        """The slots ``[..., T]`` of the tokens of blocks ``[..., N, r]``, in order."""
        within = torch.arange(self.page, device=table.device)
        return (table.flatten(-2)[..., None] * self.page + within).flatten(-2)
