"""Offline generation with a server's engine: what is asked of `answers` in `serving.vllm` and `serving.sglang`.

Each ``answers(run, prompts)`` starts the engine, requests all answers at once, shuts it down at the end, and yields
each answer when it ends: the number of its prompt, its tokens, and its share of the time in seconds.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Answers = Generator[tuple[int, list[int], float], None, None]


class Prompt(NamedTuple):
    """Token ids, the most tokens of an answer, the seed of its sampling, and texts that end it."""

    ids: Sequence[int]
    max_new_tokens: int
    seed: int
    stop: Sequence[str] = ()


@dataclass(frozen=True)
class EngineRun:
    """An engine, and how all of its answers are generated.

    Attributes:
        model, dtype: directory or Hub id of the model, and the dtype in which it is loaded.
        longest: the most tokens of prompt and answer together.
        batch_size: the most answers at a time; the server's default if ``None``.
        page: tokens per page of the cache; the server's default if ``None``.
        settings: options of the plugin (`seergate.serving.common.settings`); ``None`` for dense attention.
        sampling: ``temperature``, ``top_k`` (0 is off), ``top_p``, ``min_p`` and ``repetition_penalty``.
        ends: ids of the tokens that end an answer.
    """

    model: str
    dtype: str
    longest: int
    batch_size: int | None
    page: int | None
    settings: dict[str, Any] | None
    sampling: dict[str, Any]
    ends: list[int]
