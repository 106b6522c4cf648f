"""Choice of the next token: greedily, or drawn so that a sample does not depend on the batch it is in.

`generate` draws from one generator for the whole batch, so a sample changes with its neighbours and with the order of
problems. Here every sample has its own generator, always on the CPU. Each token consumes one uniform number from it,
and is the first token at which the cumulative probability exceeds that number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from seergate.checks import check, check_counts
from seergate.errors import SeergateError

NOT_FOLLOWED: dict[str, int | None] = {
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "stop_strings", "top_h", "dola_layers")),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config")),
    **dict.fromkeys(("num_beams", "guidance_scale", "typical_p", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "token_healing"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "encoder_no_repeat_ngram_size"), 0),
}
"""Fields of a generation configuration that are not supported here -> the value at which they do nothing, beside
``None``. Models with another value are refused."""


@dataclass(frozen=True)
class Sampling:
    """A sampling rule; the fields mean what they mean in a generation configuration.

    Attributes:
        temperature: 0 is greedy decoding, and the other fields then have no effect.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        repetition_penalty: 1 is off.

    Raises:
        ValueError: if a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_counts(self, top_k=0)
        finite = 0 <= self.temperature < float("inf")
        check("temperature", self.temperature, finite, "0 (greedy) or a positive number")
        check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        check("min_p", self.min_p, 0 <= self.min_p < 1, "in [0, 1)")
        check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "a positive number")

    @property
    def greedy(self) -> bool:
        """True if there is no randomness."""
        return self.temperature == 0

    @classmethod
    def of_model(cls, model: Any) -> Sampling:
        """The sampling of the model's generation configuration, which must set no field of `NOT_FOLLOWED`."""
        config = model.generation_config
        requested = {name: getattr(config, name, None) for name in NOT_FOLLOWED}
        unmet = [f"{name}={value}" for name, value in requested.items() if value not in (None, [], NOT_FOLLOWED[name])]
        if unmet:
            raise SeergateError(
                f"the model's generation configuration sets {', '.join(unmet)}, which the evaluation does not follow; "
                "give the sampling yourself (a temperature)"
            )
        names = [field.name for field in fields(cls)] if config.do_sample else ["repetition_penalty"]
        given = {name: value for name in names if (value := getattr(config, name, None)) is not None}
        return cls(**({"temperature": 1.0} if config.do_sample else {}) | given)

    def __str__(self) -> str:
        """The rule in words: ``temperature 0.6, top-p 0.95``; ``greedy``."""
        parts = ["greedy"] if self.greedy else [f"temperature {self.temperature:g}"]
        if not self.greedy:
            parts += [f"top-k {self.top_k}"] if self.top_k else []
            parts += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
            parts += [f"min-p {self.min_p:g}"] if self.min_p else []
        parts += [f"repetition penalty {self.repetition_penalty:g}"] if self.repetition_penalty != 1 else []
        return ", ".join(parts)


def check_finite(values: Tensor) -> None:
    """Raise `SeergateError` if values computed from a model's logits are not finite."""
    if not values.isfinite().all():
        raise SeergateError(
            "the model's logits are not finite: its dtype is too small for what it computes (give another, such as "
            "--dtype float32), or its weights are damaged"
        )


def sample_seed(seed: int, problem_id: str, sample_idx: int) -> int:
    """The seed of one sample, 0 .. 2^63 - 1, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{problem_id}/{sample_idx}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class TokenChooser:
    """Chooses the next token of every row of a batch."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.warpers = LogitsProcessorList()  # in the order in which `generate` applies them
        if not sampling.greedy and sampling.temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self.warpers.append(MinPLogitsWarper(sampling.min_p))
        penalty = sampling.repetition_penalty
        self.penalty = RepetitionPenaltyLogitsProcessor(float(penalty)) if penalty != 1 else None

    def __call__(self, logits_BV: Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """Choose one token per row from logits ``[B, V]`` of any float dtype."""
        scores = logits_BV.float()
        if self.penalty is not None:
            histories = [torch.tensor([row.prompt + row.tokens], device=scores.device) for row in rows]
            scores = torch.cat([self.penalty(ids, scores[i : i + 1]) for i, ids in enumerate(histories)])
        if not self.sampling.greedy:  # none of the warpers looks at the tokens so far
            scores = self.warpers(torch.empty(len(rows), 0, dtype=torch.long, device=scores.device), scores)
        check_finite(scores.amax(-1))
        if self.sampling.greedy:
            return scores.argmax(-1).tolist()
        uniform = torch.stack([torch.rand((), generator=row.generator, dtype=torch.float64) for row in rows])
        cumulative = torch.softmax(scores.double(), -1).cumsum(-1)
        # Scaled by the total, which rounding leaves a little off one, so that the index never exceeds the last token.
        thresholds = (uniform.to(scores.device) * cumulative[:, -1]).unsqueeze(-1)
        return torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1).tolist()


class SampledRow:
    """A sample that is being generated: its prompt, its tokens so far and its random generator."""

    def __init__(self, prompt: list[int], seed: int) -> None:
        self.prompt, self.tokens = prompt, list[int]()
        self.generator = torch.Generator().manual_seed(seed)
