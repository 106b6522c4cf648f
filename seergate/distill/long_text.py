"""Training texts that refer far back.

The texts are windows of text files. Of every six, one is unchanged, four get facts that are stated in the first half
and repeated in the second, and one ends with verbatim quotes of its own passages. There the model attends to far
blocks, and gates learn to find them. The facts are not worded as in RULER, since the task `needle` tests that wording.
"""

from __future__ import annotations

import gzip
import random
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from seergate.errors import SeergateError

SUFFIXES = (".txt", ".md", ".rst", ".pod", ".py")
"""Suffixes of the files that are read; ``.gz`` may follow."""

NOT_FOR_TRAINING = {"pydoc_data", "site-packages", "dist-packages", "test", "__pycache__"}
"""Directories of Python's library that are not read: the text of the task `needle`, and optional parts."""

_NAMES = """
amber anchor basil cedar copper dahlia ember falcon fjord garnet harbor hazel indigo jasper kelp lantern lotus
maple meadow nectar onyx orchid pearl pebble quartz quince raven rowan saffron slate thistle topaz umber
velvet violet walnut willow yarrow zephyr
"""
NAMES = _NAMES.split()
FACTS = (
    ("The access code of {name} is {value}.", "As noted above, the access code of {name} is {value}."),
    ("Remember that locker {name} opens with {value}.", "To open locker {name}, one uses {value}."),
    ("{name}'s telephone extension: {value}.", "Call {name} at extension {value}."),
    ("Invoice {value} was issued to the {name} company.", "The {name} company was issued invoice {value}."),
    ('{name} = "{value}"', 'print({name})  # "{value}"'),
    ("In the register, {name} has the entry {value}.", "The entry of {name} in the register is {value}."),
)
"""Wordings of a fact: the statement and its repetition."""


def texts_here() -> list[Path]:
    """Return local files and directories of text: Python's library and the documentation of installed packages."""
    library = Path(sysconfig.get_path("stdlib"))
    folders = [path for path in sorted(library.iterdir()) if path.name not in NOT_FOR_TRAINING]
    return [path for path in (*folders, Path("/usr/share/doc")) if path.exists()]


def texts(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the text of each file, in the order of the paths."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if any(part.startswith(".") for part in file.relative_to(path).parts):
                continue  # hidden, as in .venv
            plain = file.name.removesuffix(".gz")
            if file.is_file() and plain.endswith(SUFFIXES):
                try:
                    data = gzip.decompress(file.read_bytes()) if plain != file.name else file.read_bytes()
                except (EOFError, OSError, zlib.error) as error:
                    raise SeergateError(f"{file} cannot be read: {error}") from error
                yield data.decode("utf-8", errors="replace")


def windows(text: str, size: int) -> Iterator[str]:
    """Yield parts of at least ``size`` characters that begin and end between words; the remainder is dropped."""
    part, length = list[str](), 0
    for match in re.finditer(r"\S{1,200}\s*", text):  # Chinese has no spaces
        part.append(match[0])
        length += len(match[0])
        if length >= size:
            yield "".join(part)
            part, length = [], 0


def value(rng: random.Random) -> str:
    """Return a random value: digits, two words, or letters and digits."""
    kind = rng.random()
    if kind < 0.5:
        return "".join(rng.choices("0123456789", k=rng.randint(4, 7)))
    if kind < 0.75:
        return " ".join(rng.sample(NAMES, 2))
    return "".join(rng.choices("ABCDEFGHJKLMNPRSTUVWXYZ23456789", k=6))


def _next_space(text: str, at: int) -> int:
    """Return the place of the first space from ``at`` on; ``at`` if none is near, as in Chinese."""
    place = text.find(" ", at, at + 200)
    return at if place < 0 else place


def with_facts(text: str, rng: random.Random) -> str:
    """Return the first 64 % of a text, with facts in the first half and repetitions in the second, about as long as
    the text. A text of 16,000 characters gets 24 facts and 90 repetitions, shorter texts fewer.
    """
    filler = text[: int(0.64 * len(text))]
    count = min(24, max(4, len(text) // 660))
    facts = [(name, value(rng), rng.choice(FACTS)) for name in rng.sample(NAMES, count)]
    places = [(rng.uniform(0.01, 0.5), 0, fact) for fact in facts]
    places += [(rng.uniform(0.52, 0.99), 1, rng.choice(facts)) for _ in range(len(text) // 178)]
    parts, at = [], 0
    for share, which, (name, given, wordings) in sorted(places):
        end = max(at, _next_space(filler, int(share * len(filler))))
        parts += [filler[at:end], "\n", wordings[which].format(name=name, value=given), "\n"]
        at = end
    return "".join([*parts, filler[at:]])


def with_quotes(text: str, rng: random.Random) -> str:
    """Return the first 70 % of a text, followed by quotes from it up to the length of the text."""
    first, size = text[: int(0.7 * len(text))], len(text)
    parts, length = [first], len(first)
    while length < size:
        count = min(rng.randint(100, 360), len(first) - 1)
        begin = _next_space(first, rng.randrange(len(first) - count))
        parts.append(f'\n\nAs quoted above: "{first[begin + 1 : begin + count]}"')
        length += len(parts[-1])
    return "".join(parts)


def referring_back(parts: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yield the windows; of every six, four get facts, one gets quotes and one is unchanged."""
    kinds = (with_facts, with_facts, None, with_facts, with_facts, with_quotes)
    for number, part in enumerate(parts):
        kind = kinds[number % len(kinds)]
        yield part if kind is None else kind(part, rng)
