"""Tasks: problems, a grader, and the length and number of answers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from seergate.checks import is_number
from seergate.errors import SeergateError
from seergate.eval.sampling import Sampling

Read = TypeVar("Read")


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        problem_id: unique within its task.
        gold: the right answer, in the form that the grader expects.
        messages: the conversation so far, for the model's chat template.
        prompt: the text to continue as it is, instead of ``messages``.
        reply: a right continuation, whose log-probability under the method is measured; none if empty.
    """

    problem_id: str
    gold: str
    messages: tuple[dict[str, str], ...] = ()
    prompt: str | None = None
    reply: str = ""


@dataclass(frozen=True)
class Task:
    """A declaration of a task.

    Attributes:
        name: such as ``"chain_sum"``.
        load: makes its problems; takes the model's tokenizer if ``by_tokens``.
        grader: a key of `seergate.eval.grading.graders.GRADERS`.
        max_new_tokens: default limit of an answer in tokens; ``None`` for no limit.
        max_total_tokens: default limit of prompt and answer together; ``None`` for no limit.
        samples: default number of answers per problem.
        sampling: default sampling; ``None`` for the model's generation configuration.
        chance: accuracy of guessing, if it matters.
        budgets: default token budgets of a comparison.
        options: the task's own options; pinned with the results.
        by_tokens: true if problems are made by the model's tokenizer: to a length in tokens, or with its first token.
        stop: texts that end an answer, which does not contain them.
        scored: number of scored tokens of each text, in a task that scores given texts instead of asking for answers.
            ``prompt`` holds the text, ``max_total_tokens`` are read, and there is no grader.
    """

    name: str
    load: Callable[..., Iterable[Problem]]
    grader: str
    max_new_tokens: int | None = None
    max_total_tokens: int | None = None
    samples: int = 1
    sampling: Sampling | None = None
    chance: float | None = None
    budgets: tuple[int, ...] = (1024, 2048, 4096, 6144)
    options: dict[str, Any] = field(default_factory=dict)
    by_tokens: bool = False
    stop: tuple[str, ...] = ()
    scored: int | None = None

    def bound(self, tokenizer: PreTrainedTokenizerBase) -> Task:
        """The same task with its problems made for a model's tokenizer, once."""
        if not self.by_tokens:
            return self
        return replace(self, load=cache(lambda: list(self.load(tokenizer))), by_tokens=False)

    def problems(self) -> list[Problem]:
        """All problems; a `SeergateError` if there are none, an id occurs twice, or a problem is incomplete."""
        problems = list(self.load())
        if not problems:
            raise SeergateError(f"the task {self.name!r} has no problems")
        seen: set[str] = set()
        for problem in problems:
            if problem.problem_id in seen:
                raise SeergateError(f"the task {self.name!r} has the problem id {problem.problem_id!r} twice")
            seen.add(problem.problem_id)
            if not isinstance(problem.problem_id, str) or not isinstance(problem.gold, str):
                raise SeergateError(
                    f"the task {self.name!r} has the problem {problem.problem_id!r} with the answer {problem.gold!r}; "
                    "both must be texts"
                )
            if bool(problem.prompt) == bool(problem.messages):
                raise SeergateError(f"the problem {problem.problem_id!r} must have either a prompt or messages")
        return problems


def read_each(
    records: Iterable[Mapping[str, Any]], read: Callable[[dict[str, Any], int], Read], where: str
) -> Iterator[Read]:
    """What ``read`` makes of each record and its number; a `SeergateError` names the record that it refuses."""
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise SeergateError(
                f"record {number} of {where} is of type {type(record).__name__}; it must be an object with fields"
            )
        try:
            made = read(dict(record), number)
        except KeyError as error:
            has = ", ".join(map(str, record))
            raise SeergateError(f"record {number} of {where} has no field {error}; it has {has}") from error
        except ValueError as error:
            raise SeergateError(f"record {number} of {where}: {error}") from error
        yield made


def as_text(field: str, value: object) -> str:
    """The text or finite number in a field, as a text; a `ValueError` for anything else."""
    number = is_number(value) and math.isfinite(value)
    if not number and not isinstance(value, str):
        raise ValueError(f"{field!r} is {value!r}; it must be a text or a finite number")
    if isinstance(value, float):  # the digits of its shortest form: 5 of 5.0, 0.00001 of 1e-05
        return format(Decimal(repr(float(value) + 0.0)).normalize(), "f")
    text = str(value)
    text.encode()  # a UnicodeEncodeError, which is a ValueError, for half a surrogate pair
    return text


def words(record: dict[str, Any], field: str) -> str:
    """The text or number in a field, which must not be blank."""
    text = as_text(field, record[field])
    if not text.strip():
        raise ValueError(f"{field!r} is blank; it must be a text or a finite number")
    return text


def digest_of(parts: Iterable[Any]) -> str:
    """Hash of parts, which are plain JSON types: sixteen hexadecimal digits of SHA-256."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part, ensure_ascii=False).encode())
    return digest.hexdigest()[:16]


def contents_hash(problems: list[Problem]) -> str:
    """Hash (`digest_of`) of problems before a model's chat template is applied."""
    return digest_of([p.problem_id, p.gold, p.messages, p.prompt] for p in problems)
