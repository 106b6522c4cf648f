"""What evictors with a fixed budget share: when they evict, what always stays, how scores become an eviction."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from seergate.methods.base import LayerSpec, Step
from seergate.methods.checks import check_choice, check_counts
from seergate.methods.evicting import EvictingMethod, EvictingState, Eviction
from seergate.methods.scoring import best

PROMPT = ("evictable", "pinned", "extra")


@dataclass(kw_only=True)
class BudgetedMethod(EvictingMethod):
    """Keeps the ``token_budget`` residents of each row and KV head that score best.

    Between two evictions the cache grows by ``interval`` tokens, so at most ``token_budget + interval`` are resident
    once a prompt has been compressed. Of equal scores the newer token stays.

    Attributes:
        token_budget: residents after an eviction.
        interval: tokens from one eviction to the next.
        prompt: ``"evictable"``: its tokens compete like all others, and one longer than the budget is compressed at
            once. ``"pinned"``: they stay and count in the budget; where they leave less than ``interval`` (or the
            recent tokens that always stay) of it to generated tokens, these get so much beyond the budget.
            ``"extra"``: they stay beside the budget.
    """

    token_budget: int = 1024
    interval: int = 1
    prompt: str = "evictable"

    periodic: ClassVar[bool] = False
    """Whether evictions come at decode steps that are multiples of ``interval`` rather than once ``interval`` tokens
    are over the budget."""

    def __post_init__(self) -> None:
        check_counts(self, token_budget=1, interval=1)
        check_choice(self, prompt=PROMPT)

    @property
    def recent(self) -> int:
        """How many of the newest tokens always stay."""
        return 0

    def check_recent(self, name: str) -> None:
        """Refuse a budget that the recent tokens, option ``name``, do not fit in."""
        if self.token_budget < self.recent:
            raise ValueError(f"token_budget is {self.token_budget}; it must be at least {name} ({self.recent})")

    def kept(self, prompt_tokens: int) -> int:
        """Residents of a row after an eviction."""
        if self.prompt == "evictable":
            return self.token_budget
        if self.prompt == "extra":
            return prompt_tokens + self.token_budget
        return max(self.token_budget, prompt_tokens + max(self.interval, self.recent))

    def on_long_prompt(self, prompt_tokens: int) -> str | None:
        """What is done with a prompt that the budget has no room for; ``None`` if there is room."""
        kept = self.kept(prompt_tokens)
        if prompt_tokens <= self.token_budget and (self.prompt != "pinned" or kept == self.token_budget):
            return None
        if self.prompt == "evictable":
            return f"{kept} of its tokens stay, the others leave at once"
        return f"it stays, and {kept - prompt_tokens} generated tokens beside it, {kept} in all"


class BudgetedState(EvictingState):
    """State of a `BudgetedMethod`: a subclass says how important residents are."""

    def __init__(self, spec: LayerSpec, method: BudgetedMethod) -> None:
        super().__init__(spec)
        self.budget = method

    def saw_prompt(self, tokens: int) -> None:
        """See `EvictingState`."""
        done = self.budget.on_long_prompt(tokens)
        if done is not None:
            self.budget.warn_of_prompt(tokens, self.budget.token_budget, done)

    @abstractmethod
    def importance(self, step: Step, row: int) -> Tensor:
        """Scores of a row's residents, ``[K, T]`` or, for one decision for all heads, ``[1, T]``; higher stays.
        Called when something has to go. Scores of what always stays are ignored.
        """

    def most_resident(self) -> int:
        """See `EvictingState`."""
        return max(self.budget.kept(prompt) for prompt in self.prompts) + self.budget.interval

    def due(self, row: int, held: int) -> bool:
        """Whether a row that holds so many tokens evicts now."""
        method, decoded = self.budget, self.decoded[row]
        kept = method.kept(self.prompts[row])
        if method.periodic and decoded:
            return decoded % method.interval == 0 and held > kept
        return held > kept and (decoded == 0 or held >= kept + method.interval)

    @torch.no_grad()
    def keep(self, step: Step) -> Eviction | None:
        """See `EvictingState`."""
        ends, method = step.ends, self.budget
        rows = [row for row, end in enumerate(ends) if self.due(row, end)]
        if not rows:
            return None
        longest = max(ends[row] for row in rows)
        heads, kept = self.spec.num_kv_heads, [method.kept(self.prompts[row]) for row in rows]
        ranked = []
        for row in rows:
            scores = self.importance(step, row).clone()
            pinned = 0 if method.prompt == "evictable" else self.prompts[row]
            scores[:, :pinned] = torch.inf
            scores[:, ends[row] - method.recent :] = torch.inf
            padding = scores.new_full((len(scores), longest - ends[row]), -torch.inf)
            ranked.append(torch.cat((scores, padding), dim=1).expand(heads, -1))
        return Eviction(rows, best(torch.stack(ranked), kept), kept)
