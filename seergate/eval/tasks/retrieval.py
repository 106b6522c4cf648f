"""Tasks made from any text, without network: retrieval at any length and depth, and the text's own perplexity.

Retrieval is after RULER (Hsieh et al., 2024, arXiv:2404.06654).

The answer is hidden in a text at a depth of 0 % (the beginning) to 100 % (the end). The text has as many sentences as
fit if prompt and answer together have a given length in tokens of the model's tokenizer. By default the prompt ends
where the answer begins, so that base models can complete it; with ``chat`` the question is asked in a user's turn. A
problem is determined by the seed, its length, depth and number, and the text.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from string import ascii_uppercase
from typing import Any

from transformers import PreTrainedTokenizerBase

from seergate.checks import check_count
from seergate.errors import SeergateError
from seergate.eval.sampling import Sampling
from seergate.eval.tasks.prompts import encode, prompt_text
from seergate.eval.tasks.task import Problem, Task
from seergate.json_file import LINES, json_lines
from seergate.pretrained import beginning

_NAMES = """
Paris London Rome Madrid Berlin Vienna Prague Warsaw Budapest Lisbon Dublin Oslo Stockholm Helsinki Copenhagen
Brussels Amsterdam Athens Cairo Nairobi Lagos Tunis Dakar Lima Bogota Quito Havana Toronto Chicago Boston
Seattle Denver Dallas Tokyo Seoul Beijing Delhi Mumbai Bangkok Manila Jakarta Sydney Melbourne Auckland
"""
CITIES = _NAMES.split()
DEPTHS = (0, 25, 50, 75, 100)
SETTLING = 16
"""Tokens of a text between the prompt and the scored tokens; needed as some methods evict nothing at first."""
CUT = 32
"""Spare tokens of a piece of a long text, because it may have fewer tokens when it is tokenised alone."""
LONGEST = 30
"""Maximum words of a sentence; a longer one, which may be a table, is cut into parts of this length."""
LONGEST_TEXT = 500
"""Maximum characters of such a part: some scripts have no spaces."""
TOKENS_PER_ANSWER = 12
"""Estimated tokens of a number, a name or a key, and of the words between two of them."""


@dataclass(frozen=True)
class _Hidden:
    """Facts to hide in a text, and the question about them.

    Attributes:
        facts: (depth from 0 to 1, sentence); those of equal depth stay in their order.
        before, question: beginning and end of a chat's turn, before and after the text.
        completion: end of a prompt without chat, which the model continues with the answer.
        gold: right answers, which must all be given.
    """

    facts: Sequence[tuple[float, str]]
    before: str
    question: str
    completion: str
    gold: Sequence[str]

    def problem(self, name: str, start: str, chat: bool, fill: Callable[[int], list[str]], count: int) -> Problem:
        """The problem with ``count`` sentences of the text, which ``fill`` makes."""
        lines = fill(count)
        for depth, fact in sorted(self.facts, key=lambda fact: fact[0])[::-1]:
            lines.insert(round(depth * count), fact)
        text, gold = " ".join(lines), "\n".join(self.gold)
        if chat:
            turn = {"role": "user", "content": f"{self.before}\n\n{text}\n\n{self.question}"}
            return Problem(name, gold, messages=(turn,), reply=listed(self.gold))
        return Problem(name, gold, prompt=f"{start}{text}\n\n{self.completion}", reply=" " + listed(self.gold))


def needle(
    *,
    problems: int = 40,
    length: tuple[int, ...] = (4096,),
    depths: tuple[int, ...] = DEPTHS,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    chat: bool = False,
    data: str | None = None,
    seed: int = 0,
) -> Task:
    """A needle in a haystack: numbers of cities, hidden in a text (RULER's NIAH; with ``keys`` MK, ``values`` MV and
    ``queries`` MQ).

    Args:
        problems: number of problems, distributed over lengths and depths in turn.
        length: tokens of prompt and answer together.
        depths: positions of the first requested number, in percent of the text; others are at random positions.
        keys: number of cities that have numbers; at least ``queries``.
        values: numbers per city.
        queries: number of cities that the question asks for.
        chat: ask in a user's turn instead of ending the prompt with a sentence to complete.
        data: file with the text; the documentation that ships with Python if ``None``.
        seed: seed of all random choices.
    """
    if (drawn := max(keys, queries)) > len(CITIES):
        raise ValueError(f"keys is {keys} and queries {queries}; they must be at most {len(CITIES)}")

    def hide(random: Random, depth: float) -> _Hidden:
        cities = random.sample(CITIES, drawn)
        numbers = {city: [str(n) for n in random.sample(range(10_000, 100_000), values)] for city in cities}
        one = "The special magic number for" if values == 1 else "One of the special magic numbers for"
        facts = [(random.random(), f"{one} {city} is {number}.") for city in cities for number in numbers[city]]
        facts[0] = depth, facts[0][1]
        places, single = listed(cities[:queries]), values * queries == 1
        what = f"special magic number{'' if single else 's'} for {places}"
        return _Hidden(
            facts,
            "Some special magic numbers are hidden in the following text. Remember them; you will be asked for them.",
            f"What {'is the' if single else 'are all the'} {what} in the text above?",
            f"The {what} is" if single else f"The {what} in the text above are",
            [number for city in cities[:queries] for number in numbers[city]],
        )

    options = {"keys": keys, "values": values, "queries": queries}
    return _task("needle", hide, values * queries, problems, length, depths, chat, data, seed, options)


def variable_tracking(
    *,
    problems: int = 40,
    length: tuple[int, ...] = (4096,),
    chains: int = 1,
    hops: int = 4,
    chat: bool = False,
    data: str | None = None,
    seed: int = 0,
) -> Task:
    """Assignments of variables from each other, hidden in a text: which variables have a given value? (RULER's VT)

    Args:
        problems, length, chat, data, seed: see `needle`.
        chains: number of chains of assignments; the question asks for the first.
        hops: how often a chain's value is assigned to a further variable.
    """

    def hide(random: Random, depth: float) -> _Hidden:
        drawn = ["".join(random.choices(ascii_uppercase, k=5)) for _ in range(chains * (hops + 1))]
        numbers, facts = random.sample(range(10_000, 100_000), chains), list[tuple[float, str]]()
        for chain, number in enumerate(numbers):
            names = drawn[chain * (hops + 1) :][: hops + 1]
            values = [str(number), *(f"VAR {name}" for name in names)]
            places = sorted(random.random() for _ in names)
            facts += [(p, f"VAR {name} = {v}.") for p, name, v in zip(places, names, values, strict=False)]
        return _Hidden(
            facts,
            "Follow the assignments of variables that are hidden in the following text.",
            f"Which variables have the value {numbers[0]} in the text above?",
            f"By the assignments in the text above, {hops + 1} variables have the value {numbers[0]}. They are",
            drawn[: hops + 1],
        )

    options = {"chains": chains, "hops": hops}
    return _task("variable_tracking", hide, hops + 1, problems, length, (0,), chat, data, seed, options)


def perplexity(*, problems: int = 16, length: int = 2048, scored: int = 256, data: str | None = None) -> Task:
    """Texts whose last tokens are scored under a method, and compared with dense attention
    (`seergate.eval.teacher_forcing`).

    Args:
        problems: maximum number of texts, chosen evenly from all.
        length: tokens of each text, taken from its middle; shorter texts are left out.
        scored: number of tokens that are scored, at the end of each text.
        data: a ``.jsonl`` file of records with a ``text``; or another file, whose text is cut into pieces; the
            documentation that ships with Python if ``None``.
    """
    check_count("scored", scored, 1)
    if length < scored + SETTLING + 2:
        raise ValueError(f"length is {length}; it must be at least {scored + SETTLING + 2}, with scored {scored}")
    name, text = ("", "") if data and data.endswith(LINES) else text_of(data)

    def load(tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
        if text:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            step = length + CUT
            every = [str(tokenizer.decode(ids[i : i + step])) for i in range(0, len(ids), step)]
        else:
            every = list(texts_of(str(data)))
        long = [i for i, each in enumerate(every) if len(encode(tokenizer, each)) >= length]
        if not long:
            raise SeergateError(f"length is {length}; no text of {data or name} has as many tokens")
        chosen = dict.fromkeys(long[i * len(long) // problems] for i in range(problems))
        return [Problem(f"text-{i + 1}", "", prompt=every[i]) for i in chosen]

    return Task(
        name="perplexity",
        load=load,
        grader="",
        max_total_tokens=length,
        sampling=Sampling(),
        budgets=tuple(length // part for part in (8, 4, 2)),
        options={"length": length, "scored": scored, **({"file": data} if data else {"text": name})},
        by_tokens=True,
        scored=scored,
    )


def texts_of(path: str) -> Iterator[str]:
    """The texts of a ``.jsonl`` file; a `SeergateError` names the line that has none."""
    for number, record in json_lines(Path(path)):
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise SeergateError(f"{path}, line {number} has no 'text'")
        if record["text"].strip():
            yield record["text"]


def _task(
    name: str,
    hide: Callable[[Random, float], _Hidden],
    answers: int,
    problems: int,
    length: tuple[int, ...],
    depths: tuple[int, ...],
    chat: bool,
    data: str | None,
    seed: int,
    options: dict[str, Any],
) -> Task:
    """A task whose problems have given lengths in tokens."""
    for option, value in options.items():
        check_count(option, value, 1)
    if not length or min(length) < 1:
        raise ValueError(f"length is {length}; it must be positive numbers of tokens")
    if not depths or not all(0 <= depth <= 100 for depth in depths):
        raise ValueError(f"depths is {depths}; it must be percentages, 0 to 100")
    room = (24 if chat else 4) + TOKENS_PER_ANSWER * answers
    text_name, text = text_of(data)
    every = cache(lambda: sentences(text))

    def load(tokenizer: PreTrainedTokenizerBase) -> Iterator[Problem]:
        start = beginning(tokenizer)
        for i in range(problems):
            tokens, depth = length[i % len(length)], depths[i // len(length) % len(depths)]
            problem_id = f"{tokens}-{depth}-{i // (len(length) * len(depths))}"
            random = Random(f"{name}/{seed}/{problem_id}")
            hidden, fill = hide(random, depth / 100), _from(every(), random)
            build = partial(hidden.problem, problem_id, start, chat, fill)
            yield build(_largest_count(tokenizer, build, tokens - room, f"length is {tokens}"))

    return Task(
        name=name,
        load=load,
        grader="contains",
        max_new_tokens=room,
        sampling=Sampling(),
        budgets=tuple(min(length) // part for part in (8, 4, 2)),
        options={
            "problems": problems,
            "length": list(length),
            "depths": list(depths),
            **options,
            "chat": chat,
            "seed": seed,
            "text": text_name,
            **({"file": data} if data else {}),
        },
        by_tokens=True,
    )


def _largest_count(tokenizer: PreTrainedTokenizerBase, build: Callable[[int], Problem], tokens: int, what: str) -> int:
    """The largest number of sentences with which a problem's prompt has at most ``tokens`` tokens."""

    def size(count: int) -> int:
        return len(encode(tokenizer, prompt_text(tokenizer, build(count))))

    if (least := size(0)) > tokens:
        raise SeergateError(f"{what}; the question, the facts asked for and the answer alone take more ({least})")
    high = 1
    while size(high) <= tokens:
        high *= 2
    return bisect_right(range(high), tokens, lo=high // 2, key=size) - 1


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def text_of(data: str | None) -> tuple[str, str]:
    """Name and text of a file, or of the reference that Python's `help` shows (``pydoc_data.topics``)."""
    if data is None:
        from pydoc_data.topics import topics

        version = ".".join(map(str, sys.version_info[:3]))
        return f"pydoc_data.topics of Python {version}", "\n\n".join(topics[name] for name in sorted(topics))
    try:
        text = "\n\n".join(texts_of(data)) if data.endswith(LINES) else Path(data).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SeergateError(f"data is {data!r}, which cannot be read as text: {error}") from error
    if not text.strip():
        raise SeergateError(f"data is {data!r}, which holds no text")
    return Path(data).name, text


def sentences(text: str) -> list[str]:
    """The sentences of a text, none longer than `LONGEST` words or `LONGEST_TEXT` characters."""
    each = re.split(r"(?<=[.!?:])\s+|(?<=[。！？])\s*", " ".join(text.split()))
    words = (sentence.split() for sentence in each)
    parts = (" ".join(some[i : i + LONGEST]) for some in words for i in range(0, len(some), LONGEST))
    return [part[i : i + LONGEST_TEXT] for part in parts for i in range(0, len(part), LONGEST_TEXT)]


def _from(every: Sequence[str], random: Random) -> Callable[[int], list[str]]:
    """``count -> sentences`` from a random position in the text, which is repeated from its end."""
    first = random.randrange(len(every))
    return lambda count: [every[(first + i) % len(every)] for i in range(count)]
