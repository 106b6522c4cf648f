"""StreamingLLM: attention sinks and a recent window, re-positioned (Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seergate import ops
from seergate.checks import check, check_choice, check_counts
from seergate.methods.base import AttentionOutput, Step
from seergate.methods.evicting import EvictingMethod, EvictingState, Eviction
from seergate.ops.rows import RowLengths


class StreamingState(EvictingState):
    """Keeps no tensors."""

    method: StreamingLLM

    def attend(self, step: Step) -> AttentionOutput:
        budget, (_, heads, _, dim) = self.method.token_budget, step.keys_BKCD.shape
        group = step.q_BHSD.shape[1] // heads

        def tables() -> tuple[Tensor, RowLengths, Tensor]:
            visible, resident = self._visible(step.ends, step.lengths.device)
            slots, last = torch.arange(visible.shape[1], device=visible.device), (resident - 1)[:, None]
            positions = torch.cat((slots.expand(len(last), -1), last.expand(-1, group)), 1)
            index = visible[:, None, :, None].expand(-1, heads, -1, dim)
            rows = RowLengths(resident, [min(end, budget) for end in step.ends])
            return index, rows, positions[:1] if rows.even else positions

        key = "visible", budget, self.method.sink_tokens, heads, group, dim
        index, rows, positions = step.rows.once(key, tables)
        shown = index.shape[2]
        if step.max_length == shown:
            keys, values = step.keys_BKCD[:, :, :shown], step.values_BKCD[:, :, :shown]
        else:
            keys, values = step.keys_BKCD.gather(2, index), step.values_BKCD.gather(2, index)
        if self.method.stores_pre_rope:  # keys to 0 .. n - 1 in every row, and the query heads of their group to n - 1
            together = torch.cat((keys, step.q_pre_BHSD.reshape(-1, heads, group, dim)), 2)
            keys, q_BKGD = self.spec.rotary.rotate(together, positions, rows).split([shown, group], 2)
            q_BHD = self.spec.rotary.scale_queries(q_BKGD, positions).flatten(1, 2)
        else:
            q_BHD = step.q_BHSD[:, :, 0]
        output = ops.dense_decode(q_BHD, keys, values, None if rows.even else rows, **step.softmax_options)
        return AttentionOutput(output, rows.host)

    def max_resident(self) -> int:
        return self.method.token_budget + self.method.interval

    def select_kept(self, step: Step) -> Eviction | None:
        rows = [row for row, end in enumerate(step.ends) if end >= self.max_resident()]
        if not rows:
            return None
        # Make room for the next token ("evict for space"): with it, each row has exactly what it may attend.
        visible, resident = self._visible([step.ends[row] + 1 for row in rows], step.lengths.device)
        index = visible[:, None, :-1].expand(-1, step.keys_BKCD.shape[1], -1)
        return Eviction(rows, index, (resident - 1).tolist(), step.rows)

    def _visible(self, ends: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Residents that row b, of ``ends[b]``, attends to: indices ``[B, n]``, padded with the last; their number."""
        budget, sinks = self.method.token_budget, self.method.sink_tokens
        lengths = torch.tensor(ends, device=device)
        resident = lengths.clamp(max=budget)
        slots = torch.arange(min(budget, max(ends)), device=device).expand(len(ends), -1)
        skipped = (lengths - resident)[:, None]
        visible = torch.where(slots < sinks, slots, slots + skipped)
        return torch.minimum(visible, lengths[:, None] - 1), resident


@dataclass(kw_only=True)
class StreamingLLM(EvictingMethod):
    """Attend to the first ``sink_tokens`` and the newest tokens, ``token_budget`` in all, the current one included.

    As in the paper's section 3.2, positions are those **inside the cache**: keys are stored before RoPE and rotated to
    ``0 .. n - 1`` at each step, the query to ``n - 1``. With ``positions="original"`` it is just sinks and a window.

    Attributes:
        token_budget: tokens attended to; the paper's enabling script has 4 + 512.
        sink_tokens: number of first tokens that always stay.
        positions: ``"cache"``, as in the paper; ``"original"``: keys keep the rotation of their position in the text,
            as in kvpress's StreamingLLM without key rerotation.
        interval: evicted tokens leave the cache in batches of this many, so that it is not moved at every step; until
            then they are not attended to. At most ``token_budget + interval`` tokens are resident.
    """

    name = "streaming_llm"
    state = StreamingState
    plot_style = ("#CC79A7", "v")
    token_budget: int = 516
    sink_tokens: int = 4
    positions: str = "cache"
    interval: int = 32

    @property
    def stores_pre_rope(self) -> bool:
        return self.positions == "cache"

    @property
    def chunked_prefill(self) -> bool:  # type: ignore[override]
        return not self.stores_pre_rope  # attention to earlier chunks needs keys after RoPE

    def __post_init__(self) -> None:
        check_counts(self, token_budget=1, sink_tokens=0, interval=1)
        check_choice(self, positions=("cache", "original"))
        fits = self.token_budget > self.sink_tokens
        check("token_budget", self.token_budget, fits, f"greater than sink_tokens ({self.sink_tokens})")
