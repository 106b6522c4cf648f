"""Methods that keep the whole cache and read some of its blocks at each step.

Shape suffixes: see `seergate.methods.base`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seergate import ops
from seergate.checks import check_counts
from seergate.config import RULES, check_rule, nearest_anchor
from seergate.errors import SeergateError
from seergate.methods.base import LayerSpec, LayerState, Method, Step
from seergate.ops import Selection
from seergate.ops.rows import RowLengths
from seergate.ops.selection import BlockBudget


class PerHeadSelection(NamedTuple):
    """The blocks to read if the query heads of a group select separately.

    Attributes:
        indices, counts: the union of a group's selections, as in `Selection`.
        heads: the selection of each query head, ``[B, H, N]``.
    """

    indices: Tensor
    counts: Tensor
    heads: Selection


@dataclass(kw_only=True)
class SelectingMethod(Method):
    """Keeps the whole cache and reads some of its blocks at each step.

    Attributes:
        token_budget, budget_share, budget_min, budget_max, threshold, top_p: see `DecodeConfig`.
        sink_blocks, dense_layers, anchors, dense_below: see `DecodeConfig`.
        block_size: tokens per block.
    """

    limits = tuple(RULES)
    token_budget: int | None = None
    budget_share: float | None = None
    budget_min: int | None = None
    budget_max: int | None = None
    threshold: float | None = None
    top_p: float | None = None
    sink_blocks: int = 0
    dense_layers: tuple[int, ...] = ()
    anchors: tuple[int, ...] = ()
    dense_below: int = 0
    block_size: int = 64

    def __post_init__(self) -> None:
        check_counts(self, block_size=1)
        check_rule(self, self.block_size)

    @property
    def budget(self) -> int | None:
        """Tokens that each KV head may read at a step; ``None`` if another rule decides."""
        return self.token_budget

    @property
    def rule(self) -> dict[str, Any]:
        """The selection rule, as keyword arguments of `seergate.ops.select_blocks`."""
        if self.budget_share is None:
            return {"token_budget": self.budget, "threshold": self.threshold, "top_p": self.top_p}
        least = (2 + self.sink_blocks) * self.block_size if self.budget_min is None else self.budget_min
        return {"budget_share": self.budget_share, "budget_min": least, "budget_max": self.budget_max}

    @property
    def block_budget(self) -> BlockBudget | None:
        """Number of blocks that a row reads as a function of its length; ``None`` with a threshold or top-p."""
        of_length = {name: value for name, value in self.rule.items() if name not in ("threshold", "top_p")}
        return BlockBudget.of(self.block_size, self.sink_blocks, **of_length)

    @property
    def nominal(self) -> str:
        if self.budget_share is None:
            return super().nominal
        least = "" if self.budget_min is None else f", at least {self.budget_min}"
        most = "" if self.budget_max is None else f", at most {self.budget_max}"
        return f"{100 * self.budget_share:g} %{least}{most}"

    @classmethod
    def searched_values(cls) -> dict[str, Sequence[float]]:
        shares = [count / 500 for count in range(1, 501)]
        thresholds = [float(f"{0.97**power / 2:.4g}") for power in range(500)]  # 0.5 to 1.3e-7
        return {"budget_share": shares, "threshold": thresholds}

    def selects_in(self, layer: int) -> bool:
        """True if decode steps of this layer may read less than everything."""
        return layer not in self.dense_layers

    def anchor_of(self, layer: int) -> int:
        return layer if layer in self.dense_layers else nearest_anchor(layer, self.anchors)

    def select(self, state: SelectingState, step: Step) -> Selection | PerHeadSelection | None:
        """The blocks to read at a decode step, or ``None`` for all of them."""
        short = self.dense_below
        covered = step.rows.once("covered tokens", lambda: self.covered_tokens, self)
        if state.spec.layer in self.dense_layers or step.max_length <= max(covered, short):
            return None
        scores, blocks = state.scores(step), -(-step.max_length // self.block_size)
        heads = state.spec.num_kv_heads, state.spec.num_heads
        shape = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        if len(shape) != 3 or shape[1] not in heads or shape[2] < blocks:
            raise SeergateError(
                f"{type(state).__name__}.scores returned {shape}; it must return [{len(step.q_BHSD)}, {heads[0]}, N] "
                f"with an entry for each of the {blocks} blocks"
            )
        selection = self.choose(scores, step.rows)
        return with_all_blocks(selection, step.ends, self.block_size, short) if short else selection

    def choose(self, scores_BKN: Tensor, lengths: Tensor | RowLengths) -> Selection:
        """Select blocks from scores by the rule, in rows of ``lengths [B]`` tokens."""
        return ops.select_blocks(
            scores_BKN, lengths, block_size=self.block_size, sink_blocks=self.sink_blocks, **self.rule
        )

    @property
    def always_selects(self) -> bool:
        """True if blocks are selected even where the budget has room for all of them."""
        return False

    @property
    def covered_tokens(self) -> int:
        """Tokens of the longest row that fits into the budget; -1 without a budget or if `always_selects`."""
        budget = self.block_budget
        return -1 if budget is None or self.always_selects else budget.covered * self.block_size

    def reads_all(self, length: int) -> bool:
        """True if a row of ``length`` tokens reads all of its blocks, even in a batch with longer rows that select."""
        return length <= max(self.covered_tokens, self.dense_below)


class SelectingState(LayerState, ABC):
    """State of a `SelectingMethod`."""

    method: SelectingMethod

    def __init__(self, spec: LayerSpec, method: SelectingMethod) -> None:
        super().__init__(spec, method)
        self.block_size = method.block_size

    def bytes_read(self, held: Any, seen: Any, chose: bool = True) -> Any:
        return super().bytes_read(held, seen) if chose else 0 * held

    def reads_all(self, seen: int) -> bool:
        return self.method.reads_all(seen)

    @abstractmethod
    def scores(self, step: Step) -> Tensor:
        """Score every block for the newest token of each row: ``[B, K, N]``, higher is better. Entries of the current
        block and beyond are ignored.
        """

    def logits(self, step: Step) -> Tensor:
        """`scores` per KV head ``[B, K, N]``, on the scale of attention logits, so that their softmax over past blocks
        is comparable to the true attention.
        """
        return self.scores(step)


def on_device(selection: Any, device: torch.device) -> Any:
    """Move a `Selection` or a `PerHeadSelection` to a device; ``None`` stays ``None``."""
    if selection is None or selection.counts.device == device:
        return selection
    parts = (x.to(device) if isinstance(x, Tensor) else on_device(x, device) for x in selection)
    return type(selection)(*parts)


def with_all_blocks(selection: Selection, ends: list[int], block_size: int, short: int) -> Selection:
    """The selection, but all blocks for rows of at most ``short`` tokens; ``ends``: tokens of each row.

    A row's own length decides, so that it reads the same blocks alone and in a batch with longer rows.
    """
    blocks = [-(-end // block_size) if end <= short else 0 for end in ends]
    if not any(blocks):
        return selection
    indices, counts = selection
    width = max(indices.shape[2], *blocks)
    block_counts_B = torch.tensor(blocks, dtype=indices.dtype, device=indices.device)
    everything_N = torch.arange(width, dtype=indices.dtype, device=indices.device)
    everything_BN = torch.where(everything_N < block_counts_B[:, None], everything_N, -1)
    wider = torch.nn.functional.pad(indices, (0, width - indices.shape[2]), value=-1)
    is_short = block_counts_B > 0
    return Selection(
        torch.where(is_short[:, None, None], everything_BN[:, None], wider),
        torch.where(is_short[:, None], block_counts_B[:, None].to(counts.dtype), counts),
    )


PAGE_TOKENS = 16
"""Tokens per block if neither the user nor the method gives a number (vLLM's default)."""


def page_tokens(method: Method, size: int | None) -> int:
    """Tokens per page of a paged cache: ``size``, or if ``None`` the method's block size, or `PAGE_TOKENS`. Raises
    `SeergateError` if pages would cut the method's blocks.
    """
    own = int(getattr(method, "block_size", PAGE_TOKENS))
    size = own if size is None else size
    if isinstance(method, SelectingMethod) and size % own:
        raise SeergateError(
            f"pages of {size} tokens would cut the blocks of {own} that {method.name!r} selects; their size must be a "
            "multiple of it"
        )
    return size
