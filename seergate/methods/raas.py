"""RaaS: evict the least recently used page of the KV cache (Hu et al., arXiv 2502.11147)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from seergate.checks import check_choice, check_counts, check_share
from seergate.methods.base import LayerSpec, Step
from seergate.methods.evicting import EvictingMethod, EvictingState, Eviction, best
from seergate.methods.quest import PageState


class RaaSState(PageState, EvictingState):
    """Quest's bounds of every page, and ``used [B, K, N]``, int32: the decode step at which each was last used."""

    method: RaaS

    def __init__(self, spec: LayerSpec, method: RaaS) -> None:
        super().__init__(spec, method)
        self.rows["used"] = torch.zeros(spec.batch, spec.num_kv_heads, 0, dtype=torch.int32, device=spec.device)
        self.tokens_per_entry["used"] = method.block_size

    def _pinned(self, row: int) -> int:
        """Number of prompt pages that always stay."""
        return 0 if self.method.prompt == "evictable" else -(-self.prompts[row] // self.method.block_size)

    def _room(self, row: int) -> int:
        """Maximum number of pages that may be evicted: those of generated tokens, and of an evictable prompt."""
        pages = self.method.token_budget // self.method.block_size
        return pages if self.method.prompt == "extra" else max(1, pages - self._pinned(row))

    def _used(self, pages: int) -> int:
        """Number of pages that count as used at a step, if ``pages`` are resident."""
        method = self.method
        of = pages if method.share_of == "resident" else method.token_budget // method.block_size
        share = Fraction(method.share).limit_denominator(10**9)  # 29/100 of 0.29, 1/3 of 1/3
        return min(pages, max(1, int(share * of)))

    def max_resident(self) -> int:
        rows = range(len(self.prompts))
        return max(self._pinned(row) + self._room(row) for row in rows) * self.method.block_size + 1

    def append(self, step: Step) -> None:
        super().append(step)
        self.grown("used", self.rows["high"].shape[2])

    def _page_counts(self, step: Step) -> list[int]:
        """Number of pages of each row."""
        return [-(-end // self.method.block_size) for end in step.ends]

    def bounds(self, step: Step) -> Tensor:
        """Quest's bounds of all pages for the newest query, ``[B, K, N]``, made once; minus infinity beyond a row."""
        return step.rows.once("page bounds", partial(self._bounds, step), step.q_BHSD)

    def _bounds(self, step: Step) -> Tensor:
        pages = torch.tensor(self._page_counts(step), device=step.lengths.device)[:, None, None]
        bounds = self.bounds_of_pages(step)[:, :, : -(-step.max_length // self.method.block_size)]
        return bounds.masked_fill(torch.arange(bounds.shape[2], device=bounds.device) >= pages, -torch.inf)

    def observe_attention(self, step: Step) -> None:
        """Record which pages are used at this step."""
        pages, bounds, used = self._page_counts(step), self.bounds(step), self.rows["used"]
        device = used.device
        now = torch.tensor(self.decoded, dtype=torch.int32, device=device)[:, None, None]
        counts = [self._used(count) for count in pages]
        index = best(bounds, counts)  # its padding falls on pages that the row does not have yet
        used.scatter_(2, index, now.expand_as(index))
        used[torch.arange(len(pages), device=device), :, torch.tensor(pages, device=device) - 1] = now[:, 0]

    def select_kept(self, step: Step) -> Eviction | None:
        size, ends, pages = self.method.block_size, step.ends, self._page_counts(step)
        capacity = {row: self._pinned(row) + self._room(row) for row in range(len(pages)) if self.decoded[row]}
        rows = [row for row, count in capacity.items() if pages[row] > count]
        if not rows:
            return None
        bounds = self.bounds(step)[rows]
        ranked = recency(self.rows["used"][rows][:, :, : bounds.shape[2]], bounds)
        for i, row in enumerate(rows):
            ranked[i, :, : self._pinned(row)] = torch.inf
            ranked[i, :, pages[row] - 1] = torch.inf
            ranked[i, :, pages[row] :] = -torch.inf
        index = best(ranked, [capacity[row] for row in rows])
        tokens = (index[..., None] * size + torch.arange(size, device=index.device)).flatten(2)
        lengths = [ends[row] - (pages[row] - capacity[row]) * size for row in rows]
        return Eviction(rows, tokens[..., : max(lengths)].clamp(max=max(ends) - 1), lengths)


@dataclass(kw_only=True)
class RaaS(EvictingMethod):
    """Mark the half of the pages with the highest Quest bounds as used at each step; evict the least recently used.

    By default the prompt is never evicted, and its pages count in the budget; a page with both prompt and generated
    tokens counts as a prompt page. A page is evicted when a new one exceeds the budget, so that residents are at most
    ``token_budget + 1``. If the prompt uses the whole budget, only the currently filling page is kept for generated
    tokens: the paper's collapse at small budgets (section 4.2, Figure 5). Of pages last used at the same step, the one
    with the lowest bound is evicted, of equal bounds the oldest; the current page stays.

    The authors' accuracy code keeps everything and masks evicted pages per query head; here stamps are per KV head,
    and memory is released. That code does not protect the prompt, and counts half of the *budget's* pages as used:
    ``prompt="evictable"`` and ``share_of="budget"``.

    Attributes:
        token_budget: tokens of all pages (or of generated tokens only, see ``prompt``); the paper studies 64 to 1024
            and finds 1024 enough.
        block_size: tokens per page.
        share: share of the pages that counts as used at a step, rounded down, at least one page; the paper's r.
        share_of: ``"resident"``: of the resident pages, the prompt's included; ``"budget"``: of the budget's pages.
        prompt: ``"pinned"``: its pages stay and count in the budget, as in the paper; ``"extra"``: they stay and do
            not count, so that the whole budget is for generated tokens; ``"evictable"``: they count and are evicted
            like all others. Such a prompt stays whole until the first generated token, and pages not used then count
            as never used.
        group_reduction: ``"max"`` or ``"mean"`` of the bounds of a group.
    """

    name = "raas"
    state = RaaSState
    plot_style = ("#882255", "h")
    chunked_prefill = True
    token_budget: int = 1024
    block_size: int = 16
    share: float = 0.5
    share_of: str = "resident"
    prompt: str = "pinned"
    group_reduction: str = "max"

    def __post_init__(self) -> None:
        check_counts(self, block_size=1)
        check_counts(self, token_budget=self.block_size)
        check_share(self, "share")
        check_choice(self, prompt=("pinned", "extra", "evictable"), share_of=("resident", "budget"))
        check_choice(self, group_reduction=("max", "mean"))


def recency(used_RKN: Tensor, bounds_RKN: Tensor) -> Tensor:
    """Score pages by last use, then by bound, then by age; the latest, highest and newest page scores highest."""
    total = used_RKN.shape[-1]
    order = total - 1 - bounds_RKN.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, used_RKN.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)
    ranks = torch.arange(total, 0, -1, dtype=torch.float64, device=order.device).expand_as(order)
    return torch.zeros_like(ranks).scatter(-1, order, ranks)
