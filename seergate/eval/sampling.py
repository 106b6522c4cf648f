"""How the next token is chosen: greedily, or drawn so that a sample does not depend on the batch it is in.

`generate` draws from one generator for the whole batch, so a sample changes with its neighbours. Here every row has a
generator of its own, and drawing is done by the Gumbel trick inside a logits processor: the largest of
``logit - log(exponential noise)`` is a draw from the softmax. `generate` itself then only takes the maximum.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Sampling:
    """A sampling rule; the fields mean what they mean in a generation configuration.

    Attributes:
        temperature: 0 is greedy decoding, and the other fields then have no effect.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.

    Raises:
        ValueError: naming the field, what it is and what it must be.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature!r}; it must be 0 (greedy) or a positive number")
        if not (isinstance(self.top_k, int) and self.top_k >= 0):
            raise ValueError(f"top_k is {self.top_k!r}; it must be 0 (off) or a positive integer")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; it must be in (0, 1]")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is {self.min_p!r}; it must be in [0, 1)")

    @property
    def greedy(self) -> bool:
        """Whether there is no randomness."""
        return self.temperature == 0

    @classmethod
    def of_model(cls, model: Any) -> Sampling:
        """What the model's own generation configuration says."""
        config = model.generation_config
        if not config.do_sample:
            return cls()

        def given(name: str, default: float) -> Any:
            value = getattr(config, name, None)
            return default if value is None else value

        return cls(given("temperature", 1.0), given("top_k", 0), given("top_p", 1.0), given("min_p", 0.0))

    def warpers(self) -> LogitsProcessorList:
        """The stock warpers, in the stock order."""
        warpers = LogitsProcessorList()
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers


def sample_seed(seed: int, problem_id: str, sample_idx: int) -> int:
    """The seed of one sample, 0 .. 2^63 - 1, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{problem_id}/{sample_idx}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class SeededSampling(LogitsProcessor):
    """Turns taking the maximum into drawing, with one generator per row.

    Args:
        sampling: the rule; not greedy.
        seeds: one per row of the batch.
        device: where the logits are.
    """

    def __init__(self, sampling: Sampling, seeds: list[int], device: torch.device) -> None:
        self.warpers = sampling.warpers()
        self.generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Warp ``scores [B, V]`` and add the noise."""
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return self.warpers(input_ids, scores.float()) - noise.log()


class ForcedTokens(LogitsProcessor):
    """Makes `generate` follow a given continuation, ``[B, n]``, whatever the model would say.

    Args:
        tokens: the continuation.
        start: length of the (padded) prompt.
    """

    def __init__(self, tokens: Tensor, start: int) -> None:
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leave one token possible."""
        wanted = self.tokens[:, input_ids.shape[1] - self.start].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(1, wanted[:, None], 0.0)
