"""Reasoning Path Compression: compress the generated tokens at intervals (Song et al., arXiv 2505.13866)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from seergate.checks import check, check_choice, check_counts
from seergate.methods.base import Step
from seergate.methods.evicting import EvictingMethod, Eviction, stacked
from seergate.methods.scoring import WindowState, logits, pooled


class RPCState(WindowState):
    """Counts compressions, and scores the tokens between prompt and window."""

    method: RPC

    def events(self, row: int) -> int:
        """Number of compressions of a row so far, one that is due now included."""
        return max(0, self.decoded[row] - self.method.window) // self.method.interval

    def kept(self, row: int) -> int:
        """Residents of a row after its latest compression."""
        quota = self.events(row) * (self.method.interval // self.method.ratio)
        return self.prompts[row] + quota + self.method.window

    def max_resident(self) -> int:
        """Maximum tokens of a row until its next compression; it grows with the answer."""
        return max(self.kept(row) for row in range(len(self.prompts))) + self.method.interval

    def select_kept(self, step: Step) -> Eviction | None:
        method, ends = self.method, step.ends
        passed = [decoded - method.window for decoded in self.decoded]
        due = {row: self.kept(row) for row, n in enumerate(passed) if n > 0 and n % method.interval == 0}
        return self.keep_best(
            step,
            {row: count for row, count in due.items() if ends[row] > count},
            lambda rows: stacked(
                [pad(self._importance(step, row), (self.prompts[row], method.window), value=torch.inf) for row in rows]
            ),
        )

    def _importance(self, step: Step, row: int) -> Tensor:
        """Importance of the tokens between prompt and window; the softmax is over these alone (Algorithm 1)."""
        candidates = slice(self.prompts[row], step.ends[row] - self.method.window)
        keys, queries = step.keys_BKCD[row : row + 1, :, candidates], self.window(row)
        if self.method.selector == "newest_twice":
            queries = torch.cat((queries[:, :, 1:], queries[:, :, -1:]), dim=2)
        received_KGT = logits(queries, keys, step).softmax(-1).sum(3)[0]
        scores = received_KGT.mean((0, 1))[None] if self.method.scope == "layer" else received_KGT.mean(1)
        return pooled(scores[None], self.method.kernel, "avg")[0]


@dataclass(kw_only=True)
class RPC(EvictingMethod):
    """Every ``interval`` decoded tokens keep the prompt, the last ``window`` tokens and a part of the rest.

    At the n-th compression ``n * (interval // ratio)`` tokens between prompt and window stay, chosen by the attention
    of the window's queries, smoothed over neighbours. So memory is not fixed: it grows with the answer's length
    divided by ``ratio``, and there is no token budget.

    As in the paper the window holds the last ``window`` distinct queries; the paper's code has one query less and the
    newest twice (``selector``).

    Attributes:
        interval: the paper's P; 4096, or 1024 for more compression.
        window: the paper's R, number of queries in the selector window.
        ratio: the paper's c, the compression ratio.
        kernel: odd width of the average over neighbouring tokens.
        scope: ``"layer"``: one decision for all heads, the paper's best; ``"kv_head"``: one per group.
        selector: ``"distinct"``: every query of the window counts once; ``"newest_twice"``, as in the authors' code:
            the newest counts twice and the oldest not at all.
    """

    name = "rpc"
    state = RPCState
    plot_style = ("#999933", "p")
    chunked_prefill = True
    budget_option = "ratio"
    interval: int = 4096
    window: int = 32
    ratio: int = 4
    kernel: int = 7
    scope: str = "layer"
    selector: str = "distinct"

    def __post_init__(self) -> None:
        check_counts(self, interval=1, window=1, ratio=1, kernel=1)
        check("kernel", self.kernel, self.kernel % 2 == 1, "odd")
        something_stays = self.interval >= self.ratio
        check("interval", self.interval, something_stays, f"at least ratio ({self.ratio}), or nothing stays")
        check_choice(self, scope=("layer", "kv_head"), selector=("distinct", "newest_twice"))

    @classmethod
    def budget_values(cls, tokens: int, step: int) -> Sequence[int]:
        return range(min(tokens, 256), 0, -1)

    @property
    def nominal(self) -> str:
        """Share of the answer that stays; there is no token budget."""
        return f"1/{self.ratio} of the answer"
