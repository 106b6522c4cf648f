"""Quest: page selection by an upper bound (Tang et al., arXiv 2406.10774), and ReSA, which uses the same bound.

ReSA (Sun et al., arXiv 2506.04108; section 5.4 of SeerAttention-R) corrects sparse steps by regular dense passes,
which any selecting method can have. This module has the selection of ReSA's own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seergate import ops
from seergate.checks import check_choice, check_counts, check_share
from seergate.config import RULES, Rectify
from seergate.methods.base import KeysOf, LayerSpec, LayerState, OffsetOf, Step
from seergate.methods.selecting import PerHeadSelection, SelectingMethod, SelectingState
from seergate.ops import Selection
from seergate.ops.gate_math import wide_dtype
from seergate.ops.rows import RowLengths


class PageState(LayerState):
    """Elementwise maximum and minimum of the keys after RoPE of each page: ``high``, ``low [B, K, N, D]``."""

    method: Any  # with a block_size and a group_reduction
    reads = ("high", "low")

    def __init__(self, spec: LayerSpec, method: Any) -> None:
        super().__init__(spec, method)
        self.block_size = method.block_size
        empty = torch.empty(spec.batch, spec.num_kv_heads, 0, spec.head_dim, dtype=spec.dtype, device=spec.device)
        self.rows |= {"high": empty, "low": empty.clone()}
        self.tokens_per_entry |= dict.fromkeys(self.reads, self.block_size)

    def append(self, step: Step) -> None:
        super().append(step)
        blocks = -(-step.max_length // self.block_size)
        bounds = [(self.grown("high", blocks), torch.maximum), (self.grown("low", blocks), torch.minimum)]
        if step.k_BKSD.shape[2] == 1 and all(step.counts):
            key = step.k_BKSD[:, :, 0].to(self.rows["high"].dtype)
            for bound, extreme in bounds:
                if step.rows.even:
                    page, place = divmod(step.rows.even - 1, self.block_size)
                    page_BKD = bound[:, :, page]
                    extreme(page_BKD, key, out=page_BKD) if place else page_BKD.copy_(key)
                else:
                    each, pages, opens = step.rows.once(("pages", self.block_size), partial(self._pages, step.rows))
                    bound[each, :, pages] = torch.where(opens, key, extreme(bound[each, :, pages], key))
            return
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            first = start // self.block_size
            self.recompute(row, first, step.keys_BKCD[row : row + 1, :, first * self.block_size : start + count])

    def _pages(self, rows: RowLengths) -> tuple[Tensor, Tensor, Tensor]:
        """Index of each row, its newest page, and whether its newest token opens the page (``[B, 1, 1]``)."""
        newest = rows.tensor - 1
        return rows.each, newest // self.block_size, (newest % self.block_size == 0)[:, None, None]

    def recompute(self, row: int, first: int, keys_1KSD: Tensor) -> None:
        """Recompute the bounds of a row's pages from page ``first`` on, from the keys of their tokens."""
        size, high, low = self.block_size, self.rows["high"], self.rows["low"]
        if keys_1KSD.shape[2]:
            pooled = ops.pool_keys(keys_1KSD, size, ("max", "min"))[0]
            pages = slice(first, first + pooled.shape[1])
            high[row, :, pages], low[row, :, pages] = pooled.to(high.dtype).chunk(2, dim=-1)

    def bounds_of_pages(self, step: Step, scale: float = 1.0) -> Tensor:
        """The `page_bounds` of all pages, and of those that there is room for, for the newest query."""
        return page_bounds(step.q_BHSD, self.rows["high"], self.rows["low"], self.method.group_reduction, scale)


def page_bounds(
    q_BHD: Tensor, high_BKND: Tensor, low_BKND: Tensor, group_reduction: str, scale: float = 1.0
) -> Tensor:
    """Upper bounds of ``scale`` times a query's products with the keys of each page, from the page's largest and
    smallest keys.

    Args:
        q_BHD: may have a token axis of one, ``[B, H, 1, D]``.
        group_reduction: ``"max"`` or ``"mean"`` of the bounds of a group's queries, or ``"mean_query"``, the bound of
            their mean: ``[B, K, N]``; ``"separate"``, the bound of each query: ``[B, H, N]``.
    """
    (batch, kv_heads, pages, _), wide = high_BKND.shape, wide_dtype(q_BHD.dtype)
    high_PDN, low_PDN = (x.to(wide).flatten(0, 1).transpose(1, 2) for x in (high_BKND, low_BKND))
    q_PGD = q_BHD.reshape(batch * kv_heads, -1, q_BHD.shape[-1]).to(wide)
    if group_reduction == "mean_query":
        q_PGD = q_PGD.mean(1, keepdim=True)
    # max(q * low, q * high) is q * high where q > 0, else q * low: two products, no [.., N, D] tensor
    upper_PGN = torch.bmm(q_PGD.clamp(min=0), high_PDN)
    bound_PGN = torch.baddbmm(upper_PGN, q_PGD.clamp(max=0), low_PDN, beta=scale, alpha=scale)
    if group_reduction == "separate":
        return bound_PGN.view(batch, -1, pages)
    bound_PN = bound_PGN.mean(1) if group_reduction == "mean" else bound_PGN.amax(1)
    return bound_PN.view(batch, kv_heads, pages)


def by_probability(method: SelectingMethod) -> bool:
    """Whether bounds become probabilities, of capped logits; otherwise only their order counts, and a cap rounds high
    bounds to equal ones.
    """
    return method.threshold is not None or method.top_p is not None


