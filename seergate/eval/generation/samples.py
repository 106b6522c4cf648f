"""What is to be generated, its maximum length, and finished samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from seergate.checks import check_counts
from seergate.eval.sampling import Sampling
from seergate.eval.settings import MethodSpec


@dataclass(frozen=True)
class Request:
    """One sample to be generated: its prompt as text and as tokens, and the seed of its random numbers. ``key``
    identifies it to the caller; ``reply`` holds the tokens of a right answer, whose log-probability is measured;
    ``stop`` holds texts that end the answer, which is cut before the first of them.
    """

    key: Any
    prompt: str
    ids: tuple[int, ...]
    seed: int = 0
    reply: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limit:
    """Maximum length of a sample.

    Attributes:
        max_new_tokens: limit of the answer alone; ``None`` for no such limit.
        max_total_tokens: limit of prompt and answer together; ``None`` for no such limit.

    Raises:
        ValueError: if a limit is below 1, or neither is given.
    """

    max_new_tokens: int | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, optional=True, max_new_tokens=1, max_total_tokens=1)
        if self.max_new_tokens is None and self.max_total_tokens is None:
            raise ValueError("neither max_new_tokens nor max_total_tokens is given; one of them must be")

    def of(self, prompt_tokens: int) -> int:
        """Maximum number of new tokens after a prompt of this length; 0 or less if there is no room."""
        total = None if self.max_total_tokens is None else self.max_total_tokens - prompt_tokens
        return min(limit for limit in (self.max_new_tokens, total) if limit is not None)

    def __str__(self) -> str:
        """The limit in words."""
        limits = {"new tokens": self.max_new_tokens, "tokens, prompt included": self.max_total_tokens}
        return "at most " + " and ".join(f"{limit} {what}" for what, limit in limits.items() if limit is not None)


@dataclass(frozen=True)
class Job:
    """One setting, and how its samples are generated.

    Attributes:
        batch_size: samples that a process generates together; as many as fit into memory if ``None``.
        prompt, longest: token ids of the longest prompt, and number of tokens of the longest sample (prompt included),
            from which memory is estimated.
        prefix: `common_prefix` of the prompts of all samples.
    """

    spec: MethodSpec
    batch_size: int | None
    prompt: tuple[int, ...]
    longest: int
    limit: Limit
    sampling: Sampling
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generation:
    """A finished sample.

    Attributes:
        completion: the generated text, without the end token.
        token_ids: the generated tokens, the end token included if there is one.
        finish_reason: ``"stop"`` (the end token or a stop text came) or ``"length"`` (the limit came first).
        seconds: its share of the wall-clock time; the time of each step is divided equally among its rows.
        costs: `RowStats.of`, empty if a server generated it; and ``reply_logprob`` if the request has a reply.
    """

    request: Request
    completion: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float
    costs: dict[str, Any]

    @classmethod
    def of(
        cls,
        request: Request,
        tokens: Sequence[int],
        ends: Collection[int],
        tokenizer: PreTrainedTokenizerBase,
        seconds: float,
        costs: dict[str, Any],
    ) -> Generation:
        """Make the sample from a request's generated tokens, which end with a token of ``ends`` or at the limit. They
        are cut behind the token that completes a text of ``request.stop``, if one does.
        """
        count = (i for i in range(1, len(tokens) + 1) if ends_in_stop(tokens[:i], request.stop, tokenizer))
        cut = next(count, None) if request.stop else None
        tokens, stopped = tokens[:cut], cut is not None or tokens[-1] in ends
        ended = tokens[-1] in ends
        text = text_of(tokens[:-1] if ended else tokens, tokenizer)
        text = text[: min((text.index(each) for each in request.stop if each in text), default=None)]
        return cls(request, text, tuple(tokens), "stop" if stopped else "length", seconds, costs)

    @property
    def n_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)


def text_of(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of tokens, with the space at its beginning that decoders like Llama 2's leave out."""
    text = str(tokenizer.decode(tokens, skip_special_tokens=False))
    # models may have more tokens than their tokenizer, which has no piece for them
    pieces = "".join(piece or "" for piece in tokenizer.convert_ids_to_tokens([int(token) for token in tokens]))
    spaces = len(pieces) - len(pieces.lstrip("\u2581"))
    return text if text.startswith(" " * spaces) else f" {text}"


def ends_in_stop(tokens: Sequence[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if one of the texts ``stop`` is complete with the last of the tokens, or has just been."""
    # a text of n bytes takes at most n tokens
    return bool(stop) and any(
        text in tokenizer.decode(tokens[-max(len(each.encode()) for each in stop) :]) for text in stop
    )