def capped(bounds: Tensor, softcap: float | None) -> Tensor:
    """The bounds with the model's cap on attention logits."""
    return softcap * torch.tanh(bounds / softcap) if softcap else bounds


class QuestState(PageState, SelectingState):
    """Scores pages by their bounds, on the scale of attention logits."""

    def scores(self, step: Step) -> Tensor:
        bounds = self.bounds_of_pages(step, step.sm_scale)
        return capped(bounds, step.softcap) if by_probability(self.method) else bounds

    def logits(self, step: Step) -> Tensor:
        bounds = self.bounds_of_pages(step, step.sm_scale)
        return capped(bounds, step.softcap).unflatten(1, (self.spec.num_kv_heads, -1)).amax(2)

    def crop(self, before: list[int], after: list[int], keys: KeysOf, offset_of: OffsetOf) -> None:
        for row, length in enumerate(after):
            first = length // self.block_size
            self.recompute(row, first, keys(row, first * self.block_size, length))


@dataclass(kw_only=True)
class Quest(SelectingMethod):
    """Score a page by ``sum_d max(q_d * min_d, q_d * max_d)``, an upper bound on the query's products with its keys.

    The budget includes the current page, which is always read, as in Quest's own kernels; in the code of its accuracy
    experiments that page competes with the others. Bounds are taken per query head. Quest is made for models without
    groups, where each query head selects; here the heads of a group select together by default (``group_reduction``),
    so that a KV head reads no more than the budget.

    Attributes:
        block_size: tokens per page; 16 in Quest's paper.
        dense_layers: layers that read everything; the first two in Quest, ``()`` to compare on equal terms.
        group_reduction: ``"max"`` or ``"mean"`` of the bounds of a group's query heads; ``"separate"``, as in the
            authors' code: each query head reads the pages that it selects. Keys and values are still stored once per
            KV head; a KV head reads the union of its group's selections.
        min_pages: minimum number of pages read, whatever the token budget; 3 in the accuracy code, 1 in the kernels.
    """

    name = "quest"
    state = QuestState
    plot_style = ("#009E73", "^")
    serving_scores = "seergate.serving.common.scoring:QuestScores"
    block_size: int = 16
    dense_layers: tuple[int, ...] = (0, 1)
    group_reduction: str = "max"
    min_pages: int = 1

    def __post_init__(self) -> None:
        check_choice(self, group_reduction=("max", "mean", "separate"))
        check_counts(self, min_pages=1)
        super().__post_init__()
        if self.token_budget is None and self.min_pages > 1:
            raise ValueError(f"min_pages is {self.min_pages} without a token budget; give token_budget, or drop it")

    @property
    def budget(self) -> int | None:
        return None if self.token_budget is None else max(self.token_budget, self.min_pages * self.block_size)

    @property
    def splits_groups(self) -> bool:
        return self.group_reduction == "separate"

    @property
    def fixed_shapes(self) -> bool:
        return self.dense_below == 0 and not self.splits_groups

    def select(self, state: SelectingState, step: Step) -> Selection | PerHeadSelection | None:
        selection = super().select(state, step)
        if isinstance(selection, Selection) and self.splits_groups:
            return PerHeadSelection(*union(selection, state.spec.num_kv_heads), selection)
        return selection


@dataclass(kw_only=True)
class ReSA(SelectingMethod):
    """Read ``max(token_budget / block_size, share of the blocks, rounded up)`` blocks, the current one included; the
    defaults are those of ReSA's code.

    Attributes:
        token_budget: minimum number of tokens that are read; 16 blocks in ReSA's code.
        share: share of a row's blocks that is read.
        rectify_every: sparse steps between two dense passes; ``None`` for none.
    """

    name = "resa"
    state = QuestState
    group_reduction = "mean_query"
    plot_style = ("#225555", "p")
    limits = ("token_budget",)
    block_size: int = 16
    token_budget: int | None = 256
    share: float = 0.1
    rectify_every: int | None = 32

    def __post_init__(self) -> None:
        if [rule for rule in RULES if getattr(self, rule) is not None] != ["token_budget"]:
            raise ValueError("resa reads a share of the blocks and at least token_budget tokens; it has no other rule")
        super().__post_init__()
        check_share(self, "share")
        self.correction  # noqa: B018  (checks `rectify_every`)

    @property
    def correction(self) -> Rectify | None:
        return None if self.rectify_every is None else Rectify(self.rectify_every)

    @property
    def rule(self) -> dict[str, Any]:
        return {"budget_share": self.share, "budget_min": self.token_budget}

    @property
    def nominal(self) -> str:
        return f"{self.token_budget} or {100 * self.share:g} %"


def union(selection: Selection, kv_heads: int) -> Selection:
    """The blocks that any query head of a group selected: ``[B, H, N]`` -> ``[B, K, N']``."""
    indices_BKM = selection.indices.unflatten(1, (kv_heads, -1)).flatten(2)
    # sort and remove duplicates: an index that equals its left neighbour becomes padding, which is last
    last = torch.iinfo(indices_BKM.dtype).max
    ranked = indices_BKM.masked_fill(indices_BKM < 0, last).sort(-1).values
    ranked[..., 1:] = torch.where(ranked[..., 1:] == ranked[..., :-1], last, ranked[..., 1:])
    ranked = ranked.sort(-1).values
    counts = (ranked < last).sum(-1, dtype=torch.int32)
    return Selection(ranked.masked_fill(ranked == last, -1)[..., : int(counts.max())], counts)
